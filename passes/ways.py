"""Ways to run the steps of a frontier where weights are streamed: where, and what of its weights is brought.

Several operations that belong together are one step here. Copies for the later of them may be made while the
earlier run; and where others run in between, nobody knows when: their copies then cost nothing, and their
seconds may be used for copies at any time. Both lean to the cheap side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graphplan.alignment import round_up
from graphplan.device import Link
from graphplan.passes.frontier import Frontier
from graphplan.passes.segments import SMALL

__all__ = ["Choice", "Choices", "Ways"]

_WEIGHTS = 8  # of an operation, up to which every part of them is looked at
_PARTS = 6  # of an operation's weights that may be brought


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to run a step.

    Attributes:
        device: of the frontier.
        row: of the accelerator; -1 for the CPU.
        run: seconds.
        copying: seconds of the copies that it waits for.
        held: bytes of these at once, at least.
        kept: bytes of weights that stay.
        need: bytes beside weights.
        beside: seconds of the run that such copies may be made in.
    """

    device: int
    row: int
    run: float
    copying: float = 0.0
    held: float = 0.0
    kept: float = 0.0
    need: float = 0.0
    beside: float = 0.0


Choices = tuple[Choice, ...]


class Ways:
    """The ways to run each step of a frontier.

    Args:
        frontier: of shares whose units carry all weights that they alone read.
        rows: devices of the frontier that are accelerators.
        links: for each of them, the one that weights come by.

    Attributes:
        spare: seconds of operations that belong together and are spread over the order: copies may be made
            beside them at any time.
    """

    def __init__(self, frontier: Frontier, rows: Sequence[int], links: Sequence[Link]) -> None:
        self.frontier, self.shares = frontier, frontier.shares
        self.rows, self.links = list(rows), list(links)
        self._needed: dict[int, list[int]] = defaultdict(list)
        self._readers: dict[int, int] = defaultdict(int)
        for unit, item in self.shares.needs:
            self._needed[unit].append(item)
            self._readers[item] += 1
        self._order = list(self.shares.graph.operations)
        self._place = {name: i for i, name in enumerate(self._order)}
        self._spread = {unit for unit in range(self.shares.units) if self._is_spread(unit)}
        self.spare = self._spare_seconds()

    @property
    def held_in_part(self) -> bool:
        """Whether ``held`` is less than what is copied: several operations of a unit read weights."""
        return any(self._readers_of_weights(unit) > 1 for unit in range(self.shares.units))

    def choices(self, variable: int) -> Choices:
        """The ways to run a unit; one that costs nothing for a weight that several units read."""
        shares, frontier = self.shares, self.frontier
        if variable >= shares.units:
            return (Choice(0, -1, 0.0),)
        found = list[Choice]()
        for d in range(frontier.count):
            kind = int(frontier.alike[d])
            run = float(shares.clock[kind, variable])
            if not np.isfinite(run):
                continue
            if d not in self.rows:
                found.append(Choice(d, -1, run))
                continue
            row, need = self.rows.index(d), float(shares.working[kind, variable])
            fixed, largest = self._fixed(kind, variable)
            readers, beside = self._readers_of_weights(variable), self._beside(variable, d)
            for nbytes, kept in self._parts(variable):
                if variable in self._spread:  # who knows when
                    found.append(Choice(d, row, run, kept=kept, need=need))
                    continue
                copying = fixed + nbytes / self.links[row].bandwidth + self._late(row, nbytes)
                held = (nbytes + largest * self.links[row].bandwidth) / readers
                found.append(Choice(d, row, run, float(copying), float(held), kept, need, beside))
        return tuple(found)

    # -- units of several operations --------------------------------------------------------------

    def _is_spread(self, unit: int) -> bool:
        """Whether other operations run between those of a unit that take time or read weights."""
        shares = self.shares
        telling = [m for m in shares.items[unit].members if self._takes_time(m) or self._reads_weights(m)]
        places = [self._place[member] for member in telling]
        if len(places) < 2:
            return False
        between = self._order[min(places) : max(places) + 1]
        return any(shares.unit_of.get(name, unit) != unit for name in between)

    def _takes_time(self, name: str) -> bool:
        problem, operation = self.shares.problem, self.shares.graph.operations[name]
        return any(problem.seconds(operation, kind.spec) > 0 for kind in self.shares.kinds)

    def _reads_weights(self, name: str) -> bool:
        graph = self.shares.graph
        return any(n in graph.weights and graph.weights[n].nbytes for n in graph.operations[name].inputs)

    def _readers_of_weights(self, unit: int) -> int:
        """Operations of a unit that read weights, each of which may have a copy of its own."""
        return max(1, sum(map(self._reads_weights, self.shares.items[unit].members)))

    def _beside(self, unit: int, device: int) -> float:
        """Seconds that a unit runs on a device before the last of its operations that reads weights."""
        shares, graph = self.shares, self.shares.graph
        members = shares.items[unit].members
        reading = [i for i, member in enumerate(members) if self._reads_weights(member)]
        spec = shares.topology[self.frontier.devices[device]]
        early = members[: reading[-1]] if reading else []
        return float(sum(shares.problem.seconds(graph.operations[name], spec) for name in early))

    def _spare_seconds(self) -> float:
        """Of units that are spread: their runs, and what their values may take to move."""
        shares = self.shares
        finite = np.where(np.isfinite(shares.clock), shares.clock, 0.0).max(axis=0)
        seconds = float(finite[list(self._spread)].sum())
        for (maker, item), table in shares.tables.items():
            readers = [item] if item < shares.units else [u for u, i in shares.needs if i == item]
            if self._spread & {maker, *readers}:
                moves = table[:, 0, 1]
                seconds += self.frontier.count * float(moves[np.isfinite(moves)].max(initial=0.0))
        return seconds

    def _fixed(self, kind: int, unit: int) -> tuple[float, float]:
        """Seconds of the copies that a unit waits for in any case, and of those that it needs at once."""
        shares = self.shares
        seconds = largest = float(shares.queue[kind, unit])
        for item in self._needed[unit]:
            each = float(shares.queue[kind, item])
            if np.isfinite(each) and not shares.nbytes[item]:  # its readers may share a copy
                seconds, largest = seconds + each / self._readers[item], largest + each
        return seconds, largest

    def _late(self, row: int, nbytes: float) -> float:
        """Of a copy's latency, the part of these bytes: small ones share a copy."""
        latency = self.links[row].latency
        small = SMALL * latency * self.links[row].bandwidth
        return float(latency * nbytes / max(nbytes, small, 1.0))

    def _parts(self, unit: int) -> list[tuple[float, float]]:
        """Bytes that are copied and bytes that are kept, for each part of a unit's weights."""
        graph, shares = self.shares.graph, self.shares
        own = [graph.weights[name] for name in self._own_weights(unit)]
        sizes = [weight.nbytes for weight in own if weight.name in graph.streamable]
        # weights that are copied one by one where they are not kept count for nothing here
        aside = sum(round_up(w.nbytes) for w in own if w.fetchable and w.name not in graph.streamable)
        total = float(shares.nbytes[unit]) - aside
        if len(sizes) > _WEIGHTS:  # as if they could be divided
            ends = np.linspace(0.0, 1.0, _PARTS + 1)
            padded = sum(round_up(size) for size in sizes)
            copied = [(part * sum(sizes), part_after * padded) for part, part_after in pairwise(ends)]
            return [(float(n), max(0.0, total - float(taken))) for n, taken in copied]
        sums = {(0, 0)}
        for size in sizes:
            sums |= {(nbytes + size, taken + round_up(size)) for nbytes, taken in sums}
        ordered = np.array(sorted(sums), dtype=float)
        groups = np.array_split(ordered, min(len(ordered), _PARTS))
        # of those that are taken together the least is copied, and the most is not kept
        return [(float(g[0, 0]), max(0.0, total - float(g[:, 1].max()))) for g in groups]

    def _own_weights(self, unit: int) -> list[str]:
        """Weights that only this unit reads and whose place is open."""
        graph, shares = self.shares.graph, self.shares
        members = shares.items[unit].members
        names = dict.fromkeys(name for member in members for name in graph.operations[member].inputs)
        found = (n for n in names if n in graph.weights and n not in shares.problem.fixed_weights)
        return [n for n in found if {shares.unit_of.get(r) for r in graph.consumers[n]} <= {unit, None}]
