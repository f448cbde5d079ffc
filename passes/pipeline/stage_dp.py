"""Dynamic programming over cuts: contiguous stages of the order, one on each machine that is used.

The objective for ``m`` microbatches is ``sum of stages + (m - 1) * slowest stage``: one microbatch passes all
stages, and the others leave the slowest one after another. For one microbatch that is the latency; for
forward passes it is the time of the batch. In a training step, where a stage counts forward and backward, it
is a lower bound on GPipe, exact if the slowest forward and the slowest backward pass are those of one stage.
1F1B takes no longer than GPipe; for it the objective is exact if stages are equal and transfers take no time,
and otherwise an estimate. Placed stages are compared by their simulated time.

The least sum of stages is a shortest path over cuts, the least maximum a bottleneck path (Bokhari,
"Partitioning problems in parallel, pipelined, and distributed computing", 1988). A shortest path of edges
within a limit gives the least sum for it, and the limit is bisected.

A state is the number of machines of each class that the stages after a cut use: identical machines are
searched once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from graphplan.passes.pipeline.cut_params import PARAMS
from graphplan.passes.placement.params import ROUNDING
from graphplan.passes.placement.segment_dp import CutPaths, used_devices

Floats = NDArray[np.float64]
State = tuple[int, ...]  # machines of each class that the stages from a cut on use


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of one microbatch in each stretch between two cuts, infinite where it does not fit.

    Attributes:
        seconds: for each class of machines, (cuts, cuts) seconds from the first tensor that arrives until
            the last that is sent, each transfer counted by its sender only: the time of a microbatch.
        load: likewise, with the transfers that arrive: how long the machine is busy.
    """

    seconds: Sequence[Floats]
    load: Sequence[Floats]


@dataclass(frozen=True, slots=True)
class Segments:
    """Contiguous stages, in order.

    Attributes:
        cuts: indices of the candidate cuts, from the first to the last; one more than stages.
        classes: the class of the machine of each stage.
        total: seconds of all stages.
        slowest: load of the busiest machine.
    """

    cuts: tuple[int, ...]
    classes: tuple[int, ...]
    total: float
    slowest: float

    def seconds(self, microbatches: int) -> float:
        """Return the objective for ``microbatches``."""
        return self.total + (microbatches - 1) * self.slowest


def states_of(counts: Sequence[int]) -> list[State]:
    """Return all states; if they are too many, those that fill classes one by one, the last one first."""
    return used_devices(counts, PARAMS.states, reversed(range(len(counts))))


@dataclass(slots=True)
class StageDP:
    """Finds the stages of the least objective.

    Attributes:
        costs: costs of each stretch on each class of machines.
        counts: number of machines of each class.
        fits: class, number of later stages -> (cuts, cuts) mask of the stretches that fit; None if that is
            of no account.
        max_stages: largest number of stages.
    """

    costs: StageCosts
    counts: Sequence[int]
    fits: Callable[[int, int], NDArray[np.bool_]] | None = None
    max_stages: float = math.inf
    _states: list[State] = field(init=False)

    def __post_init__(self) -> None:
        self._states = [state for state in states_of(self.counts) if sum(state) <= self.max_stages]

    def evenest(self) -> Segments | None:
        """Return the stages whose busiest machine has the least load: the best for very many microbatches."""
        return self._path(np.inf, bottleneck=True)

    def solve(self, microbatches: int) -> Segments | None:
        """Return the stages of the least objective, within a tolerance; None if none fit."""
        quickest, evenest = self._path(np.inf, bottleneck=False), self.evenest()
        if quickest is None or evenest is None:
            return None
        if microbatches == 1:
            return self._more_even(quickest, evenest.slowest)
        even = self._path(evenest.slowest * (1 + ROUNDING), bottleneck=False)
        assert even is not None
        best = min((quickest, even), key=lambda candidate: candidate.seconds(microbatches))
        spans = [(even.slowest, quickest)]  # pipelines whose slowest stage lies between have no lower total
        for _ in range(PARAMS.limits):
            low, high = spans.pop() if spans else (quickest.slowest, quickest)
            optimistic, middle = high.total + (microbatches - 1) * low, (low + high.slowest) / 2
            if low >= high.slowest or optimistic >= best.seconds(microbatches) * (1 - PARAMS.tolerance):
                continue
            candidate = self._path(middle, bottleneck=False)
            if candidate is None:
                continue
            best = min((best, candidate), key=lambda path: path.seconds(microbatches))
            spans += [(middle, high), (low, candidate)]
        return best

    def _more_even(self, quickest: Segments, low: float) -> Segments:
        """Return the most even stages among those that are as few and, by estimate, as fast."""
        best = quickest
        while low < best.slowest * (1 - PARAMS.tolerance):
            middle = (low + best.slowest) / 2
            candidate = self._path(middle, bottleneck=False, max_stages=len(quickest.classes))
            if candidate is not None and candidate.total <= quickest.total * (1 + PARAMS.worth):
                best = candidate
            else:
                low = middle
        return best

    def _path(self, limit: float, *, bottleneck: bool, max_stages: float = np.inf) -> Segments | None:
        """Return the stages of least sum with no load above the limit, or of least load."""
        size, edges = len(self.costs.load[0]), self._edges(limit, bottleneck=bottleneck)
        start: State = (0,) * len(self.counts)
        paths, states = CutPaths(start, size - 1, size, bottleneck=bottleneck), set(self._states)
        for state in self._states:
            for c, used in enumerate(state):
                after = (*state[:c], used + 1, *state[c + 1 :])
                if after in states:
                    paths.extend(state, after, edges(c, sum(state)))
        offered = (state for state in self._states[1:] if sum(state) <= max_stages)
        final = min(offered, key=lambda state: (paths.rows[state].cost[0], sum(state)))
        if not np.isfinite(paths.rows[final].cost[0]):
            return None
        cuts, classes, total, slowest = [0], list[int](), 0.0, 0.0
        for later, state, end, at in paths.edges(final, 0):
            c = next(c for c, used in enumerate(later) if used < state[c])
            total += float(self.costs.seconds[c][at, end])
            slowest = max(slowest, float(self.costs.load[c][at, end]))
            cuts.append(end)
            classes.append(c)
        return Segments(tuple(cuts), tuple(classes), total, slowest)

    def _edges(self, limit: float, *, bottleneck: bool) -> Callable[[int, int], Floats]:
        """Return a function of class and number of later stages: (cuts, cuts) cost of a stretch."""
        costs = self.costs.load if bottleneck else self.costs.seconds
        memo: dict[tuple[int, int], Floats] = {}

        def edge(c: int, later_stages: int) -> Floats:
            key = c, later_stages if self.fits is not None else 0
            if key not in memo:
                allowed = self.costs.load[c] <= limit
                if self.fits is not None:
                    allowed = allowed & self.fits(c, later_stages)
                memo[key] = np.where(allowed, costs[c], np.inf)
            return memo[key]

        return edge
