"""Cuts of the order of operations: the values that cross each, and the positions that are allowed.

Position ``p`` is before operation ``p``. Only computed tensors cross a cut. A later stage recomputes sizes,
and views of weights and of the model's inputs, which every machine has::

    n = sym_size(x, 0)          # x is an input: recomputed after the cut
    h = linear(x, w)            # crosses
    -------------------------------------------- cut
    y = reshape(h, [n, -1])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphplan.devices.topology import Link
from graphplan.ir.graph import Graph
from graphplan.passes.placement.segment_dp import choose_cuts


@dataclass(frozen=True)
class Boundaries:
    """The cuts of a graph.

    Attributes:
        graph: the graph whose order is cut.
        caches_stay: whether tensors of returned caches stay in their stage, instead of going to the last.
    """

    graph: Graph
    caches_stay: bool = False

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Operations that every stage runs itself if it needs their outputs."""
        graph, everywhere = self.graph, {*self.graph.weights, *self.graph.inputs}
        results = {*graph.outputs, *graph.values_kept_after_call}
        # the last stage would return its own tensor, not the one that an earlier stage wrote to
        returned = {name for name in results & graph.values.keys() if graph.root(name) in self._written}
        return frozenset(
            op.name
            for op in graph.operations.values()
            if op.outputs
            and not op.mutates
            and returned.isdisjoint(op.outputs)
            and (op.host_only or all(self._is_view(name, everywhere) for name in op.outputs))
        )

    @cached_property
    def _written(self) -> frozenset[str]:
        """Storage that operations write to."""
        operations = self.graph.operations.values()
        return frozenset(self.graph.root(name) for op in operations for name in op.mutates)

    def _is_view(self, name: str, bases: set[str]) -> bool:
        value = self.graph.values[name]
        return not value.is_tensor or (value.alias_of is not None and self.graph.root(name) in bases)

    @cached_property
    def weights_needed(self) -> tuple[frozenset[str], ...]:
        """(operations,) names of the weights that each needs in its stage: those whose data it reads.

        A weight is also needed where a recomputed view of it is read, and not where the view is first made.
        Operations that every stage recomputes need nothing by themselves.
        """
        graph, none = self.graph, frozenset[str]()
        weights_of = {name: frozenset({name}) for name in graph.weights}  # and of recomputed values
        needed = []
        for operation in graph.operations.values():
            read = none.union(*(weights_of.get(name, none) for name in operation.inputs))
            if operation.host_only:
                read = none
            elif operation.name in self.recomputed:
                weights_of.update(dict.fromkeys(operation.outputs, read))
                read = none
            needed.append(read)
        return tuple(needed)

    @cached_property
    def needed_at(self) -> dict[str, tuple[int, ...]]:
        """Weight -> positions of the operations that need it in their stage, in order."""
        positions: dict[str, list[int]] = {name: [] for name in self.graph.weights}
        for position, names in enumerate(self.weights_needed):
            for name in names:
                positions[name].append(position)
        return {name: tuple(found) for name, found in positions.items()}

    @cached_property
    def last_needed(self) -> dict[str, int]:
        """Value or weight -> position of the last operation that needs it, directly or to recompute it.

        For results it is the position after the last operation.
        """
        graph = self.graph
        operations = list(graph.operations.values())
        returned = [value.name for value in graph.values.values() if value.stays]  # tensors of caches
        ends = graph.outputs if self.caches_stay else (*graph.outputs, *returned)
        last = dict.fromkeys(ends, len(operations))
        for position in range(len(operations) - 1, -1, -1):
            operation, until = operations[position], position
            if operation.name in self.recomputed:
                until = max([position, *(last.get(name, -1) for name in operation.outputs)])
            for name in operation.inputs:
                last[name] = max(last.get(name, -1), until)
        return last

    def crossing(self, position: int) -> tuple[str, ...]:
        """Return the values that cross a cut at ``position``, in the order of their producers."""
        starts, ends = self._span_ends
        names = list(self._spans)
        return tuple(names[at] for at in np.flatnonzero((starts < position) & (position <= ends)))

    @cached_property
    def _span_ends(self) -> NDArray[np.int64]:
        """(2, values that may cross) positions of their producers and of the last operations to need them."""
        return np.array(list(self._spans.values()), dtype=np.int64).reshape(-1, 2).T

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """Value that may cross -> positions of its producer and of the last operation that needs it."""
        graph, last = self.graph, self.last_needed
        return {
            name: (position, last[name])
            for position, operation in enumerate(graph.operations.values())
            if operation.name not in self.recomputed
            for name in operation.outputs
            if graph.values[name].is_tensor and last.get(name, -1) > position
        }

    @cached_property
    def crossing_bytes(self) -> NDArray[np.float64]:
        """(operations + 1,) bytes that cross each position."""
        return self._per_position([self.graph.values[name].copy_bytes for name in self._spans])

    @cached_property
    def crossing_count(self) -> NDArray[np.float64]:
        """(operations + 1,) tensors that cross each position."""
        return self._per_position([1] * len(self._spans))

    def seconds(self, link: Link) -> NDArray[np.float64]:
        """Return (operations + 1,) seconds of a link for the tensors that cross each position."""
        return self.crossing_count * link.latency + self.crossing_bytes / link.bandwidth

    def _per_position(self, amounts: Sequence[int]) -> NDArray[np.float64]:
        starts, ends = self._span_ends
        change = np.zeros(len(self.graph.operations) + 2)
        np.add.at(change, starts + 1, amounts)
        np.subtract.at(change, ends + 1, amounts)
        return change.cumsum()[:-1]

    @cached_property
    def allowed(self) -> NDArray[np.int64]:
        """Positions where the order may be cut, both ends included, in order.

        No cut separates operations that must share a device, or readers of a weight or input that one of
        them writes to. Inside the order, at least one tensor crosses a cut.
        """
        graph, count = self.graph, len(self.graph.operations)
        together = [[graph.position_of[n] for n in names - self.recomputed] for names in graph.together]
        free = np.ones(count + 1, dtype=bool)
        for positions in filter(None, [*together, *self._inseparable.values()]):
            free[min(positions) + 1 : max(positions) + 1] = False
        free[1:-1] &= self.crossing_count[1:-1] > 0
        free[[0, -1]] = True
        return np.flatnonzero(free)

    @cached_property
    def _inseparable(self) -> dict[str, list[int]]:
        """Weight or input that is written to -> positions of the operations that one stage must have.

        They are those that write it, that read it or a view of it, or a number that was computed from it;
        and the last operation, if it is a result itself.
        """
        graph = self.graph
        shared = self._written & {*graph.weights, *graph.inputs}
        positions: dict[str, list[int]] = {name: [] for name in shared}
        for position, operation in enumerate(graph.operations.values()):
            for name in {graph.root(value) for value in operation.inputs} & shared:
                if operation.name not in self.recomputed:
                    positions[name].append(position)
                elif operation.host_only and name in graph.weights:  # sizes of weights are not operations
                    last = max(self.last_needed.get(value, -1) for value in operation.outputs)
                    positions[name].append(min(max(position, last), len(graph.operations) - 1))
        for name in shared.intersection(graph.outputs):
            positions[name].append(len(graph.operations) - 1)
        return positions

    def candidates(self, limit: int, progress: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return at most ``limit`` allowed cuts: those that few bytes cross, spread over the work.

        ``progress``: (operations + 1,) share of the work before each position.
        """
        order = np.argsort(self.crossing_bytes[self.allowed[1:-1]], kind="stable")
        return choose_cuts(self.allowed, order, progress, limit)
