"""The graph as a sequence of operations, in arrays: what solvers look things up in.

Positions are the gaps between operations: cutting at position ``p`` puts operations ``0 .. p-1`` on
one side and ``p ..`` on the other. Bytes are rounded as an accelerator's allocator rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceSpec
from graphplan.graph import Graph, Operation

__all__ = ["Chain", "Reads"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads of values or weights: one row per (name, reader), rows of one name in order.

    Attributes:
        previous: the operation at which the name was last at hand before this read: its previous
            reader, or its producer; -1 for an input or a weight that nobody read before.
        reader: the operation that reads.
        nbytes: bytes that a copy takes.
        until: the last operation that reads this copy, or a view of it.
    """

    previous: Ints
    reader: Ints
    nbytes: Ints
    until: Ints


class Chain:
    """A graph in trace order.

    Attributes:
        operations: in order.
        index: operation name -> position in ``operations``.
        last: value name -> last operation that reads it or a view of it; ``len(operations)`` for
            what is returned.
    """

    def __init__(self, graph: Graph, spec: DeviceSpec) -> None:
        self.graph, self.spec = graph, spec
        self.operations: list[Operation] = list(graph.operations.values())
        self.index = {op.name: i for i, op in enumerate(self.operations)}
        self.count = len(self.operations)
        self.last = self._last_reads()

    def _last_reads(self) -> dict[str, int]:
        last: dict[str, int] = {}
        for name in self.graph.values:
            made = self.graph.producer.get(name)
            last[name] = -1 if made is None else self.index[made]
        for i, operation in enumerate(self.operations):
            for name in operation.inputs:
                last[name] = i
        for name in self.graph.outputs:
            last[name] = self.count
        for name in reversed(list(self.graph.values)):  # views before their bases
            base = self.graph.values[name].alias_of
            if base is not None:
                last[base] = max(last.get(base, -1), last[name])
        return last

    @cached_property
    def value_reads(self) -> Reads:
        """Reads of tensors, inputs included, that would need a copy on another device."""
        rows: list[tuple[int, int, int, int]] = []
        at: dict[str, int] = dict.fromkeys(self.graph.inputs, -1)
        for i, operation in enumerate(self.operations):
            if not operation.host_only:
                for name in operation.inputs:
                    value = self.graph.values.get(name)
                    if value is not None and value.is_tensor:
                        nbytes = self.spec.allocated(value.copy_bytes)
                        rows.append((at[name], i, nbytes, min(self.last[name], self.count - 1)))
                        at[name] = i
            for name in operation.outputs:
                at[name] = i
        return _reads(rows)

    @cached_property
    def weight_reads(self) -> Reads:
        """Reads of weights, in the same form."""
        rows: list[tuple[int, int, int, int]] = []
        at: dict[str, int] = {}
        for i, operation in enumerate(self.operations):
            if operation.host_only:
                continue
            for name in operation.inputs:
                weight = self.graph.weights.get(name)
                if weight is not None:
                    last = min(self.last.get(name, i), self.count - 1)
                    rows.append((at.get(name, -1), i, self.spec.rounded(weight.nbytes), last))
                    at[name] = i
        return _reads(rows)

    @cached_property
    def storages(self) -> tuple[Ints, Ints, Ints]:
        """(birth, death, bytes) of every storage that an operation brings to life."""
        rows = [
            (i, min(max(self.last[name], i), self.count - 1), self.spec.allocated(nbytes))
            for i, operation in enumerate(self.operations)
            for name in operation.outputs
            if (nbytes := self.graph.values[name].nbytes)
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    @cached_property
    def workspace(self) -> Ints:
        """Bytes that each operation takes while it runs."""
        kind = self.spec.type
        sizes = [self.spec.allocated(op.workspace_on(kind)) for op in self.operations]
        return np.array(sizes, dtype=np.int64)

    @cached_property
    def crossing(self) -> Ints:
        """Bytes of values that are alive across each position and read after it."""
        change = np.zeros(self.count + 2, dtype=np.int64)
        reads = self.value_reads
        made = reads.previous >= 0
        np.add.at(change, reads.previous[made] + 1, reads.nbytes[made])
        np.add.at(change, reads.reader[made] + 1, -reads.nbytes[made])
        return np.cumsum(change)[: self.count + 1]

    def positions(self, limit: int, *, part_groups: bool = False) -> Ints:
        """Where to cut: the ends, and positions at which few bytes cross, at most ``limit`` of them.

        A position that would part operations which must stay together is none, unless
        ``part_groups``.
        """
        allowed = np.ones(self.count + 1, dtype=bool)
        for group in () if part_groups else self.graph.together:
            members = [self.index[name] for name in group]
            allowed[min(members) + 1 : max(members) + 1] = False
        allowed[[0, self.count]] = True
        found = np.nonzero(allowed)[0]
        if len(found) <= limit:
            return found
        bytes_at = self.crossing[found]
        bytes_at[[0, -1]] = np.iinfo(np.int64).max  # nothing crosses the ends, which are no rivals
        low = np.ones(len(found), dtype=bool)
        low[1:-1] = (bytes_at[1:-1] <= bytes_at[:-2]) & (bytes_at[1:-1] <= bytes_at[2:])
        found = found[low]
        if len(found) > limit:
            found = self._spread(found, limit)
        return found

    def _spread(self, found: Ints, limit: int) -> Ints:
        """The ends; the cheapest position of each stretch of equal weight; the cheapest of the rest.

        The cheapest alone may all lie in one half (a decoder of few tokens), and leave the other whole.
        """
        inner = found[1:-1]
        order = np.argsort(self.crossing[inner], kind="stable")
        stretch = np.floor(self._weight_share[inner] * (limit // 2)).astype(np.int64)
        _, first = np.unique(stretch[order], return_index=True)
        kept = order[np.sort(first)]
        rest = order[~np.isin(order, kept)][: max(0, limit - 2 - len(kept))]
        return np.concatenate([found[:1], np.sort(inner[np.concatenate([kept, rest])]), found[-1:]])

    @cached_property
    def _weight_share(self) -> Floats:
        """Share of all weights, and of all operations, that lies before each position."""
        reads = self.weight_reads
        fresh = reads.previous < 0
        weights = np.bincount(reads.reader[fresh], reads.nbytes[fresh], minlength=self.count)
        total = max(float(weights.sum()), 1.0)
        shares = 0.8 * weights / total + 0.2 / max(self.count, 1)
        return np.concatenate([[0.0], np.cumsum(shares)])


def _reads(rows: list[tuple[int, int, int, int]]) -> Reads:
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Reads(table[:, 0], table[:, 1], table[:, 2], table[:, 3])
