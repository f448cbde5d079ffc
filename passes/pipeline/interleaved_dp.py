"""Cuts into stages that machines take in turn: dynamic programming, then hill climbing.

Machine ``k`` of ``p`` has stages ``k``, ``k + p``, ... A batch of ``m`` microbatches is estimated at

    m * max_k (sum of the loads of the stages of machine k) + (p - 1) * the largest load of a stage

which is exact for equal stages (Narayanan et al., SC 2021: a bubble of ``(p - 1)(t_f + t_b) / v``). The sum
of a machine is not known at an edge, so the dynamic program finds the stages of the least sum of squared
loads, which are even; then single cuts are moved as long as the estimate falls, or what passes budgets does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graphplan.passes.pipeline.stage_dp import Floats
from graphplan.passes.placement.params import ROUNDING

Value = tuple[float, float, float]  # bytes too many, as a share of a budget; seconds; squared seconds


@dataclass(frozen=True, slots=True)
class Turns:
    """Stages in order.

    Attributes:
        cuts: indices of the candidate cuts, from the first to the last.
        excess: by how much the bytes of the fullest machine pass its budgets, as a share of them.
    """

    cuts: tuple[int, ...]
    excess: float


@dataclass(frozen=True, slots=True)
class InterleavedDP:
    """Finds cuts.

    Attributes:
        loads: for each stage, (cuts, cuts) seconds that a stretch keeps its machine busy; infinite where it
            cannot be.
        needs: for each stage, (cuts, cuts) bytes of a stretch.
        rooms: bytes of each machine.
        microbatches: of a batch.
    """

    loads: Sequence[Floats]
    needs: Sequence[Floats]
    rooms: Sequence[float]
    microbatches: int

    def solve(self) -> Turns | None:
        """The cuts of the least estimate that are found; None where no stages fit one by one."""
        cuts = self._evenest()
        if cuts is None:
            return None
        value = self._value(cuts)
        while True:
            found = min(((self._value(one), one) for one in self._moves(cuts)), default=(value, cuts))
            if not _is_less(found[0], value):
                return Turns(tuple(cuts), value[0])
            value, cuts = found

    def _evenest(self) -> list[int] | None:
        """The cuts of the least sum of squared loads."""
        size = len(self.loads[0])
        least = np.full(size, np.inf)
        least[-1] = 0.0
        ends = []
        for stage in reversed(range(len(self.loads))):
            fits = self.needs[stage] <= self.rooms[stage % len(self.rooms)]
            through = np.where(fits, self.loads[stage], np.inf) ** 2 + least
            ends.append(through.argmin(1))
            least = through.min(1)
        if not np.isfinite(least[0]):
            return None
        cuts = [0]
        for end in reversed(ends):
            cuts.append(int(end[cuts[-1]]))
        return cuts

    def _moves(self, cuts: list[int]) -> Iterator[list[int]]:
        """The same cuts with one elsewhere, by 1, 2, 4, ... candidates."""
        for index in range(1, len(cuts) - 1):
            for way in (-1, 1):
                step = way
                while cuts[index - 1] < cuts[index] + step < cuts[index + 1]:
                    yield [*cuts[:index], cuts[index] + step, *cuts[index + 1 :]]
                    step *= 2

    def _value(self, cuts: Sequence[int]) -> Value:
        machines = len(self.rooms)
        loads, needs = [0.0] * machines, [0.0] * machines
        largest = 0.0
        for stage, (start, end) in enumerate(pairwise(cuts)):
            load = float(self.loads[stage][start, end])
            largest = max(largest, load)
            loads[stage % machines] += load
            needs[stage % machines] += float(self.needs[stage][start, end])
        fullest = max(need / max(room, 1.0) for need, room in zip(needs, self.rooms, strict=True))
        seconds = self.microbatches * max(loads) + (machines - 1) * largest
        return max(0.0, fullest - 1.0), seconds, sum(load * load for load in loads)


def _is_less(one: Value, other: Value) -> bool:
    """Whether the first that differs by more than rounding is less."""
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > ROUNDING * abs(b):
            return a < b
    return False
