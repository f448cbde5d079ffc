"""Explicit casts in the graph in place of autocast.

Before and after, for an operation that was traced in a block of ``torch.autocast("cpu", torch.bfloat16)``::

    linear = linear(x, w)       to = to.dtype(x, bfloat16)
                                to_1 = to.dtype(w, bfloat16)
                                linear = linear(to, to_1)

So the plan counts the bytes of cast tensors, and the graph computes the same on devices without autocast.
Torch alone knows which operations it casts, and to which dtype, for each type of device. So each operation
runs on fake tensors with autocast and without, and the casts that only the first run makes are inserted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan._compat.torch import is_autocast, symbolic_kernels
from graphplan.capture.source_lines import belong_with
from graphplan.devices.topology import CPU, SIMULATED
from graphplan.errors import NoGraphError
from graphplan.warnings import silenced

aten = torch.ops.aten

AUTOCAST = "autocast"
"""Key in the ``meta`` of a node: its enclosing autocast blocks, each (device type, dtype, enabled, ...)."""

_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled

_Casts = tuple[Mapping[int, torch.dtype], Sequence[Any] | None]
"""Position among ``all_input_nodes`` -> the dtype that autocast casts to; and the dtypes of the results, if
these casts alone do not lead to them."""


def write_casts(
    module: fx.GraphModule, weights: Set[str], ambient: torch.dtype | None, device_types: Sequence[str]
) -> None:
    """Insert the casts of autocast, in place.

    Args:
        module: a trace on the CPU, made under the ``ambient`` autocast.
        weights: names of the weights' nodes: each weight is cast once, as by autocast.
        ambient: the dtype of autocast around the call; None where it was off.
        device_types: types of the devices that will compute: a block for another type has no effect.

    Raises:
        NoGraphError: no casts of its arguments make an operation compute as under autocast.
    """
    accelerator = next((one for one in device_types if one not in (CPU, SIMULATED)), CPU)
    is_available = accelerator != CPU and getattr(torch, accelerator).is_available()
    weight_nodes = {node for node in module.graph.nodes if node.name in weights}
    caster = _Caster(weight_nodes, ambient, {CPU, accelerator}, accelerator if is_available else CPU)
    if ambient is not None or _has_blocks(module):
        caster.visit_all(module)


def _has_blocks(module: fx.GraphModule) -> bool:
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    return any(AUTOCAST in node.meta for graph in graphs for node in graph.nodes)


class _Caster:
    """Inserts casts, and updates the dtypes of the values that depend on them.

    Args:
        weights: the nodes of weights.
        ambient: the dtype of autocast around the call.
        device_types: the device types whose blocks have an effect.
        device_type: the device type by whose rules autocast casts.
    """

    def __init__(
        self, weights: Set[fx.Node], ambient: torch.dtype | None, device_types: Set[str], device_type: str
    ) -> None:
        self.weights, self.ambient = set(weights), ambient
        self.device_types, self.device_type = device_types, device_type
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.changed: set[fx.Node] = set()
        self.seen: dict[Any, _Casts] = {}

    def visit_all(self, module: fx.GraphModule) -> None:
        """Insert the casts of all operations, in order."""
        for node in [node for node in module.graph.nodes if node.op == "call_function"]:
            blocks = node.meta.pop(AUTOCAST, ())
            dtypes = [
                dtype if enabled else None
                for device_type, dtype, enabled, *_ in blocks
                if device_type in self.device_types
            ]
            if node.target is _GRAD_MODE:
                self._visit_block(module, node)
            else:
                self._visit(node, dtypes[-1] if dtypes else self.ambient)

    def _visit_block(self, module: fx.GraphModule, block: fx.Node) -> None:
        """Insert the casts in a block of another gradient mode, and update its inputs and results."""
        _, body, *operands = block.args
        inner = getattr(module, body.target)  # type: ignore[union-attr,arg-type]  # a get_attr node
        for placeholder, operand in zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True):
            placeholder.meta["val"] = operand.meta["val"]  # type: ignore[union-attr]  # a node
            for nodes in (self.changed, self.weights):
                if operand in nodes:
                    nodes.add(placeholder)
        self.visit_all(inner)
        block.meta["val"] = fx.map_arg(inner.graph.output_node().args[0], lambda node: node.meta["val"])
        self.changed.add(block)

    def _visit(self, node: fx.Node, dtype: torch.dtype | None) -> None:
        """Insert the casts of one operation, after all those before it."""
        value = node.meta.get("val")
        if not (_has_tensors(value) and any(_has_tensors(s.meta.get("val")) for s in node.all_input_nodes)):
            return
        casts, dtypes = ({}, None) if dtype is None else self._autocast(node, dtype)
        sources = node.all_input_nodes
        for position, to in casts.items():
            node.replace_input_with(sources[position], self._cast(sources[position], to, node))
        if dtypes is not None:
            value = _run_for(node, dtypes)
        elif not self.changed.isdisjoint(node.all_input_nodes):
            value = _run(node)
        if _dtypes(value) != _dtypes(node.meta.get("val")):
            node.meta["val"] = value
            self.changed.add(node)

    def _autocast(self, node: fx.Node, dtype: torch.dtype) -> _Casts:
        if any(source.op == "get_attr" for source in node.all_input_nodes):
            raise NoGraphError(f"{node.name!r} is a control-flow operation under autocast")
        arguments = fx.map_arg((node.args, node.kwargs), lambda source: _dtypes(source.meta.get("val")))
        key = (node.target, dtype, str(arguments))
        if key not in self.seen:
            self.seen[key] = self._find_casts(node, dtype)
        return self.seen[key]

    def _find_casts(self, node: fx.Node, dtype: torch.dtype) -> _Casts:
        with_autocast, plain = _Recorder(node, self.device_type), _Recorder(node, self.device_type)
        dtypes = _dtypes(with_autocast.run(dtype))
        _plain_dtypes(plain)
        casts: Mapping[int, torch.dtype] = {} if with_autocast.casts == plain.casts else with_autocast.casts
        if isinstance(node.target, OpOverload) and not is_autocast(node.target, self.device_type):
            # autocast casts inside a composite operation, such as einsum: cast all its floating-point inputs
            to = next(iter(with_autocast.casts.values()), dtype)
            casts = {} if with_autocast.count == plain.count else dict.fromkeys(_floating(node), to)
        plain_dtypes = _plain_dtypes(_Recorder(node, self.device_type, casts))
        return casts, None if plain_dtypes == dtypes else dtypes

    def _cast(self, source: fx.Node, dtype: torch.dtype, reader: fx.Node) -> fx.Node:
        """Return a cast of a value before a reader; one of a weight serves all readers."""
        if (source, dtype) in self.casts:
            return self.casts[source, dtype]
        with reader.graph.inserting_before(reader):
            cast = reader.graph.call_function(aten.to.dtype, (source, dtype))
        belong_with(cast, reader)
        cast.meta["val"] = _run(cast)
        self.changed.add(cast)
        if source in self.weights:
            self.casts[source, dtype] = cast
        return cast


class _Recorder(TorchDispatchMode):
    """Runs an operation on fakes of its arguments, on one device type, and records which of them are cast."""

    def __init__(
        self, node: fx.Node, device_type: str, casts: Mapping[int, torch.dtype] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.node, self.device_type, dtypes = node, device_type, casts or {}
        self.fakes = {
            source: _fake(source.meta.get("val"), device_type, dtypes.get(position))
            for position, source in enumerate(node.all_input_nodes)
        }
        self.position = {id(self.fakes[source]): i for i, source in enumerate(node.all_input_nodes)}
        self.casts: dict[int, torch.dtype] = {}
        self.count = 0  # casts of arguments and of intermediate results

    def run(self, dtype: torch.dtype | None) -> Any:
        """Return the results under autocast to ``dtype``; without autocast if it is None."""
        autocast = torch.autocast(self.device_type, dtype, enabled=dtype is not None, cache_enabled=False)
        with autocast, _mode(self.fakes.values()), symbolic_kernels(), torch.no_grad(), self:
            return _apply(self.node, self.fakes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_copy = func is aten._to_copy.default
        dtype = kwargs.get("dtype") if is_copy and id(args[0]) in self.position else None
        self.count += is_copy and "dtype" in kwargs
        # autocast casts to one dtype before the operation, which may itself cast its arguments to another
        if dtype is not None and set(self.casts.values()) <= {dtype}:
            self.casts.setdefault(self.position[id(args[0])], dtype)
        return func(*args, **kwargs)


def _floating(node: fx.Node) -> list[int]:
    """Return the positions of floating-point tensors among ``all_input_nodes``."""
    types = [_dtypes(source.meta.get("val")) for source in node.all_input_nodes]
    return [i for i, each in enumerate(types) if any(t is not None and t.is_floating_point for t in each)]


def _plain_dtypes(recorder: _Recorder) -> list[Any] | None:
    """Return the dtypes of the results without autocast; None if the operation rejects its arguments."""
    with silenced("torch._subclasses.fake_tensor"), suppress(RuntimeError):
        return _dtypes(recorder.run(None))
    return None


def _run(node: fx.Node) -> Any:
    """Run an operation, without autocast, on the fake values of its arguments."""
    values = {source: source.meta.get("val") for source in node.all_input_nodes}
    with torch.autocast(CPU, enabled=False), _mode(values.values()), symbolic_kernels(), torch.no_grad():
        return _apply(node, values)


def _run_for(node: fx.Node, dtypes: Sequence[Any]) -> Any:
    """Run an operation with these result dtypes: sums of half-precision values may be in float32."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any(argument.name == "dtype" for argument in schema.arguments):
        node.update_kwarg("dtype", dtypes[0])
        value = _run(node)
        if _dtypes(value) == dtypes:
            return value
    raise NoGraphError(
        f"autocast makes {node.target} return {dtypes}, which no cast of its arguments can achieve"
    )


def _apply(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _mode(values: Any) -> Any:
    return next(leaf.fake_mode for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, FakeTensor))


def _fake(value: Any, device_type: str, dtype: torch.dtype | None = None) -> Any:
    """Return new fake tensors of the sizes of a value, on a type of device, cast to ``dtype`` if given."""

    def empty(tensor: FakeTensor) -> torch.Tensor:
        with tensor.fake_mode:
            new = dtype or tensor.dtype
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=new, device=device_type)

    return pytree.tree_map_only(FakeTensor, empty, value)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))


def _dtypes(value: Any) -> list[Any]:
    return [getattr(leaf, "dtype", None) for leaf in pytree.tree_leaves(value)]
