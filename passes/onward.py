"""The cheapest way from each state of a frontier to the end, when bytes have a price instead of a limit.

That is a lower bound for what remains (Lagrange's), and it guides the search in ``labels``. The prices
whose bound is highest are found by cutting planes (Kelley, "The cutting-plane method for solving convex
programs", 1960).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from graphplan.passes.frontier import Frontier
from graphplan.passes.states import make_stages

__all__ = ["Onward"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_ROUNDS = 40  # of looking for better prices
_ACCURACY = 5e-4  # share of the bound that better prices could add, for which none are looked for
_DEAREST = 100.0  # price of a whole device, in calls


@dataclass(frozen=True, slots=True)
class _Cut:
    """A placement that bounds what any prices can prove: its seconds, and bytes beyond the room."""

    seconds: float
    over: Floats


class Onward:
    """States of a frontier, prices of bytes, and what is left to pay at these.

    Attributes:
        frontier: whose states these are.
        stages: one for each step.
        spare: (devices,) bytes for weights at most.
        prices: (devices,) seconds per byte.
        bound: seconds that no placement can go below; infinite where none is possible.
        rest: (states,) seconds and priced bytes before each step and after the last, to the end.
    """

    def __init__(self, frontier: Frontier) -> None:
        self.frontier = frontier
        self.stages = make_stages(frontier, alike=True)
        self.spare = np.maximum(frontier.room - frontier.least, 0.0)
        self._total = float(sum(step.nbytes for step in frontier.steps))
        self.prices = np.zeros(frontier.count)
        self.bound = 0.0
        self.rest: list[Floats] = []

    def price(self, best: float, deadline: float | None = None) -> None:
        """Find the prices whose bound is highest.

        Args:
            best: seconds of a known placement, which no bound needs to pass.
            deadline: ``time.monotonic()`` at which to stop, or None.
        """
        if not all(len(stage.states) for stage in self.stages):
            self.bound = np.inf
            return
        prices, cuts = self.prices, list[_Cut]()
        for _ in range(_ROUNDS):
            rest = self._to_the_end(prices)
            bound = float(rest[0][0] - prices @ self.spare)
            if not self.rest or bound > self.bound:
                self.bound, self.prices, self.rest = bound, prices, rest
            if self.bound >= best or (deadline is not None and time.monotonic() > deadline):
                return
            nbytes = self._bytes(prices, rest)
            cuts.append(_Cut(float(rest[0][0] - prices @ nbytes), self.frontier.evenly(nbytes - self.spare)))
            highest, proposed = _highest(cuts, best, float(self.spare.max(initial=1.0)))
            if highest - self.bound < _ACCURACY * highest:
                return
            prices = (self.prices + self.frontier.evenly(proposed)) / 2

    def _to_the_end(self, prices: Floats) -> list[Floats]:
        frontier = self.frontier
        last, bits = self.stages[-1].states, frontier.bits[:, None]
        used = (last[None, :] & bits) > 0
        extra = np.where((last[None, :] >> frontier.count & bits) > 0, frontier.heavy[:, None], 0)
        enough = np.where(used, self.spare[:, None] - extra, 0.0).sum(axis=0) >= self._total
        rest = [np.where(enough, prices @ extra, np.inf)]
        for step, stage in zip(reversed(frontier.steps), reversed(self.stages), strict=True):
            each = rest[-1][stage.onward]
            each += stage.seconds
            each += (prices * step.nbytes)[:, None]
            rest.append(each.min(axis=0))
        return rest[::-1]

    def worth(self, items: int) -> Floats:
        """(items,) seconds and priced bytes of each in the cheapest placement at the prices found."""
        worth, state = np.zeros(items), 0
        for step, stage, after in zip(self.frontier.steps, self.stages, self.rest[1:], strict=True):
            onward = stage.onward[:, state]
            paid = stage.seconds[:, state] + self.prices * step.nbytes
            device = int((paid + after[onward]).argmin())
            worth[step.variable] = paid[device]
            state = int(onward[device])
        return worth

    def _bytes(self, prices: Floats, rest: Sequence[Floats]) -> Floats:
        """(devices,) bytes of the cheapest placement at these prices."""
        frontier = self.frontier
        nbytes, state = np.zeros(frontier.count), 0
        for step, stage, after in zip(frontier.steps, self.stages, rest[1:], strict=True):
            onward = stage.onward[:, state]
            device = int((stage.seconds[:, state] + prices * step.nbytes + after[onward]).argmin())
            nbytes[device] += step.nbytes
            state = int(onward[device])
        heavy = int(self.stages[-1].states[state]) >> frontier.count & frontier.bits
        return nbytes + np.where(heavy > 0, frontier.heavy, 0)


def _highest(cuts: Sequence[_Cut], best: float, room: float) -> tuple[float, Floats]:
    """The highest bound that the cuts leave possible, and its prices."""
    over = np.array([cut.over for cut in cuts]) / room
    found = linprog(
        [-1.0, *[0.0] * over.shape[1]],
        A_ub=np.hstack([np.ones((len(cuts), 1)), -over]),
        b_ub=np.array([cut.seconds for cut in cuts]) / best,
        bounds=[(0.0, 2.0), *[(0.0, _DEAREST)] * over.shape[1]],
        method="highs",
    )
    return -float(found.fun) * best, np.asarray(found.x[1:]) * best / room
