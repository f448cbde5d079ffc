"""Which segments save less, and how: the cheapest seconds for each byte that is freed, first.

The greedy method for the knapsack problem (Dantzig, 1957), as for rematerialization in Jain et al.,
"Checkmate" (2020). A segment is computed again, selectively or as a whole, or waits in CPU memory: what takes
least time for what it frees, and then what frees more. Segments that nothing tells apart are taken evenly
spread, so that devices that have contiguous ones have their part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from torch import fx

from graphplan.capture.captured_graph import Capture
from graphplan.ir.graph import Graph
from graphplan.passes.training.offload import offloadable
from graphplan.passes.training.recompute import repeated
from graphplan.passes.training.segments import ModuleSegment, segment_path, segments_of, spread

Way = Literal["selectively", "again", "offloaded"]


@dataclass(frozen=True, slots=True)
class Savings:
    """What a step does to save less: paths of segments that it computes again, some in part, or offloads."""

    selectively: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()


def savings_of(graph: Graph, capture: Capture) -> Savings:
    """What a planned step does to save less, given what it was planned from."""
    operations = graph.operations.values()
    offloaded = dict.fromkeys(segment_path(op.module_path) for op in operations if op.offloads)
    repeats = dict[str, set[str]]()
    for operation in operations:
        if operation.repeats:
            repeats.setdefault(segment_path(operation.module_path), set()).add(operation.repeats)
    selectively, again = list[str](), list[str]()
    for segment in segments_of(capture):
        if segment.path in repeats:
            _, some = repeated(segment, selectively=True)
            part = repeats[segment.path] <= {node.name for node in some}
            (selectively if part else again).append(segment.path)
    return Savings(tuple(selectively), tuple(again), tuple(offloaded))


@dataclass(frozen=True, slots=True)
class Item:
    """A segment that can save less, or less than an item before it lets it.

    Attributes:
        path: of the segment.
        way: how.
        nbytes: that it frees between the two passes, beside that item.
        seconds: that this takes, likewise.
    """

    path: str
    way: Way
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
    """The segments that can save less, in steps from what is cheapest for each byte to what frees most.

    Source: the multiple-choice knapsack problem (Sinha and Zoltners, 1979).

    Args:
        segments: of a training step.
        graph: of the same step.
        operation_seconds: of an operation by its name; None where nothing may be computed again.
        copy_seconds: of a value of so many bytes to CPU memory and back; None where none may wait there.
    """
    found: list[Item] = []
    for segment in segments:
        ways = list[Item]()
        if operation_seconds is not None:
            ways.append(_again(segment, graph, operation_seconds, "selectively"))
            ways.append(_again(segment, graph, operation_seconds, "again"))
        if copy_seconds is not None:
            sizes = [_nbytes(graph, [node]) for node in offloadable(segment)]
            ways.append(Item(segment.path, "offloaded", sum(sizes), sum(map(copy_seconds, sizes))))
        found += _in_steps(ways)
    return found


def _in_steps(ways: Sequence[Item]) -> Iterator[Item]:
    """From each way to the one that frees more for the least time beside: what is dominated is left out."""
    nbytes, seconds = 0, 0.0
    while more := [way for way in ways if way.nbytes > nbytes]:
        steps = [replace(way, nbytes=way.nbytes - nbytes, seconds=way.seconds - seconds) for way in more]
        step = min(steps, key=lambda step: step.price)
        yield step
        nbytes, seconds = nbytes + step.nbytes, seconds + step.seconds


def _again(segment: ModuleSegment, graph: Graph, seconds: Callable[[str], float], way: Way) -> Item:
    """A segment that is computed again, selectively or as a whole."""
    saved, again = repeated(segment, selectively=way == "selectively")
    names = [node.name for node in segment.nodes if node in again and node.name in graph.operations]
    return Item(segment.path, way, _nbytes(graph, saved), sum(map(seconds, names)))


def _nbytes(graph: Graph, nodes: Iterable[fx.Node]) -> int:
    """Bytes of what these make; of views, of what they are of."""
    roots = {graph.root(node.name) for node in nodes if node.name in graph.values}
    return sum(graph.values[root].nbytes for root in roots if root in graph.values)


def cheapest(items: Sequence[Item], count: int) -> Savings:
    """What the cheapest of the items save, so many; of each segment the last step counts."""
    chosen = set[Item]()
    for group in _by_price(items):
        chosen.update(spread(group, min(len(group), count - len(chosen))))
    ways = {item.path: item.way for item in items if item in chosen}
    selectively, again, offloaded = (
        tuple(path for path in ways if ways[path] == way) for way in ("selectively", "again", "offloaded")
    )
    return Savings(selectively, again, offloaded)


def freed(items: Sequence[Item], count: int) -> int:
    """Bytes that so many of the cheapest free."""
    return sum(item.nbytes for item in ordered(items)[:count])


def enough(items: Sequence[Item], nbytes: float) -> int:
    """How many of the cheapest free so many bytes; all where these do not."""
    sums = accumulate((item.nbytes for item in ordered(items)), initial=0)
    return next((count for count, total in enumerate(sums) if total >= nbytes), len(items))


def ordered(items: Sequence[Item]) -> list[Item]:
    """The cheapest first."""
    return [item for group in _by_price(items) for item in group]


def _by_price(items: Sequence[Item]) -> list[list[Item]]:
    """Items that nothing tells apart, the cheapest first."""
    alike: dict[tuple[Way, int, float], list[Item]] = {}
    for item in items:
        alike.setdefault((item.way, item.nbytes, item.seconds), []).append(item)
    return sorted(alike.values(), key=lambda group: group[0].price)
