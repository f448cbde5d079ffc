"""Choose the segments that save less, and how: those with the fewest seconds per freed byte first.

The greedy method for the knapsack problem (Dantzig, 1957), as for rematerialization in Jain et al.,
"Checkmate" (2020). A segment is recomputed, selectively or as a whole, or its values wait in CPU memory:
first by the option that takes least time per byte, then by those that free more. Identical segments are
chosen evenly spread, so that each device that has contiguous ones gets its part.
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
from graphplan.passes.training.segments import ModuleSegment, evenly_spaced, segment_path, segments_of

SavingMode = Literal["selectively", "fully", "offloaded"]


@dataclass(frozen=True, slots=True)
class Savings:
    """Paths of the segments that a step recomputes, selectively or as a whole, or offloads."""

    selectively: tuple[str, ...] = ()
    fully: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()


def savings_of(graph: Graph, capture: Capture) -> Savings:
    """Return the savings of a planned step; ``capture`` is without them."""
    before = {node.name for node in capture.graph.nodes}  # a loss in parts repeats and keeps values, too
    operations = [operation for name, operation in graph.operations.items() if name not in before]
    offloaded = dict.fromkeys(segment_path(op.module_path) for op in operations if op.offloads)
    repeats = dict[str, set[str]]()
    for operation in operations:
        if operation.repeats:
            repeats.setdefault(segment_path(operation.module_path), set()).add(operation.repeats)
    selectively, fully = list[str](), list[str]()
    for segment in segments_of(capture):
        if segment.path in repeats:
            _, some = repeated(segment, selectively=True)
            is_selective = repeats[segment.path] <= {node.name for node in some}
            (selectively if is_selective else fully).append(segment.path)
    return Savings(tuple(selectively), tuple(fully), tuple(offloaded))


@dataclass(frozen=True, slots=True)
class Item:
    """An option of a segment to save less, relative to the segment's previous item, if it has one.

    Attributes:
        path: path of the segment.
        mode: how it saves less.
        nbytes: bytes freed between the two passes, in addition to those of that item.
        seconds: additional time, likewise.
    """

    path: str
    mode: SavingMode
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
    """Return for each segment the options to save less, in steps from the cheapest per byte to the largest.

    Source: the multiple-choice knapsack problem (Sinha and Zoltners, 1979).

    Args:
        segments: segments of a training step.
        graph: graph of the same step.
        operation_seconds: operation name -> seconds; None if recomputation is not allowed.
        copy_seconds: bytes of a value -> seconds to CPU memory and back; None if offloading is not allowed.
    """
    items: list[Item] = []
    for segment in segments:
        options = list[Item]()
        if operation_seconds is not None:
            options.append(_recomputed(segment, graph, operation_seconds, "selectively"))
            options.append(_recomputed(segment, graph, operation_seconds, "fully"))
        if copy_seconds is not None:
            sizes = [_nbytes(graph, [node]) for node in offloadable(segment)]
            options.append(Item(segment.path, "offloaded", sum(sizes), sum(map(copy_seconds, sizes))))
        items += _in_steps(options)
    return items


def _in_steps(options: Sequence[Item]) -> Iterator[Item]:
    """Yield steps, each to the option that frees more at the least price; dominated ones are left out."""
    nbytes, seconds = 0, 0.0
    while more := [item for item in options if item.nbytes > nbytes]:
        steps = [replace(item, nbytes=item.nbytes - nbytes, seconds=item.seconds - seconds) for item in more]
        step = min(steps, key=lambda step: step.price)
        yield step
        nbytes, seconds = nbytes + step.nbytes, seconds + step.seconds


def _recomputed(
    segment: ModuleSegment, graph: Graph, seconds: Callable[[str], float], mode: SavingMode
) -> Item:
    saved, recomputed = repeated(segment, selectively=mode == "selectively")
    names = [node.name for node in segment.nodes if node in recomputed and node.name in graph.operations]
    return Item(segment.path, mode, _nbytes(graph, saved), sum(map(seconds, names)))


def _nbytes(graph: Graph, nodes: Iterable[fx.Node]) -> int:
    """Return the bytes of the storages of these nodes' values, each once."""
    roots = {graph.root(node.name) for node in nodes if node.name in graph.values}
    return sum(graph.values[root].nbytes for root in roots if root in graph.values)


def cheapest(items: Sequence[Item], count: int) -> Savings:
    """Return the savings of the ``count`` cheapest items; the last step of each segment counts."""
    chosen = set[Item]()
    for group in _by_price(items):
        chosen.update(evenly_spaced(group, min(len(group), count - len(chosen))))
    modes = {item.path: item.mode for item in items if item in chosen}
    selectively, fully, offloaded = (
        tuple(path for path in modes if modes[path] == mode) for mode in ("selectively", "fully", "offloaded")
    )
    return Savings(selectively, fully, offloaded)


def freed_bytes(items: Sequence[Item], count: int) -> int:
    """Return the bytes that the ``count`` cheapest items free."""
    return sum(item.nbytes for item in sorted_by_price(items)[:count])


def count_to_free(items: Sequence[Item], nbytes: float) -> int:
    """Return how many of the cheapest items free ``nbytes``; all if these do not suffice."""
    sums = accumulate((item.nbytes for item in sorted_by_price(items)), initial=0)
    return next((count for count, total in enumerate(sums) if total >= nbytes), len(items))


def sorted_by_price(items: Sequence[Item]) -> list[Item]:
    """Return the items, the cheapest first."""
    return [item for group in _by_price(items) for item in group]


def _by_price(items: Sequence[Item]) -> list[list[Item]]:
    """Return groups of equal items of different segments, the cheapest first."""
    groups: dict[tuple[SavingMode, int, float], list[Item]] = {}
    for item in items:
        groups.setdefault((item.mode, item.nbytes, item.seconds), []).append(item)
    return sorted(groups.values(), key=lambda group: group[0].price)
