"""What autocast does becomes part of the graph: casts, and operations that need no autocast.

Before and after, for a block of ``torch.autocast("cpu", torch.bfloat16)``::

    y = wrap_with_autocast('cpu', bfloat16, True, ...)      to = to.dtype(x, bfloat16)
        linear = linear(x, w)                               to_1 = to.dtype(w, bfloat16)
                                                            linear = linear(to, to_1)

So the plan knows the bytes of what autocast makes, and the graph computes the same on devices that have no
autocast. Which operations cast, and to what, torch alone knows, for each type of device: each operation runs
on fake tensors with autocast and without, and the casts that only the first run makes are written down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan.devices.topology import CPU, SIMULATED
from graphplan.errors import NoGraphError

aten = torch.ops.aten

_BLOCK = torch.ops.higher_order.wrap_with_autocast
_OF_READER = ("nn_module_stack", "stack_trace")  # what a cast has of the operation that it is for


def write_casts(
    module: fx.GraphModule, weights: Set[str], ambient: torch.dtype | None, device_types: Sequence[str]
) -> None:
    """Write down the casts of autocast, in place.

    Args:
        module: a trace on the CPU, made under the ``ambient`` autocast.
        weights: names of the nodes that are weights: each is cast once, as autocast does.
        ambient: the type that autocast was on for around the call; None where it was off.
        device_types: of the devices that will compute: a block for another type does nothing.

    Raises:
        NoGraphError: an operation under autocast whose casts no graph can say.
    """
    if ambient is None and not module.graph.find_nodes(op="call_function", target=_BLOCK):
        return
    accelerator = next((kind for kind in device_types if kind not in (CPU, SIMULATED)), CPU)
    settings = _inlined(module, ambient, {CPU, accelerator})
    if any(settings.values()):
        there = accelerator != CPU and getattr(torch, accelerator).is_available()
        caster = _Caster(module.graph, weights, accelerator if there else CPU)
        for node, dtype in settings.items():
            caster.visit(node, dtype)


def _inlined(
    module: fx.GraphModule, ambient: torch.dtype | None, kinds: Set[str]
) -> dict[fx.Node, torch.dtype | None]:
    """Put operations in place of the blocks of them; for each, the type that autocast is on for."""
    settings: dict[fx.Node, torch.dtype | None] = {}
    for node in list(module.graph.nodes):
        if node.target is _BLOCK:
            settings.update(_without_block(module, node, ambient, kinds))
        elif node.op == "call_function":
            settings[node] = ambient
    for node in list(module.graph.find_nodes(op="get_attr")):
        if not node.users:
            module.graph.erase_node(node)
    alive = set(module.graph.nodes)
    return {node: dtype for node, dtype in settings.items() if node in alive}


def _without_block(
    module: fx.GraphModule, block: fx.Node, ambient: torch.dtype | None, kinds: Set[str]
) -> dict[fx.Node, torch.dtype | None]:
    kind, dtype, enabled, _, body, *operands = block.args
    inner = getattr(module, body.target)  # type: ignore[union-attr,arg-type]  # a get_attr node
    within = (dtype if enabled else None) if kind in kinds else ambient
    settings = _inlined(inner, within, kinds)  # type: ignore[arg-type]  # a type, or None
    new: dict[fx.Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
    with module.graph.inserting_before(block):
        for node in inner.graph.nodes:
            if node.op == "get_attr":  # a branch of a control-flow operation
                name = f"{body.target}_{node.target}"  # type: ignore[union-attr]
                setattr(module, name, getattr(inner, node.target))
                new[node] = module.graph.get_attr(name)
            elif node.op == "call_function":
                new[node] = module.graph.node_copy(node, new.__getitem__)
    results = fx.map_arg(inner.graph.output_node().args[0], new.__getitem__)
    for part in list(block.users):
        part.replace_all_uses_with(results[part.args[1]])
        module.graph.erase_node(part)
    module.graph.erase_node(block)
    return {new[node]: dtype for node, dtype in settings.items()}


class _Caster:
    """Inserts casts, and gives the values behind them the types that they have then.

    Args:
        graph: that is changed.
        weights: names of the nodes that are weights.
        kind: the type of device by whose rules autocast casts.
    """

    def __init__(self, graph: fx.Graph, weights: Set[str], kind: str) -> None:
        self.graph, self.weights, self.kind = graph, weights, kind
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.changed: set[fx.Node] = set()
        self.seen: dict[Any, tuple[dict[int, torch.dtype], list[Any]]] = {}

    def visit(self, node: fx.Node, dtype: torch.dtype | None) -> None:
        """Insert the casts of one operation; those before it have been visited."""
        value, wanted = node.meta.get("val"), None
        if not (_has_tensors(value) and any(_has_tensors(s.meta.get("val")) for s in node.all_input_nodes)):
            return
        if dtype is not None:
            sources = node.all_input_nodes
            found, wanted = self._autocast(node, dtype)
            for position, to in found.items():
                node.replace_input_with(sources[position], self._cast(sources[position], to, node))
        if not self.changed.isdisjoint(node.all_input_nodes):
            value = _run(node)
        if wanted is not None and _dtypes(value) != wanted:
            value = _run_for(node, wanted)
        if _dtypes(value) != _dtypes(node.meta.get("val")):
            node.meta["val"] = value
            self.changed.add(node)

    def _autocast(self, node: fx.Node, dtype: torch.dtype) -> tuple[dict[int, torch.dtype], list[Any]]:
        """What autocast casts, by position among ``all_input_nodes``, and the types of the results then."""
        if any(source.op == "get_attr" for source in node.all_input_nodes):
            raise NoGraphError(f"{node.name!r} is a control-flow operation under autocast")
        alike = fx.map_arg((node.args, node.kwargs), lambda source: _dtypes(source.meta.get("val")))
        key = (node.target, dtype, str(alike))
        if key not in self.seen:
            plain, casting = _Recorder(node, self.kind), _Recorder(node, self.kind)
            results = casting.run(dtype)
            with suppress(RuntimeError):  # some take no arguments of two types without autocast
                plain.run(None)
            self.seen[key] = {} if casting.casts == plain.casts else casting.casts, _dtypes(results)
        return self.seen[key]

    def _cast(self, source: fx.Node, dtype: torch.dtype, reader: fx.Node) -> fx.Node:
        """A cast of a value ahead of a reader; of a weight, the same for all."""
        if (source, dtype) in self.casts:
            return self.casts[source, dtype]
        with self.graph.inserting_before(reader):
            made = self.graph.call_function(aten.to.dtype, (source, dtype))
        made.meta.update({key: reader.meta[key] for key in _OF_READER if key in reader.meta})
        made.meta["val"] = _run(made)
        self.changed.add(made)
        if source.name in self.weights:
            self.casts[source, dtype] = made
        return made


class _Recorder(TorchDispatchMode):
    """Runs an operation on fakes of its arguments, on one type of device, and sees which of them are cast."""

    def __init__(self, node: fx.Node, kind: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.node, self.kind = node, kind
        self.fakes = {source: _fake(source.meta.get("val"), kind) for source in node.all_input_nodes}
        self.position = {id(self.fakes[source]): at for at, source in enumerate(node.all_input_nodes)}
        self.casts: dict[int, torch.dtype] = {}

    def run(self, dtype: torch.dtype | None) -> Any:
        """The results, under an autocast for ``dtype``."""
        autocast = torch.autocast(self.kind, dtype, enabled=dtype is not None, cache_enabled=False)
        with autocast, _mode(self.fakes.values()), torch.no_grad(), self:
            return _apply(self.node, self.fakes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("dtype") if func is aten._to_copy.default and id(args[0]) in self.position else None
        # autocast casts to one type, ahead of the operation, which may cast its arguments to another
        if to is not None and (not self.casts or to in self.casts.values()):
            self.casts.setdefault(self.position[id(args[0])], to)
        return func(*args, **kwargs)


def _run(node: fx.Node) -> Any:
    """What an operation makes of the values of its arguments."""
    values = {source: source.meta.get("val") for source in node.all_input_nodes}
    with torch.autocast(CPU, enabled=False), _mode(values.values()), torch.no_grad():
        return _apply(node, values)


def _run_for(node: fx.Node, wanted: Sequence[Any]) -> Any:
    """The same, of the types that autocast has it make, as where it sums half-precision values in float32."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any(argument.name == "dtype" for argument in schema.arguments):
        node.update_kwarg("dtype", wanted[0])
        value = _run(node)
        if _dtypes(value) == wanted:
            return value
    raise NoGraphError(f"autocast has {node.target} make {wanted}, which no cast of its arguments does")


def _apply(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _mode(values: Any) -> Any:
    return next(leaf.fake_mode for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, FakeTensor))


def _fake(value: Any, kind: str) -> Any:
    """A fake tensor of its own, of the size of a value, on another type of device."""

    def of(tensor: FakeTensor) -> torch.Tensor:
        with tensor.fake_mode:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=kind)

    return pytree.tree_map_only(FakeTensor, of, value)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))


def _dtypes(value: Any) -> list[Any]:
    return [getattr(leaf, "dtype", None) for leaf in pytree.tree_leaves(value)]
