"""Private names of torch."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import fx
from torch._dispatch import python as dispatch
from torch.fx import _symbolic_trace
from torch.fx.experimental import _config as symbolic_config
from torch.nn.modules import module as nn_module
from torch.nn.modules import transformer
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _python_dispatch as python_dispatch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from graphplan._compat import patch_target, private
from graphplan.errors import GraphplanError

_Function = TypeVar("_Function", bound=Callable[..., Any])

SERVED_BY = "_compiled_call_impl"
"""The attribute of a module with the function that runs in place of its call, except in a trace."""


def stages_go_backward() -> bool:
    """Whether pipelining stages with integer inputs support a backward pass, as they do since torch 2.12."""
    return torch.__version__ >= "2.12"


def require_backward_stages() -> None:
    """Raise GraphplanError if :func:`stages_go_backward` is false."""
    if not stages_go_backward():
        raise GraphplanError(
            f"training over machines needs torch 2.12 or newer, and this is torch {torch.__version__}: its "
            "pipelining needs gradients of all tensors sent, and integers have none. Install a newer torch"
        )


def uncompiled(module: Any) -> Any:
    """Return the module that ``torch.compile`` has wrapped; the module itself if it is not compiled."""
    compiled = private(importlib.import_module("torch._dynamo"), "OptimizedModule", "torch")
    return private(module, "_orig_mod", "torch") if isinstance(module, compiled) else module


def compiled_as_constant(function: Callable[[], int]) -> Callable[[], int]:
    """Do as ``torch.compiler.assume_constant_result``, which imports all of dynamo to set one attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compiled(function: _Function) -> _Function:
    """Exclude a function from ``torch.compile``; ``torch.compiler.disable`` would import all of dynamo."""
    frames = private(private(torch._C, "_dynamo", "torch"), "eval_frame", "torch")
    skip = private(private(frames, "_FrameAction", "torch"), "SKIP", "torch")
    strategy = private(frames, "_FrameExecStrategy", "torch")(skip, skip)
    private(frames, "set_code_exec_strategy", "torch")(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    reason = "a placed model is not compiled from outside: give partition compile=True"
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


def mask_reader() -> tuple[Any, str]:
    """Return the patch target for the function that checks if a mask of ``nn.Transformer`` is causal."""
    return patch_target(transformer, "_detect_is_causal_mask", "torch")


def in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    is_running: bool = private(torch._C, "_current_graph_task_id", "torch")() != -1
    return is_running


def run_after_backward(function: Callable[[], None]) -> bool:
    """Run a function at the end of this thread's backward pass; return whether there is one."""
    if not in_backward():
        return False
    engine = private(torch.autograd.Variable, "_execution_engine", "torch")
    engine.queue_callback(function)
    return True


def call_of(module: torch.nn.Module) -> Any:
    """Return the function that runs in place of a module's call; None for its own code."""
    return private(module, SERVED_BY, "torch")


def set_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace a module's call, as its ``compile()`` does; None restores its own code."""
    private(module, SERVED_BY, "torch")
    vars(module)[SERVED_BY] = call


def inference_switch() -> tuple[Any, str]:
    """Return the patch target for the mode that ``torch.inference_mode`` enters, in all code."""
    return patch_target(torch._C, "_InferenceMode", "torch")


def backward_engine() -> tuple[Any, str]:
    """Return the patch target for the engine that ``torch.autograd.grad`` and ``backward`` call."""
    return patch_target(torch.autograd, "_engine_run_backward", "torch")


def global_hooks() -> list[dict[int, Any]]:
    """Return the tables of hooks that every module runs around its forward or backward pass."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return [private(nn_module, f"_global_{kind}_hooks", "torch") for kind in kinds]


def refresh_flat_weights(module: torch.nn.RNNBase) -> None:
    """Make a recurrent layer compute with its current weights, of which it keeps a separate list."""
    names: list[str] = private(module, "_flat_weights_names", "torch")
    vars(module)["_flat_weights"] = [getattr(module, name, None) for name in names]  # None as torch lists it


def gradient_hooks(parameter: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Return a parameter's hooks of ``register_hook`` and of ``register_post_accumulate_grad_hook``."""
    before = private(parameter, "_backward_hooks", "torch")
    after = private(parameter, "_post_accumulate_grad_hooks", "torch")
    return list((before or {}).values()), list((after or {}).values())


def copy_gradient_hooks(parameter: torch.Tensor, other: torch.Tensor) -> None:
    """Give another parameter the same tables of hooks; removing a hook removes it from both."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = private(parameter, name, "torch")
        if hooks:
            setattr(other, name, hooks)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd treats a tensor as a view of another."""
    return private(tensor, "_is_view", "torch")()


def accumulates(leaf: torch.autograd.graph.Node) -> bool:
    """Whether the current backward pass adds to this leaf's gradient, not only to those of others."""
    return private(torch._C, "_will_engine_execute_node", "torch")(leaf)


def may_share_data(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``tensor.data = other.data`` is possible: both have the same kind of implementation."""
    compatible: bool = private(torch, "_has_compatible_shallow_copy_type", "torch")(tensor, other)
    return compatible and not any(hasattr(one, "__tensor_flatten__") for one in (tensor, other))


def backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module itself, not a submodule, has hooks of its backward pass."""
    return any(private(module, f"_backward_{kind}", "torch") for kind in ("hooks", "pre_hooks"))


def function_of(node: torch.autograd.function.BackwardCFunction) -> Any:
    """Return the ``torch.autograd.Function`` class of a node of autograd's graph."""
    return private(node, "_forward_cls", "torch")


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; it is equal for tensors over one storage, also on meta."""
    return tensor.untyped_storage()._cdata


def holders_of_storage(tensor: torch.Tensor) -> int:
    """Return the reference count of a tensor's storage: all tensors over it, and this query."""
    return int(private(torch._C, "_storage_Use_Count", "torch")(storage_of(tensor)))


def run_scan(*args: Any, **kwargs: Any) -> Any:
    """Run ``scan`` as on real tensors, step by step into preallocated results, also under modes."""
    scans = importlib.import_module("torch._higher_order_ops.scan")  # the package has a function named scan
    return private(scans, "generic_scan", "torch")(*args, **kwargs)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the wrapper of a ``torch.func`` transform, which has no memory of its own."""
    return private(torch._C._functorch, "is_functorch_wrapped_tensor", "torch")(tensor)


def in_transform() -> bool:
    """Whether this thread runs inside a transform of ``torch.func``."""
    level: int | None = private(torch._C._functorch, "maybe_current_level", "torch")()
    return level is not None


def in_forward_mode(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether this thread computes forward-mode gradients through any of these."""
    forward_ad = torch.autograd.forward_ad
    is_active: bool = private(forward_ad, "_current_level", "torch") >= 0
    return is_active and any(forward_ad.unpack_dual(one).tangent is not None for one in tensors)


def in_grad_transform() -> bool:
    """Whether this thread runs inside ``torch.func.grad``, ``vjp`` or ``jacrev``."""
    functorch = torch._C._functorch
    levels = private(functorch, "get_interpreter_stack", "torch")() or ()
    return any(level.key() == functorch.TransformType.Grad for level in levels)


def in_replica() -> bool:
    """Whether this process runs the forward pass of a ``DistributedDataParallel``."""
    replicated = torch.nn.parallel.DistributedDataParallel
    return private(replicated, "_active_ddp_module", "torch") is not None


def forget_kernels(operation: Any) -> None:
    """Clear an operation's dispatch cache, so that the next call reads ``py_kernels``."""
    private(operation, "_dispatch_cache", "torch").clear()


def read_functions() -> None:
    """Make ``torch.compile`` build its tables of torch's functions, which it does only once.

    If built during a capture, they would hold patched functions.
    """
    rules = importlib.import_module("torch._dynamo.trace_rules")  # here because it takes a second
    private(rules, "get_torch_obj_rule_map", "torch")()


def symbolic_kernels() -> AbstractContextManager[Any]:
    """Return a context manager that runs operations on symbolic fake tensors as ``torch.export`` does."""
    return private(dispatch, "enable_python_dispatcher", "torch")()


def is_autocast(operation: torch._ops.OpOverload, device_type: str) -> bool:
    """Whether autocast on a device type has a kernel for an operation, which casts its arguments."""
    has_kernel = private(torch._C, "_dispatch_has_kernel_for_dispatch_key", "torch")
    return bool(has_kernel(operation.name(), f"Autocast{device_type.upper()}"))


def is_exported() -> bool:
    """Whether this thread is in a trace of ``torch.export``; torch's own flag is for the whole process."""
    kinds = private(torch._C, "_TorchDispatchModeKey", "torch")
    fakes = private(torch._C, "_get_dispatch_mode", "torch")
    return torch.compiler.is_exporting() and fakes(kinds.FAKE) is not None


def hide_tracer() -> None:
    """Clear the flag of a ``torch.export`` trace that makes compiled functions refuse to run.

    Before torch 2.14 they refuse in all threads. The tracer itself does not read the flag, and resets it when
    it ends.
    """
    if hasattr(_symbolic_trace, "_set_is_fx_tracing"):
        _symbolic_trace._set_is_fx_tracing(False)
        return
    private(_symbolic_trace, "_is_fx_tracing_flag", "torch")
    _symbolic_trace._is_fx_tracing_flag = False


def restore_users(graph: fx.Graph) -> None:
    """Complete the users of each node: export forgets those of nodes that a ``no_grad`` block reads."""
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def rename_node(node: fx.Node, name: str) -> None:
    """Rename a node; its graph changes the name if it is taken."""
    private(node, "_rename", "torch")(name)


def reserve_name(graph: fx.Graph, name: str) -> None:
    """Reserve a name, so that no new node of a graph gets it."""
    if name.isidentifier():
        private(graph, "_graph_namespace", "torch").create_name(name, None)


def unbacked_like_backed() -> AbstractContextManager[Any]:
    """Return a context manager in which a trace does not specialize sizes that are 0 or 1 in the example."""
    return private(symbolic_config, "patch", "torch")(backed_size_oblivious=True)


def parsed_move(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype in the arguments of ``nn.Module.to``."""
    device, dtype, _, _ = private(torch._C._nn, "_parse_to", "torch")(*args, **kwargs)
    return device, dtype


def call_without_compiled(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module's own code with its hooks, without the replacement by :func:`set_call`."""
    return private(module, "_call_impl", "torch")(*args, **kwargs)


def current_mode() -> Any:
    """Return the innermost dispatch mode, or None."""
    return private(python_dispatch, "_get_current_dispatch_mode", "torch")()


def without_current_mode() -> AbstractContextManager[Any]:
    """Return a context manager that disables :func:`current_mode`."""
    return private(python_dispatch, "_pop_mode_temporarily", "torch")()


@contextmanager
def unobserved() -> Iterator[None]:
    """Context manager for a trial, which ``torch.jit.trace`` and the user's dispatch modes do not see."""
    set_tracing = private(torch._C, "_set_tracing_state", "torch")
    tracing = private(torch._C, "_get_tracing_state", "torch")()
    set_tracing(None)
    try:
        with ExitStack() as stack:
            while (mode := current_mode()) is not None and not getattr(mode, "simulates", False):
                stack.enter_context(without_current_mode())
            yield
    finally:
        set_tracing(tracing)


_stances: list[Any] = []  # of the open blocks, in the order in which they began
_stances_change = threading.Lock()


@contextmanager
def compiling(stance: Literal["default", "force_eager"]) -> Iterator[None]:
    """Context manager that sets the stance of ``torch.compile``; blocks of several threads may overlap.

    The stance is one for all threads. Use ``"force_eager"`` under a dispatch mode: a function that dynamo
    meets there would never be compiled, even later.
    """
    with _stances_change:
        stance_block = torch.compiler.set_stance(stance)
        _stances.append(stance_block)
    try:
        yield
    finally:
        with _stances_change:
            index = _stances.index(stance_block)
            if later_blocks := _stances[index + 1 :]:
                later_blocks[0].prev = private(stance_block, "prev", "torch")
            else:
                stance_block.__exit__(None, None, None)
            del _stances[index]


def device_module() -> type:
    """Return torch's base class for the module ``torch.NAME`` of a device type implemented in Python."""
    return private(backend_registration, "_DummyBackendModule", "torch")


def own_device_name() -> str:
    """Return this process's name for the PrivateUse1 device type; ``"privateuseone"`` if it has none."""
    return private(torch._C, "_get_privateuse1_backend_name", "torch")()


def name_own_device(name: str, module: Any) -> None:
    """Name the PrivateUse1 device type for the process, and set the module that implements it."""
    setup = private(backend_registration, "_setup_privateuseone_for_python_backend", "torch")
    setup(name, backend_module=module)


def register_pytree_nodes(nodes: Mapping[type, pytree.NodeDef], until: ExitStack) -> None:
    """Register pytree nodes, over existing ones of the same classes, until a stack is closed."""
    registered: dict[type, Any] = private(pytree, "SUPPORTED_NODES", "torch")
    serialized: dict[type, Any] = private(pytree, "SUPPORTED_SERIALIZED_TYPES", "torch")
    node_class = private(pytree, "_SerializeNodeDef", "torch")
    for cls, node in nodes.items():
        if registered.get(cls) is not node:
            _set(serialized, cls, node_class(cls, f"{cls.__module__}:{cls.__qualname__}", None, None), until)
            _set(registered, cls, node, until)


def _set(table: dict[Any, Any], key: Any, value: Any, until: ExitStack) -> None:
    if key in table:
        until.callback(table.__setitem__, key, table[key])
    else:
        until.callback(table.pop, key, None)
    table[key] = value


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether a process group can send tensors in CPU memory."""
    return torch.device("cpu") in private(group, "_device_types", "torch")


def new_cpu_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a new gloo group of some ranks, with the default group's timeout; every rank must call this."""
    world = dist.group.WORLD
    options = private(_backend(world, private(world, "_device_types", "torch")[0]), "options", "torch")
    return dist.new_group(sorted(ranks), backend="gloo", timeout=private(options, "_timeout", "torch"))


@contextmanager
def with_timeout(group: dist.ProcessGroup, timeout: timedelta) -> Iterator[None]:
    """Context manager in which a group with a CPU backend waits longer, or less long, for other ranks."""
    backend = _backend(group, torch.device("cpu"))
    earlier = private(private(backend, "options", "torch"), "_timeout", "torch")
    private(backend, "_set_default_timeout", "torch")(timeout)
    try:
        yield
    finally:
        private(backend, "_set_default_timeout", "torch")(earlier)


def _backend(group: Any, device: torch.device) -> Any:
    return private(group, "_get_backend", "torch")(device)


@contextmanager
def receive_buffers(stages: Iterable[Any]) -> Iterator[None]:
    """Context manager for a step of pipelining stages, outside of which they keep no receive buffers."""

    def move(device: str) -> None:
        for stage in stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                for info in infos:
                    if getattr(info, "buffer", None) is not None:  # torch 2.11 has none for the first stage
                        moved = torch.empty_like(info.buffer, device=device)
                        info.buffer = moved.requires_grad_(info.buffer.requires_grad)

    move("cpu")
    try:
        yield
    finally:
        move("meta")


def mark_backward_nodes(roots: Sequence[Any]) -> None:
    """Make a trace annotate backward nodes with the line and module of their forward operations.

    Args:
        roots: each ``grad_fn`` from which the backward pass starts.
    """
    tracing = importlib.import_module("torch._functorch._aot_autograd.logging_utils")  # here: it is slow
    private(tracing, "setup_stacktrace_preservation_hooks", "torch")(roots)


def computed_weight(hook: Any) -> str | None:
    """Return the attribute that a hook of ``torch.nn.utils`` computes before each call; None for others."""
    if isinstance(hook, WeightNorm | SpectralNorm):
        return hook.name
    return private(hook, "_tensor_name", "torch") if isinstance(hook, BasePruningMethod) else None
