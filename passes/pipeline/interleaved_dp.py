"""Cuts into interleaved stages: dynamic programming, then hill climbing.

Machine ``k`` of ``p`` has stages ``k``, ``k + p``, ... A batch of ``m`` microbatches is estimated at

    m * max_k (sum of the loads of the stages of machine k) + (p - 1) * the largest load of a stage

which is exact for equal stages (Narayanan et al., SC 2021: a bubble of ``(p - 1)(t_f + t_b) / v``). An edge
of the dynamic program does not show the sum of its machine, so it minimises the sum of squared loads, which
makes stages even. Then one or two cuts are moved while the bytes over budget decrease, or the estimate does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from graphplan.passes.pipeline.stage_dp import Floats
from graphplan.passes.placement.params import ROUNDING

Value = tuple[float, float, float]  # excess over a budget, as a share of it; seconds; sum of squared seconds


@dataclass(frozen=True, slots=True)
class InterleavedStages:
    """Interleaved stages, in order.

    Attributes:
        cuts: indices of the candidate cuts, from the first to the last.
        excess: bytes of the fullest machine above its budgets, as a share of them.
    """

    cuts: tuple[int, ...]
    excess: float


@dataclass(frozen=True, slots=True)
class InterleavedDP:
    """Finds cuts into interleaved stages.

    Attributes:
        loads: for each stage, (cuts, cuts) seconds that a stretch keeps its machine busy; infinite if
            impossible.
        needs: for each stage, (cuts, cuts) bytes of a stretch.
        rooms: bytes of each machine.
        microbatches: number of microbatches in a batch.
    """

    loads: Sequence[Floats]
    needs: Sequence[Floats]
    rooms: Sequence[float]
    microbatches: int

    def solve(self) -> InterleavedStages | None:
        """Return the best cuts found; None if in none each stage by itself fits its machine."""
        cuts = self._evenest()
        if cuts is None:
            return None
        value, cuts = self.best_of(np.array([cuts]))
        while True:
            for moved in (1, 2):
                new_value, better = self.best_of(self._moves(cuts, moved))
                if _is_less(new_value, value):
                    value, cuts = new_value, better
                    break
            else:
                return InterleavedStages(tuple(cuts), value[0])

    def _evenest(self) -> list[int] | None:
        """Return the cuts with the least sum of squared loads."""
        size = len(self.loads[0])
        best = np.full(size, np.inf)
        best[-1] = 0.0
        ends = []
        for stage in reversed(range(len(self.loads))):
            fits = self.needs[stage] <= self.rooms[stage % len(self.rooms)]
            total = np.where(fits, self.loads[stage], np.inf) ** 2 + best
            ends.append(total.argmin(1))
            best = total.min(1)
        if not np.isfinite(best[0]):
            return None
        cuts = [0]
        for end in reversed(ends):
            cuts.append(int(end[cuts[-1]]))
        return cuts

    def _moves(self, cuts: Sequence[int], moved: int) -> NDArray[np.int64]:
        """Return (variants, cuts) these cuts, and with ``moved`` of them shifted by 1, 2, 4, ..."""
        steps = 1 << np.arange(len(self.loads[0]).bit_length())
        directions = np.array(list(product((-1, 1), repeat=moved)))
        shifts = (steps[:, None, None] * directions).reshape(-1, moved)
        positions = np.array(list(combinations(range(1, len(cuts) - 1), moved)), dtype=np.int64)
        variants = np.tile(np.array(cuts), (len(positions) * len(shifts) + 1, 1))
        if len(positions):
            rows = np.arange(len(variants) - 1)[:, None]
            variants[rows, np.repeat(positions, len(shifts), axis=0)] += np.tile(shifts, (len(positions), 1))
        return np.asarray(variants[(np.diff(variants, axis=1) > 0).all(1)])

    def best_of(self, variants: NDArray[np.int64]) -> tuple[Value, list[int]]:
        """Return the least value of (variants, cuts) variants, and its cuts."""
        machines = len(self.rooms)
        loads, needs = (np.zeros((len(variants), machines)) for _ in range(2))
        largest = np.zeros(len(variants))
        for stage, (load, need) in enumerate(zip(self.loads, self.needs, strict=True)):
            span = variants[:, stage], variants[:, stage + 1]
            loads[:, stage % machines] += load[span]
            needs[:, stage % machines] += need[span]
            largest = np.maximum(largest, load[span])
        fullest = (needs / np.maximum(self.rooms, 1.0)).max(1)
        excess = np.maximum(0.0, fullest - 1.0)
        seconds = self.microbatches * loads.max(1) + (machines - 1) * largest
        squares = (loads**2).sum(1)
        best = int(np.lexsort((squares, seconds, excess))[0])
        return (float(excess[best]), float(seconds[best]), float(squares[best])), variants[best].tolist()


def _is_less(value: Value, other: Value) -> bool:
    """Whether the first element that differs by more than rounding is less."""
    for a, b in zip(value, other, strict=True):
        if abs(a - b) > ROUNDING * abs(b):
            return a < b
    return False
