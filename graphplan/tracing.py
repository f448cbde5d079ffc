"""Capture: a module and example inputs become a flat ``torch.fx`` graph over the module's weights.

The caller's model is never traced itself. A *twin* is: a deep copy whose parameters and buffers are
CPU tensors in untouched virtual memory, wherever the caller's are (a meta model, a model on an
accelerator), so that every capture happens on the CPU, costs no memory, and leaves the caller's model
as it was.

Three ways, tried in this order: ``transformers.exporters`` for transformers models, ``torch.export``
(non-strict) for everything with example inputs, ``torch.fx.symbolic_trace`` for a plain module
without them.
"""

from __future__ import annotations

import copy
import inspect
import logging
import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphplan.device import suspended
from graphplan.errors import CaptureError, GraphplanError, InputError
from graphplan.signature import (
    BoundCall,
    InputSignature,
    TensorLeaf,
    bind_call,
    leaf_names,
    register_dataclasses,
)

__all__ = [
    "Capture",
    "ModelWeights",
    "Twin",
    "capture",
    "finite_bound",
    "is_transformers_model",
    "modes_of",
    "tensor_bytes",
]


Prepare = Callable[[BoundCall], BoundCall]


@dataclass(frozen=True, slots=True)
class Capture:
    """A traced call.

    Attributes:
        module: holds the graph, and the submodules of its control-flow operations if any.
        weights: node name -> the weight's first name in the model.
        constants: name -> tensor: what the trace lifted out of the code, and is no attribute.
        inputs: node name of each leaf of the call, in order.
        out_spec: the structure of the result.
        signature: which calls this graph serves.
        method: ``"transformers"``, ``"export"`` or ``"symbolic_trace"``.
        sizes: symbol of each dynamic size -> the largest that the plan is for.
        prepare: from a call's arguments to those that were traced, where they differ.
    """

    module: fx.GraphModule
    weights: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: tuple[str, ...]
    out_spec: pytree.TreeSpec
    signature: InputSignature
    method: str
    sizes: dict[Any, int] = field(default_factory=dict)
    prepare: Prepare | None = None

    @property
    def graph(self) -> fx.Graph:
        """The graph: weights and inputs are placeholders, results one flat tuple."""
        return self.module.graph

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The flattened results: nodes, and constants that pass through."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]  # always a tuple


class ModelWeights:
    """The parameters and buffers of a model by name, with ties resolved.

    ``tensors`` maps each weight's first name to its tensor, ``names`` to all its names; ``first``
    maps every name to the first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[str, list[str]] = {}
        self.first: dict[str, str] = {}
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.persistent = set(model.state_dict(keep_vars=True))
        self.identities: dict[Any, str] = {}
        named = [*model.named_parameters(remove_duplicate=False)]
        named += model.named_buffers(remove_duplicate=False)  # type: ignore[arg-type]  # buffers are tensors
        for name, tensor in named:
            identity = _identity(tensor)
            first = self.identities.setdefault(identity, name)
            self.first[name] = first
            self.names.setdefault(first, []).append(name)
            self.tensors.setdefault(first, tensor)

    def sharing(self, name: str) -> list[str]:
        """First names of other weights that lie in the same memory as this one, in another shape."""
        memory = _memory(self.tensors[name])
        others = (n for n, t in self.tensors.items() if n != name and _memory(t) == memory)
        return [] if memory is None else list(others)


def _memory(tensor: torch.Tensor) -> Any:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type == "meta":
        return None
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for two tensors that are the same weight, whether one object or one memory."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, those of a wrapper's inner tensors included."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None and type(tensor) not in (torch.Tensor, nn.Parameter):
        names, _ = flatten()
        return sum(tensor_bytes(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


_ROOT_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def modes_of(module: nn.Module) -> tuple[bool, ...]:
    """Training or not, for each module of a tree, in the order of ``modules()``."""
    return tuple(part.training for part in module.modules())


class Twin:
    """A copy of a model to trace, with stand-ins for its weights.

    Attributes:
        module: the copy.
        weights: the caller's own weights, by name.
        signature: of the model's ``forward``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights = ModelWeights(model)
        self.signature = inspect.signature(model.forward)
        stand_ins = _stand_ins(model)
        try:
            self.module: nn.Module = copy.deepcopy(model, stand_ins)
        except (TypeError, RuntimeError, AttributeError) as error:
            raise CaptureError(
                f"{type(model).__name__} cannot be copied for tracing: {error}. A tensor attribute that is "
                "computed from parameters is the usual cause: make it a buffer, or a parametrization"
            ) from error
        for name in _ROOT_HOOKS:  # the placed module's own, which run around the graph
            vars(self.module).get(name, {}).clear()

    @property
    def modes(self) -> tuple[bool, ...]:
        """Training or not, for each module."""
        return modes_of(self.module)

    def set_modes(self, modes: Sequence[bool]) -> None:
        """Put each module of the copy in training or evaluation mode."""
        for module, training in zip(self.module.modules(), modes, strict=True):
            module.training = training

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundCall:
        """Arguments in canonical form."""
        return bind_call(self.signature, args, kwargs)


def _stand_ins(model: nn.Module) -> dict[int, torch.Tensor]:
    """Id of each weight -> a CPU tensor of its shape, in memory that is never touched.

    One mapping, as large as the largest weight, serves them all: tracing neither reads nor writes
    them, and the system provides a page only when it is written to.
    """
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    plain = {id(t): t for _, t in named if type(t) in (torch.Tensor, nn.Parameter)}
    largest = max((_span(t) * t.element_size() for t in plain.values()), default=0)
    memory = mmap.mmap(-1, max(largest, 1))
    found = {}
    for key, tensor in plain.items():
        twin = _virtual(tensor, memory)
        is_parameter = isinstance(tensor, nn.Parameter)
        found[key] = nn.Parameter(twin, tensor.requires_grad) if is_parameter else twin
    return found


def _span(tensor: torch.Tensor) -> int:
    """Elements between the first and the last, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _virtual(tensor: torch.Tensor, memory: mmap.mmap) -> torch.Tensor:
    count = _span(tensor)
    if not count:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count)
    return flat.as_strided(tensor.shape, tensor.stride())


def is_transformers_model(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers ``PreTrainedModel``; does not import transformers."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(model).__mro__
    )


def capture(
    twin: Twin,
    call: BoundCall | None,
    dynamic_shapes: Any = None,
    *,
    keep_grad: bool = False,
) -> Capture:
    """Trace one call.

    Args:
        twin: the copy to trace.
        call: the example inputs; None traces without (``symbolic_trace``).
        dynamic_shapes: as in ``torch.export``.
        keep_grad: trace with gradients enabled, so that ``detach`` and ``no_grad`` blocks stay.

    Raises:
        CaptureError: no way of capturing took it; the message has the reason of each.
        InputError: the model itself rejects the inputs.
    """
    if call is None:
        return _symbolic(twin)
    host = _on_cpu(call)
    with suspended():
        return _with_examples(twin, host, dynamic_shapes, keep_grad)


def _with_examples(twin: Twin, host: BoundCall, dynamic_shapes: Any, keep_grad: bool) -> Capture:
    reasons = []
    if is_transformers_model(twin.module) and not host.args and dynamic_shapes is None:
        try:
            return _through_transformers(twin, host, keep_grad)
        except ImportError as error:
            reasons.append(f"transformers.exporters: {error}")
        except Exception as error:  # the exporter runs the model's own code, which may raise anything
            reasons.append(f"transformers.exporters: {_first_line(error)}")
    try:
        return _through_export(twin, host, dynamic_shapes, keep_grad)
    except GraphplanError:
        raise
    except Exception as error:  # torch.export runs the model's own code, which may raise anything
        _reject_bad_inputs(twin, host)
        reasons.append(f"torch.export: {_first_line(error)}")
        name = type(twin.module).__name__
        raise CaptureError(f"{name} could not be captured:\n  " + "\n  ".join(reasons)) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _reject_bad_inputs(twin: Twin, call: BoundCall) -> None:
    """Tell a model that rejects its inputs from one that cannot be traced: run it on fake tensors."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    leaves = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, call.spec)
    try:
        with _quiet(), torch.no_grad(), mode:
            twin.module(*args, **kwargs)
    except Exception as error:  # the model's own code may raise anything
        if type(error).__module__.startswith("torch."):
            return  # a limit of fake tensors, which says nothing about the inputs
        given = ", ".join(
            f"{name}: {list(leaf.shape)} {leaf.dtype}"
            if isinstance(leaf, torch.Tensor)
            else f"{name}: {leaf!r}"
            for name, leaf in zip(leaf_names(call), call.leaves, strict=True)
        )
        raise InputError(
            f"{type(twin.module).__name__} rejects the example inputs ({given}): {_first_line(error)}"
        ) from error


def _on_cpu(call: BoundCall) -> BoundCall:
    def to_cpu(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type == "cpu":
            return leaf
        if leaf.device.type == "meta":
            return torch.zeros_like(leaf, device="cpu")
        return leaf.cpu()

    leaves = [to_cpu(leaf) for leaf in call.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, call.spec)
    return BoundCall(args, kwargs, tuple(leaves), call.spec)


_TALKATIVE = (
    "transformers",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.export",
)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the tracers' own warnings and log lines from the user, who did not call them."""
    silenced = [(logger, logger.level) for logger in map(logging.getLogger, _TALKATIVE)]
    for logger, _ in silenced:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in silenced:
            logger.setLevel(level)


def _grad(keep_grad: bool) -> torch.set_grad_enabled:
    return torch.set_grad_enabled(keep_grad)


def _through_export(twin: Twin, call: BoundCall, dynamic_shapes: Any, keep_grad: bool) -> Capture:
    module = twin.module
    own = vars(module).get("forward")
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        register_dataclasses(result)
        return result

    module.forward = forward  # on the twin alone
    try:
        with _quiet(), _grad(keep_grad):
            program = torch.export.export(
                module,
                call.args,
                dict(call.kwargs),
                dynamic_shapes=_by_name(twin, call, dynamic_shapes),
                strict=False,
            )
    finally:
        del module.forward
        if own is not None:
            module.forward = own
    return _from_program(program, call, twin, "export")


def _by_name(twin: Twin, call: BoundCall, dynamic_shapes: Any) -> Any:
    """``dynamic_shapes`` for the canonical call: named arguments became keyword arguments."""
    if dynamic_shapes is None or isinstance(dynamic_shapes, Mapping):
        if isinstance(dynamic_shapes, Mapping):
            unknown = set(dynamic_shapes) - set(twin.signature.parameters)
            if unknown and not any(p.kind is p.VAR_KEYWORD for p in twin.signature.parameters.values()):
                raise InputError(f"dynamic_shapes names {sorted(unknown)}, which forward does not take")
            if not call.args:
                return {name: dynamic_shapes.get(name) for name in call.kwargs}
        return dynamic_shapes
    if call.args:
        return tuple(dynamic_shapes)
    names = list(call.kwargs)
    given = list(dynamic_shapes)
    return {name: given[i] if i < len(given) else None for i, name in enumerate(names)}


def _through_transformers(twin: Twin, call: BoundCall, keep_grad: bool) -> Capture:
    from transformers.exporters.exporter_dynamo import (  # optional package
        DynamoConfig,
        DynamoExporter,
        register_cache_pytrees_for_model,
    )

    with _quiet(), _grad(keep_grad):
        register_cache_pytrees_for_model(twin.module)
        inputs = copy.copy(dict(call.kwargs))
        exported = DynamoExporter().export(twin.module, inputs, config=DynamoConfig(dynamic=False))
        program = exported.program
    traced = dict(program.example_inputs[1])
    dropped = [name for name in call.kwargs if name not in traced]
    if any(isinstance(call.kwargs[name], torch.Tensor) for name in dropped):
        raise CaptureError(f"the exporter drops {dropped}")
    prepare = _preparation(twin, set(traced) - set(call.kwargs), dropped)
    return _from_program(program, call, twin, "transformers", prepare=prepare, traced=traced)


def _preparation(twin: Twin, added: set[str], dropped: Sequence[str]) -> Prepare | None:
    """What the exporter does to a call's arguments before it traces: to be done to later calls too."""
    if added:
        return partial(_prepare_for_export, twin.module)
    if dropped:
        return partial(_without, tuple(dropped))
    return None


def _prepare_for_export(module: nn.Module, call: BoundCall) -> BoundCall:
    from transformers.exporters.utils import prepare_for_export  # optional package

    return _bound(prepare_for_export(module, dict(_on_cpu(call).kwargs))[1])


def _without(names: tuple[str, ...], call: BoundCall) -> BoundCall:
    return _bound({name: value for name, value in call.kwargs.items() if name not in names})


def _from_program(
    program: torch.export.ExportedProgram,
    call: BoundCall,
    twin: Twin,
    method: str,
    *,
    prepare: Prepare | None = None,
    traced: Mapping[str, Any] | None = None,
) -> Capture:
    kinds = torch.export.graph_signature.InputKind
    weights: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs: list[str] = []
    for spec in program.graph_signature.input_specs:
        node = spec.arg.name
        if spec.kind is kinds.USER_INPUT:
            inputs.append(node)
        elif spec.kind in (kinds.PARAMETER, kinds.BUFFER):
            assert spec.target is not None
            weights[node] = twin.weights.first[spec.target]
        elif spec.kind is kinds.CONSTANT_TENSOR:
            assert spec.target is not None
            tensor = program.constants[spec.target]
            # a patched forward may reach the caller's own weights past the twin
            known = twin.weights.identities.get(_identity(tensor))
            weights[node] = spec.target if known is None else known
            if known is None:
                constants[spec.target] = tensor
        else:
            raise CaptureError(f"the trace has an input of kind {spec.kind.name}, which cannot be placed")
    _flatten_outputs(program)
    bound = call if traced is None else _bound(traced)
    if len(bound.leaves) != len(inputs):
        raise CaptureError(f"the trace takes {len(inputs)} inputs, the call has {len(bound.leaves)}")
    signature = _input_signature(program, bound, inputs)
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    return Capture(
        program.graph_module,
        weights,
        constants,
        tuple(inputs),
        out_spec,
        signature if traced is None else _with_flags(signature, call),
        method,
        _largest_sizes(program, inputs, signature),
        prepare,
    )


def _bound(traced: Mapping[str, Any]) -> BoundCall:
    leaves, spec = pytree.tree_flatten(((), dict(traced)))
    return BoundCall((), dict(traced), tuple(leaves), spec)


def _with_flags(signature: InputSignature, call: BoundCall) -> InputSignature:
    """The signature of the caller's call, whose output flags (``use_cache``) the exporter took out."""
    known = dict(zip(signature.names, signature.leaves, strict=True))
    names = leaf_names(call)
    leaves = tuple(known.get(name, _leaf(leaf, None)) for name, leaf in zip(names, call.leaves, strict=True))
    return InputSignature(call.spec, leaves, names)


def _flatten_outputs(program: torch.export.ExportedProgram) -> None:
    """Let the graph return what the caller gets, and no more."""
    kinds = torch.export.graph_signature.OutputKind
    node = program.graph.output_node()
    flat = []
    for spec, arg in zip(program.graph_signature.output_specs, node.args[0], strict=True):
        if spec.kind is kinds.USER_OUTPUT:
            flat.append(arg)
        elif spec.kind is not kinds.BUFFER_MUTATION:
            raise CaptureError(f"the trace has an output of kind {spec.kind.name}")
    node.args = (tuple(flat),)


def _input_signature(
    program: torch.export.ExportedProgram, call: BoundCall, inputs: Sequence[str]
) -> InputSignature:
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    leaves = tuple(
        _leaf(leaf, nodes[name].meta.get("val"), program.range_constraints)
        for leaf, name in zip(call.leaves, inputs, strict=True)
    )
    return InputSignature(call.spec, leaves, leaf_names(call))


def _leaf(leaf: Any, val: Any, ranges: Mapping[Any, Any] | None = None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    stride = None if leaf.is_contiguous() else leaf.stride()
    if not isinstance(val, torch.Tensor):
        return TensorLeaf(leaf.dtype, tuple(leaf.shape), (), stride)
    shape: list[int | None] = []
    bounds: list[tuple[int, int] | None] = []
    for size in val.shape:
        symbol = getattr(size, "node", None)  # a torch.SymInt has one
        shape.append(int(size) if symbol is None else None)
        found = None if symbol is None else (ranges or {}).get(symbol.expr)
        here = leaf.shape[len(bounds)]
        bounds.append(None if symbol is None else _bounds(found, here))
    return TensorLeaf(val.dtype, tuple(shape), tuple(bounds), stride)


def _bounds(found: Any, example: int) -> tuple[int, int]:
    """Smallest and largest size; the example's is the largest where none was given."""
    if found is None:
        return 0, example
    largest = finite_bound(found.upper)
    return int(found.lower), example if largest is None else largest


def finite_bound(bound: Any) -> int | None:
    """An upper bound of the tracer's as an int; None where it is none."""
    try:
        number = int(bound)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number < _UNBOUNDED else None


_UNBOUNDED = 1 << 48  # what torch writes for a size without an upper bound is above this


def _largest_sizes(
    program: torch.export.ExportedProgram, inputs: Sequence[str], signature: InputSignature
) -> dict[Any, int]:
    """Each symbol of an input's sizes -> the largest that the signature admits."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found: dict[Any, int] = {}
    for name, leaf in zip(inputs, signature.leaves, strict=True):
        val = nodes[name].meta.get("val")
        if not isinstance(leaf, TensorLeaf) or not isinstance(val, torch.Tensor):
            continue
        for size, bounds in zip(val.shape, leaf.ranges, strict=False):
            if bounds is not None and isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found[size.node.expr] = max(found.get(size.node.expr, 0), bounds[1])
    return found


class _OpenTracer(fx.Tracer):
    """Traces into torch's weight-bearing layers, so that their weights are the graph's to place.

    Its other layers stay whole: many of them decide by the sizes of what they get.
    """

    OPEN = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) and not isinstance(m, self.OPEN)


def _symbolic(twin: Twin) -> Capture:
    parameters = twin.signature.parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise CaptureError(
            f"{type(twin.module).__name__}.forward{twin.signature} takes any number of arguments: "
            "give example inputs (args=..., kwargs=...)"
        )
    concrete = {p.name: p.default for p in parameters if p.default is not p.empty}
    required = [p.name for p in parameters if p.default is p.empty]
    try:
        with _quiet():
            graph = _OpenTracer().trace(twin.module, concrete_args=concrete)
    except Exception as error:  # tracing runs the model's own code, which may raise anything
        raise CaptureError(
            f"{type(twin.module).__name__} cannot be traced without example inputs "
            f"({_first_line(error)}): give args=... or kwargs=..."
        ) from error
    return _from_symbolic(twin, graph, required)


def _from_symbolic(twin: Twin, graph: fx.Graph, required: Sequence[str]) -> Capture:
    weights: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs = []
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if node.target in required:
                inputs.append(node.name)
            elif not node.users:
                graph.erase_node(node)
        elif node.op == "get_attr":
            first = twin.weights.first.get(node.target)
            if first is None:
                value = _attribute(twin.module, node.target)
                if not isinstance(value, torch.Tensor):
                    continue
                constants[node.target] = value
                first = node.target
            weights[node.name] = first
    output = graph.output_node()
    results = _plain(output.args[0])
    register_dataclasses(results)
    flat, out_spec = pytree.tree_flatten(results)
    output.args = (tuple(flat),)
    spec = pytree.tree_flatten(((), dict.fromkeys(required, 0)))[1]
    signature = InputSignature(spec, (None,) * len(required), tuple(required), symbolic=True)
    module = fx.GraphModule(twin.module, graph)
    return Capture(module, weights, constants, tuple(inputs), out_spec, signature, "symbolic_trace")


def _plain(results: Any) -> Any:
    """Fx keeps a graph's arguments immutable: give back the containers that the model made."""
    if isinstance(results, dict):
        return {key: _plain(value) for key, value in results.items()}
    if isinstance(results, fx.immutable_collections.immutable_list):
        return [_plain(value) for value in results]
    if type(results) is tuple:
        return tuple(_plain(value) for value in results)
    return results


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
