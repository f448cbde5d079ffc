"""Private names of torch."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import fx
from torch._dispatch import python as dispatch
from torch.fx import _symbolic_trace
from torch.fx.experimental import _config as symbolic_config
from torch.nn.modules import module as nn_module
from torch.nn.modules import transformer
from torch.utils import _python_dispatch as python_dispatch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from graphplan._compat import place, private
from graphplan.errors import GraphplanError

_Function = TypeVar("_Function", bound=Callable[..., Any])

SERVED_BY = "_compiled_call_impl"
"""The attribute of a module that runs in place of its call; a trace runs the module's own code."""


def stages_go_backward() -> bool:
    """Whether stages of ``torch.distributed.pipelining`` that take integers too go backward: since 2.12."""
    return torch.__version__ >= "2.12"


def require_backward_stages() -> None:
    """Raise GraphplanError where :func:`stages_go_backward` is false."""
    if not stages_go_backward():
        raise GraphplanError(
            f"training over machines needs torch 2.12 or newer, and this is torch {torch.__version__}: its "
            "pipelining asks for gradients of all that crosses, and integers have none. Install a newer torch"
        )


def uncompiled(module: Any) -> Any:
    """The module of which ``torch.compile`` has made this one; itself, if it has not."""
    compiled = private(importlib.import_module("torch._dynamo"), "OptimizedModule", "torch")
    return private(module, "_orig_mod", "torch") if isinstance(module, compiled) else module


def compiled_as_constant(function: Callable[[], int]) -> Callable[[], int]:
    """As ``torch.compiler.assume_constant_result``, which imports all of dynamo to set one attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compiled(function: _Function) -> _Function:
    """Of calls of placed models: ``torch.compiler.disable`` imports all of dynamo, and takes its time."""
    frames = private(private(torch._C, "_dynamo", "torch"), "eval_frame", "torch")
    skip = private(private(frames, "_FrameAction", "torch"), "SKIP", "torch")
    strategy = private(frames, "_FrameExecStrategy", "torch")(skip, skip)
    private(frames, "set_code_exec_strategy", "torch")(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    why = "a placed model is not compiled from outside: give partition compile=True"
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    return function


def mask_reader() -> tuple[Any, str]:
    """What reads a mask of ``nn.Transformer`` to see whether it is causal: a kernel may be faster then."""
    return place(transformer, "_detect_is_causal_mask", "torch")


def in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    inside: bool = private(torch._C, "_current_graph_task_id", "torch")() != -1
    return inside


def run_after_backward(function: Callable[[], None]) -> bool:
    """Run a function at the end of the backward pass that this thread is in; whether it is in one."""
    if not in_backward():
        return False
    engine = private(torch.autograd.Variable, "_execution_engine", "torch")
    engine.queue_callback(function)
    return True


def call_of(module: torch.nn.Module) -> Any:
    """What runs in place of a module's call; None for its own."""
    return private(module, SERVED_BY, "torch")


def set_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Have a call of a module run this, as its ``compile()`` does; None for its own."""
    private(module, SERVED_BY, "torch")
    vars(module)[SERVED_BY] = call


def inference_switch() -> tuple[Any, str]:
    """What ``torch.inference_mode`` enters: code of torch and of models alike."""
    return place(torch._C, "_InferenceMode", "torch")


def backward_engine() -> tuple[Any, str]:
    """What ``torch.autograd.grad`` and ``backward`` call."""
    return place(torch.autograd, "_engine_run_backward", "torch")


def global_hooks() -> list[dict[int, Any]]:
    """The tables of hooks that every module runs around its forward or backward pass."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return [private(nn_module, f"_global_{kind}_hooks", "torch") for kind in kinds]


def list_weights_anew(module: torch.nn.RNNBase) -> None:
    """Have a recurrent layer compute with the weights that it has now: it keeps a list of them."""
    names: list[str] = private(module, "_flat_weights_names", "torch")
    vars(module)["_flat_weights"] = [getattr(module, name, None) for name in names]  # None as torch lists it


def gradient_hooks(parameter: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """What ``register_hook`` and ``register_post_accumulate_grad_hook`` have added to a parameter."""
    before = private(parameter, "_backward_hooks", "torch")
    after = private(parameter, "_post_accumulate_grad_hooks", "torch")
    return list((before or {}).values()), list((after or {}).values())


def copy_gradient_hooks(parameter: torch.Tensor, other: torch.Tensor) -> None:
    """Have the hooks of a parameter on another too, until they are removed."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = private(parameter, name, "torch")
        if hooks:
            setattr(other, name, hooks)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another."""
    return private(tensor, "_is_view", "torch")()


def accumulates(leaf: torch.autograd.graph.Node) -> bool:
    """Whether the backward pass under way adds to this leaf's gradient, or only finds those of others."""
    return private(torch._C, "_will_engine_execute_node", "torch")(leaf)


def may_share_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor can be given the ``data`` of another: their implementations are alike."""
    alike: bool = private(torch, "_has_compatible_shallow_copy_type", "torch")(tensor, other)
    return alike and not any(hasattr(one, "__tensor_flatten__") for one in (tensor, other))


def backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module has hooks of its backward pass, not those of its submodules."""
    return any(private(module, f"_backward_{kind}", "torch") for kind in ("hooks", "pre_hooks"))


def function_of(node: torch.autograd.function.BackwardCFunction) -> Any:
    """The ``torch.autograd.Function`` of which this is in a graph of autograd."""
    return private(node, "_forward_cls", "torch")


def storage_of(tensor: torch.Tensor) -> int:
    """What tensors of one memory have in common, on the meta device too."""
    return tensor.untyped_storage()._cdata


def holders_of_storage(tensor: torch.Tensor) -> int:
    """How many have the memory of a tensor: itself, tensors over the same memory, and what asks."""
    return int(private(torch._C, "_storage_Use_Count", "torch")(storage_of(tensor)))


def run_scan(*args: Any, **kwargs: Any) -> Any:
    """What ``scan`` runs on real tensors, also under modes: its rounds, and the results that they fill."""
    scans = importlib.import_module("torch._higher_order_ops.scan")  # the package has a function of this name
    return private(scans, "generic_scan", "torch")(*args, **kwargs)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of ``torch.func`` has wrapped a tensor: it has no memory of its own."""
    return private(torch._C._functorch, "is_functorch_wrapped_tensor", "torch")(tensor)


def in_transform() -> bool:
    """Whether this thread runs inside a transform of ``torch.func``."""
    level: int | None = private(torch._C._functorch, "maybe_current_level", "torch")()
    return level is not None


def in_forward_mode(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether this thread computes forward-mode gradients through any of these."""
    forward_ad = torch.autograd.forward_ad
    within: bool = private(forward_ad, "_current_level", "torch") >= 0
    return within and any(forward_ad.unpack_dual(one).tangent is not None for one in tensors)


def in_grad_transform() -> bool:
    """Whether one of them is ``torch.func.grad``, ``vjp`` or ``jacrev``."""
    functorch = torch._C._functorch
    levels = private(functorch, "get_interpreter_stack", "torch")() or ()
    return any(level.key() == functorch.TransformType.Grad for level in levels)


def in_replica() -> bool:
    """Whether this process runs the forward pass of a ``DistributedDataParallel``."""
    replicated = torch.nn.parallel.DistributedDataParallel
    return private(replicated, "_active_ddp_module", "torch") is not None


def forget_kernels(operation: Any) -> None:
    """Let an operation look for its kernels in ``py_kernels`` again."""
    private(operation, "_dispatch_cache", "torch").clear()


def read_functions() -> None:
    """Let ``torch.compile`` make its tables of torch's functions, if it has not yet.

    It makes them once, of what it finds: made during a capture, they would hold patches.
    """
    rules = importlib.import_module("torch._dynamo.trace_rules")  # late: it takes a second
    private(rules, "get_torch_obj_rule_map", "torch")()


def symbolic_kernels() -> AbstractContextManager[Any]:
    """A block in which operations on fake tensors of symbolic sizes are computed as in ``torch.export``."""
    return private(dispatch, "enable_python_dispatcher", "torch")()


def is_autocast(operation: torch._ops.OpOverload, kind: str) -> bool:
    """Whether autocast knows an operation on a type of device, and casts its arguments."""
    has_kernel = private(torch._C, "_dispatch_has_kernel_for_dispatch_key", "torch")
    return bool(has_kernel(operation.name(), f"Autocast{kind.upper()}"))


def is_exported() -> bool:
    """Whether this thread is in a trace of ``torch.export``, which torch says of the process alone."""
    kinds = private(torch._C, "_TorchDispatchModeKey", "torch")
    fakes = private(torch._C, "_get_dispatch_mode", "torch")
    return torch.compiler.is_exporting() and fakes(kinds.FAKE) is not None


def hide_tracer() -> None:
    """Inside a trace of ``torch.export``: take down the flag at which compiled functions refuse to run.

    Before torch 2.14 they refuse in all threads. The tracer itself does not look at it, and resets it at its
    end.
    """
    if hasattr(_symbolic_trace, "_set_is_fx_tracing"):
        _symbolic_trace._set_is_fx_tracing(False)
        return
    private(_symbolic_trace, "_is_fx_tracing_flag", "torch")
    _symbolic_trace._is_fx_tracing_flag = False


def restore_users(graph: fx.Graph) -> None:
    """Let nodes have all their users: export forgets those of what goes into a block of ``no_grad``."""
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def rename_node(node: fx.Node, name: str) -> None:
    """Give a node a name, of which its graph makes another where it is taken."""
    private(node, "_rename", "torch")(name)


def reserve_name(graph: fx.Graph, name: str) -> None:
    """Let no further node of a graph have a name; those that have it keep it."""
    if name.isidentifier():
        private(graph, "_graph_namespace", "torch").create_name(name, None)


def unbacked_like_backed() -> AbstractContextManager[Any]:
    """A block in which a trace takes no size for 0 or 1 by its example."""
    return private(symbolic_config, "patch", "torch")(backed_size_oblivious=True)


def parsed_move(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and the dtype that arguments of ``nn.Module.to`` mean."""
    device, dtype, _, _ = private(torch._C._nn, "_parse_to", "torch")(*args, **kwargs)
    return device, dtype


def call_without_compiled(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, but not what runs in place of its call."""
    return private(module, "_call_impl", "torch")(*args, **kwargs)


def current_mode() -> Any:
    """The innermost mode that intercepts operations; None without one."""
    return private(python_dispatch, "_get_current_dispatch_mode", "torch")()


def without_current_mode() -> AbstractContextManager[Any]:
    """A block without :func:`current_mode`."""
    return private(python_dispatch, "_pop_mode_temporarily", "torch")()


_stances: list[Any] = []  # of the blocks that are open, in the order in which they began
_stances_change = threading.Lock()


@contextmanager
def compiling(stance: Literal["default", "force_eager"]) -> Iterator[None]:
    """A block with a stance of ``torch.compile``, which has one for all threads: blocks may overlap.

    Under a mode, ``"force_eager"`` is right: a function that is met there is never compiled, then or later.
    """
    with _stances_change:
        own = torch.compiler.set_stance(stance)
        _stances.append(own)
    try:
        yield
    finally:
        with _stances_change:
            place = _stances.index(own)
            if later := _stances[place + 1 :]:
                later[0].prev = private(own, "prev", "torch")
            else:
                own.__exit__(None, None, None)
            del _stances[place]


def device_module() -> type:
    """A class of what torch asks of ``torch.NAME`` for a type of device that Python implements."""
    return private(backend_registration, "_DummyBackendModule", "torch")


def own_device_name() -> str:
    """What this process calls the PrivateUse1 type of device; ``"privateuseone"`` if nobody has named it."""
    return private(torch._C, "_get_privateuse1_backend_name", "torch")()


def name_own_device(name: str, module: Any) -> None:
    """Name the PrivateUse1 type of device for the process, and let Python implement it."""
    setup = private(backend_registration, "_setup_privateuseone_for_python_backend", "torch")
    setup(name, backend_module=module)


def tell_pytree(nodes: Mapping[type, pytree.NodeDef], until: ExitStack) -> None:
    """Let torch know these, instead of what it may know of their classes, until a stack is closed."""
    known: dict[type, Any] = private(pytree, "SUPPORTED_NODES", "torch")
    written: dict[type, Any] = private(pytree, "SUPPORTED_SERIALIZED_TYPES", "torch")
    kind = private(pytree, "_SerializeNodeDef", "torch")
    for cls, node in nodes.items():
        if known.get(cls) is not node:
            _set(written, cls, kind(cls, f"{cls.__module__}:{cls.__qualname__}", None, None), until)
            _set(known, cls, node, until)


def _set(table: dict[Any, Any], key: Any, value: Any, until: ExitStack) -> None:
    if key in table:
        until.callback(table.__setitem__, key, table[key])
    else:
        until.callback(table.pop, key, None)
    table[key] = value


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A process group of some ranks, with the timeout of the whole; None where these are all, in order.

    Every rank calls this.
    """
    whole = dist.group.WORLD
    if whole is None or list(ranks) == list(range(dist.get_world_size())):
        return None
    backend = private(whole, "_get_backend", "torch")(torch.device("cpu"))
    timeout = private(private(backend, "options", "torch"), "_timeout", "torch")
    return dist.new_group(sorted(ranks), timeout=timeout)


def mark_backward_nodes(roots: Sequence[Any]) -> None:
    """Let a trace know, of what autograd is about to run, the line and the module of the forward pass.

    Args:
        roots: the ``grad_fn`` from which backward starts.
    """
    tracing = importlib.import_module("torch._functorch._aot_autograd.logging_utils")  # late: it takes time
    private(tracing, "setup_stacktrace_preservation_hooks", "torch")(roots)
