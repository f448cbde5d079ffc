"""Dynamic programming over cuts: contiguous stages of the order, one on each machine that is used.

A pipeline of ``m`` microbatches takes ``sum of stages + (m - 1) * slowest stage``: one microbatch passes all
stages, and the others leave the slowest one after another (the bubble of GPipe: Huang et al., NeurIPS 2019).
For one microbatch that is the latency. Stages of least sum are a shortest path over cuts, of least maximum a
bottleneck path (Bokhari, "Partitioning problems in parallel, pipelined, and distributed computing", 1988);
with a limit on the slowest stage, the first gives the least sum within it, and the limit is bisected.

A state is how many machines of each class the stages after a cut use: equal machines are searched once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from graphplan.passes.pipeline.cut_params import PARAMS
from graphplan.passes.placement.params import ROUNDING
from graphplan.passes.placement.segment_dp import used_devices

Floats = NDArray[np.float64]
State = tuple[int, ...]  # machines of each class that the stages from a cut on use


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of one microbatch in each stretch between two cuts, infinite where it does not fit.

    Attributes:
        seconds: for each class of machines, (cuts, cuts) seconds from the first tensor that arrives until
            the last that is sent, each transfer counted once, where it is sent: what a microbatch takes.
        load: likewise, with what arrives counted too: what the machine is busy for.
    """

    seconds: Sequence[Floats]
    load: Sequence[Floats]


@dataclass(frozen=True, slots=True)
class Segments:
    """Stages in order.

    Attributes:
        cuts: indices of the candidate cuts, from the first to the last; one more than stages.
        classes: the class of the machine of each stage.
        total: seconds of all stages.
        slowest: load of the busiest.
    """

    cuts: tuple[int, ...]
    classes: tuple[int, ...]
    total: float
    slowest: float

    def seconds(self, microbatches: int) -> float:
        """Of so many microbatches, the bubble counted."""
        return self.total + (microbatches - 1) * self.slowest


def states_of(counts: Sequence[int]) -> list[State]:
    """The states of so many machines of each class; where there are too many, from the last class on."""
    return used_devices(counts, PARAMS.states, reversed(range(len(counts))))


@dataclass(slots=True)
class StageDP:
    """Finds stages.

    Attributes:
        costs: of each stretch on each class.
        counts: machines of each class.
        fits: whether a stretch fits a class of machines where so many stages follow; None where that does
            not matter. Returns a (cuts, cuts) mask.
    """

    costs: StageCosts
    counts: Sequence[int]
    fits: Callable[[int, int], NDArray[np.bool_]] | None = None
    _states: list[State] = field(init=False)

    def __post_init__(self) -> None:
        self._states = states_of(self.counts)

    def evenest(self) -> Segments | None:
        """The stages of the least load of the busiest machine: what very many microbatches ask for."""
        return self._path(np.inf, bottleneck=True)

    def solve(self, microbatches: int) -> Segments | None:
        """The stages of the least seconds, within a tolerance; None where none fit."""
        quickest, evenest = self._path(np.inf, bottleneck=False), self.evenest()
        if quickest is None or evenest is None:
            return None
        if microbatches == 1:
            return self._more_even(quickest, evenest.slowest)
        least = self._path(evenest.slowest * (1 + ROUNDING), bottleneck=False)
        assert least is not None
        best = min((quickest, least), key=lambda found: found.seconds(microbatches))
        spans = [(least.slowest, quickest)]  # what is slower than the first takes the second's total at least
        for _ in range(PARAMS.limits):
            low, high = spans.pop() if spans else (quickest.slowest, quickest)
            optimistic, middle = high.total + (microbatches - 1) * low, (low + high.slowest) / 2
            if low >= high.slowest or optimistic >= best.seconds(microbatches) * (1 - PARAMS.tolerance):
                continue
            found = self._path(middle, bottleneck=False)
            if found is None:
                continue
            best = min((best, found), key=lambda one: one.seconds(microbatches))
            spans += [(middle, high), (low, found)]
        return best

    def _more_even(self, quickest: Segments, least: float) -> Segments:
        """No more stages that take as long by estimate, and fill no machine more than they must."""
        best = quickest
        while least < best.slowest * (1 - PARAMS.tolerance):
            middle = (least + best.slowest) / 2
            found = self._path(middle, bottleneck=False, most=len(quickest.classes))
            if found is not None and found.total <= quickest.total * (1 + PARAMS.worth):
                best = found
            else:
                least = middle
        return best

    def _path(self, limit: float, *, bottleneck: bool, most: float = np.inf) -> Segments | None:
        """At most so many stages, of the least sum with no load above the limit, or of the least load."""
        size = len(self.costs.load[0])
        start: State = (0,) * len(self.counts)
        at_end = np.full(size, np.inf)
        at_end[-1] = 0.0
        best: dict[State, Floats] = {start: at_end}
        choice: dict[State, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        edges = self._edges(limit, bottleneck=bottleneck)
        for state in self._states[1:]:
            seconds = np.full(size, np.inf)
            ends, classes = np.full(size, -1), np.full(size, -1)
            for c, used in enumerate(state):
                before = best.get((*state[:c], used - 1, *state[c + 1 :])) if used else None
                if before is None or not np.isfinite(before).any():
                    continue
                edge = edges(c, sum(state) - 1)
                through = np.maximum(edge, before) if bottleneck else edge + before
                end = through.argmin(1)
                value = through[np.arange(size), end]
                better = value < seconds
                seconds[better], ends[better], classes[better] = value[better], end[better], c
            best[state], choice[state] = seconds, (ends, classes)
        offered = (state for state in self._states[1:] if sum(state) <= most)
        final = min(offered, key=lambda state: (best[state][0], sum(state)))
        return self._trace(final, choice) if np.isfinite(best[final][0]) else None

    def _edges(self, limit: float, *, bottleneck: bool) -> Callable[[int, int], Floats]:
        """Of a class, and of the number of stages that follow: what a stretch adds."""
        costs = self.costs.load if bottleneck else self.costs.seconds
        known: dict[tuple[int, int], Floats] = {}

        def edge(c: int, after: int) -> Floats:
            key = c, after if self.fits is not None else 0
            if key not in known:
                made = np.where(self.costs.load[c] <= limit, costs[c], np.inf)
                known[key] = made if self.fits is None else np.where(self.fits(c, after), made, np.inf)
            return known[key]

        return edge

    def _trace(
        self, state: State, choice: dict[State, tuple[NDArray[np.int64], NDArray[np.int64]]]
    ) -> Segments:
        cuts, classes, at = [0], [], 0
        total, slowest = 0.0, 0.0
        while any(state):
            ends, by = choice[state]
            end, c = int(ends[at]), int(by[at])
            total += float(self.costs.seconds[c][at, end])
            slowest = max(slowest, float(self.costs.load[c][at, end]))
            state = (*state[:c], state[c] - 1, *state[c + 1 :])
            cuts.append(end)
            classes.append(c)
            at = end
        return Segments(tuple(cuts), tuple(classes), total, slowest)
