"""Sizes that values decide, where an operation would broadcast if one of them were 1.

A trace takes them to be equal, and so do the formulas of gradients, which then sum over nothing::

    x[mask] * y[~mask]     where values choose one row of y, eager mode sums the gradient over the rows of x
    x[mask] * y[mask]      as many rows of both in each call
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from graphplan._compat.symbolic_sizes import made_as
from graphplan.capture.structure import leaves_of, memories, written_memories

aten = torch.ops.aten

_BROADCASTING = frozenset(
    {
        *(aten.expand.default, aten.copy_.default, aten.masked_select.default, aten.masked_fill.Scalar),
        *(aten.mse_loss.default, aten.huber_loss.default, aten.smooth_l1_loss.default),
    }
)
_COUNTING = frozenset(
    {aten.index.Tensor, aten.masked_select.default, aten.nonzero.default, aten.nonzero_numpy.default}
)
_OF_ONE_COUNT = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim),
        *(aten.t.default, aten.transpose.int, aten.permute.default, aten.detach.default, aten.alias.default),
        aten.clone.default,
    }
)


def equal_by_chance(graph: fx.Graph, known: Mapping[Any, Any]) -> fx.Node | None:
    """The first operation of a trace that would broadcast in calls with other values; None where none would.

    Args:
        graph: the trace.
        known: symbol of a size that values decide -> what it is in each call that the trace serves.
    """
    origins = _Origins(graph)
    for node in graph.nodes:
        for pair in _paired_sizes(node):
            one, other = (made_as(size).xreplace(known) for size in pair)
            if not free_unbacked_symbols([one, other]) or 1 in (one, other):
                continue
            if one.xreplace(origins.symbols) != other.xreplace(origins.symbols):
                return node  # type: ignore[no-any-return]  # nodes of a graph have no type
        origins.add(node)
    return None


def _paired_sizes(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Sizes that are to be equal, or one of them 1."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) and node.target not in _BROADCASTING:
        return
    nodes = [*node.all_input_nodes, *([node] if node.target is aten.expand.default else [])]
    tensors = [one for each in nodes if isinstance(one := each.meta.get("val"), torch.Tensor)]
    for one, other in combinations(tensors, 2):
        yield from zip(reversed(one.shape), reversed(other.shape), strict=False)


class _Origins:
    """What decides the sizes so far in a trace: those of one origin are equal.

    Attributes:
        symbols: symbol of a size -> the first that has its origin.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._written = {memory for node in graph.nodes for memory in written_memories(node)}
        self._numbers: dict[Any, int] = {}  # of what nodes make
        self._of_nodes: dict[fx.Node, int] = {}
        self._first: dict[Any, Any] = {}
        self.symbols: dict[Any, Any] = {}

    def add(self, node: fx.Node) -> None:
        """Know one more node, whose arguments are known."""
        number = self._of_nodes[node] = self._numbers.setdefault(self._made_by(node), len(self._numbers))
        mask = self._mask_of(node)
        for place, symbol in enumerate(_symbols(node)):
            if symbol not in self.symbols:
                origin = (number, place) if mask is None else mask
                self.symbols[symbol] = self._first.setdefault(origin, symbol)

    def _made_by(self, node: fx.Node) -> Any:
        """The same for nodes that make the same."""
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op != "call_function" or random or not self._written.isdisjoint(memories(node)):
            return node
        return repr((node.target, fx.map_arg((node.args, node.kwargs), self._of_nodes.__getitem__)))

    def _mask_of(self, node: fx.Node) -> int | None:
        """The mask that has as many rows as the node makes."""
        masks = [source for source in node.all_input_nodes if _is_mask(source)]
        indices = node.args[1] if node.target is aten.index.Tensor else masks
        if node.target not in _COUNTING or len(masks) != 1 or len(_nodes(indices)) > 1:
            return None
        mask = masks[0]
        while mask.target in _OF_ONE_COUNT:
            mask = mask.all_input_nodes[0]
        return self._of_nodes[mask]


def _symbols(node: fx.Node) -> list[Any]:
    """Symbols of sizes, in the order of the tensors that a node makes, or the number that it is."""
    made = leaves_of(node.meta.get("val"))
    sizes = [size for one in made for size in (one.shape if isinstance(one, torch.Tensor) else (one,))]
    found = [made_as(size) for size in sizes if isinstance(size, torch.SymInt)]
    return [size for size in found if size.is_symbol and free_unbacked_symbols(size)]


def _nodes(arguments: Any) -> list[fx.Node]:
    return [one for one in leaves_of(arguments) if isinstance(one, fx.Node)]


def _is_mask(node: fx.Node) -> bool:
    made = node.meta.get("val")
    return isinstance(made, torch.Tensor) and made.dtype == torch.bool
