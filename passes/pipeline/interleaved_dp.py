"""Cuts into stages that machines take in turn: dynamic programming, then hill climbing.

Machine ``k`` of ``p`` has stages ``k``, ``k + p``, ... A batch of ``m`` microbatches is estimated at

    m * max_k (sum of the loads of the stages of machine k) + (p - 1) * the largest load of a stage

which is exact for equal stages (Narayanan et al., SC 2021: a bubble of ``(p - 1)(t_f + t_b) / v``). The sum
of a machine is not known at an edge, so the dynamic program finds the stages of the least sum of squared
loads, which are even; then one cut or two are moved as long as the estimate falls, or what passes budgets
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

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
        value, cuts = self.best_of(np.array([cuts]))
        while True:
            for moved in (1, 2):
                found, better = self.best_of(self._moves(cuts, moved))
                if _is_less(found, value):
                    value, cuts = found, better
                    break
            else:
                return Turns(tuple(cuts), value[0])

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

    def _moves(self, cuts: Sequence[int], moved: int) -> NDArray[np.int64]:
        """(moves, cuts) the same cuts, and with so many elsewhere: by 1, 2, 4, ... candidates, either way."""
        steps = 1 << np.arange(len(self.loads[0]).bit_length())
        ways = np.array(list(product((-1, 1), repeat=moved)))
        by = (steps[:, None, None] * ways).reshape(-1, moved)
        places = np.array(list(combinations(range(1, len(cuts) - 1), moved)), dtype=np.int64)
        made = np.tile(np.array(cuts), (len(places) * len(by) + 1, 1))
        if len(places):
            rows = np.arange(len(made) - 1)[:, None]
            made[rows, np.repeat(places, len(by), axis=0)] += np.tile(by, (len(places), 1))
        return np.asarray(made[(np.diff(made, axis=1) > 0).all(1)])

    def best_of(self, every: NDArray[np.int64]) -> tuple[Value, list[int]]:
        """The least value, and its cuts, of (ways, cuts) ways to cut."""
        machines = len(self.rooms)
        loads, needs = (np.zeros((len(every), machines)) for _ in range(2))
        largest = np.zeros(len(every))
        for stage, (load, need) in enumerate(zip(self.loads, self.needs, strict=True)):
            span = every[:, stage], every[:, stage + 1]
            loads[:, stage % machines] += load[span]
            needs[:, stage % machines] += need[span]
            largest = np.maximum(largest, load[span])
        fullest = (needs / np.maximum(self.rooms, 1.0)).max(1)
        excess = np.maximum(0.0, fullest - 1.0)
        seconds = self.microbatches * loads.max(1) + (machines - 1) * largest
        squares = (loads**2).sum(1)
        least = int(np.lexsort((squares, seconds, excess))[0])
        return (float(excess[least]), float(seconds[least]), float(squares[least])), every[least].tolist()


def _is_less(one: Value, other: Value) -> bool:
    """Whether the first that differs by more than rounding is less."""
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > ROUNDING * abs(b):
            return a < b
    return False
