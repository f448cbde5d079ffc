"""Which segments save less, and how: the cheapest seconds for each byte that is freed, first.

The greedy method for the knapsack problem (Dantzig, 1957), as for rematerialization in Jain et al.,
"Checkmate" (2020). A segment is either computed again or waits in CPU memory, whichever takes less time for
what it frees. Segments that nothing tells apart are taken evenly spread, so that devices that have
contiguous ones have their part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from graphplan.ir.graph import Graph
from graphplan.passes.training.offload import offloadable
from graphplan.passes.training.recompute import repeated
from graphplan.passes.training.segments import ModuleSegment, segment_path, spread


@dataclass(frozen=True, slots=True)
class Savings:
    """What a step does to save less: paths of the segments that it computes again, and that it offloads."""

    again: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()


def savings_of(graph: Graph) -> Savings:
    """What a planned step does to save less."""
    operations = graph.operations.values()
    again = dict.fromkeys(segment_path(op.module_path) for op in operations if op.repeats)
    offloaded = dict.fromkeys(segment_path(op.module_path) for op in operations if op.offloads)
    return Savings(tuple(again), tuple(offloaded))


@dataclass(frozen=True, slots=True)
class Item:
    """A segment that can save less.

    Attributes:
        path: of the segment.
        again: whether it is computed again; else what it saves waits in CPU memory.
        nbytes: that it frees between the two passes.
        seconds: that this takes.
    """

    path: str
    again: bool
    nbytes: int
    seconds: float

    @property
    def price(self) -> float:
        """Seconds for each byte."""
        return self.seconds / self.nbytes


def items_of(
    segments: Sequence[ModuleSegment],
    graph: Graph,
    operation_seconds: Callable[[str], float] | None,
    copy_seconds: Callable[[int], float] | None,
) -> list[Item]:
    """The segments that can save less, each the cheaper way.

    Args:
        segments: of a training step.
        graph: of the same step.
        operation_seconds: of an operation by its name; None where nothing may be computed again.
        copy_seconds: of a value of so many bytes to CPU memory and back; None where none may wait there.
    """
    found = []
    for segment in segments:
        ways = []
        if operation_seconds is not None:
            saved, again = repeated(segment)
            names = [node.name for node in segment.nodes if node in again and node.name in graph.operations]
            seconds = sum(map(operation_seconds, names))
            ways.append(Item(segment.path, True, _nbytes(graph, saved), seconds))
        if copy_seconds is not None:
            sizes = [_nbytes(graph, [node]) for node in offloadable(segment)]
            ways.append(Item(segment.path, False, sum(sizes), sum(map(copy_seconds, sizes))))
        found += sorted((way for way in ways if way.nbytes), key=lambda way: way.price)[:1]
    return found


def _nbytes(graph: Graph, nodes: Iterable[fx.Node]) -> int:
    """Bytes of what these make; of views, of what they are of."""
    roots = {graph.root(node.name) for node in nodes if node.name in graph.values}
    return sum(graph.values[root].nbytes for root in roots if root in graph.values)


def cheapest(items: Sequence[Item], count: int) -> Savings:
    """So many items, those that free bytes in the least time."""
    taken = list[Item]()
    for group in _by_price(items):
        taken += spread(group, min(len(group), count - len(taken)))
    again = tuple(item.path for item in taken if item.again)
    return Savings(again, tuple(item.path for item in taken if not item.again))


def freed(items: Sequence[Item], count: int) -> int:
    """Bytes that so many of the cheapest free."""
    each = [item.nbytes for group in _by_price(items) for item in group]
    return sum(each[:count])


def enough(items: Sequence[Item], nbytes: int) -> int:
    """How many of the cheapest free so many bytes; all where these do not."""
    return next((n for n in range(len(items)) if freed(items, n) >= nbytes), len(items))


def _by_price(items: Sequence[Item]) -> list[list[Item]]:
    """Items that nothing tells apart, the cheapest first."""
    alike: dict[tuple[bool, int, float], list[Item]] = {}
    for item in items:
        alike.setdefault((item.again, item.nbytes, item.seconds), []).append(item)
    return sorted(alike.values(), key=lambda group: group[0].price)
