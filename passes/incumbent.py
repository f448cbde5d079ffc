"""The best placement known and the highest bound: what a search begins with, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from graphplan.device import DeviceKey
from graphplan.passes.bound import Bound
from graphplan.passes.chain import Chain
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.limits import Limits
from graphplan.passes.refine import refine
from graphplan.passes.repair import repair
from graphplan.passes.residence import follow, reside
from graphplan.passes.shares import Shares

__all__ = ["ENOUGH", "Incumbent"]

ENOUGH = 1e-3  # gap at which to stop
_SLACK = 1e-6  # of what was searched for
_POLISH_WORK = 60_000  # of the local search where nobody asked for time
_LONG_WORK = 1_000_000  # in the end, where somebody did
_PROMISING = 1.1  # times the best seconds, up to which a placement is refined


class Incumbent:
    """The state of a search.

    Args:
        problem: what is placed.
        chain: its order.
        best: a placement within the budgets.
        bound: seconds that none can go below.
        limits: when to stop.

    Attributes:
        best: the fastest placement so far.
        bound: seconds that none can go below, and what proved it.
    """

    def __init__(
        self, problem: Problem, chain: Chain, best: Evaluation, bound: Bound, limits: Limits
    ) -> None:
        self.problem, self.chain, self.best, self.limits = problem, chain, best, limits
        self.bound = bound

    @property
    def timed(self) -> bool:
        """Whether the search goes by the clock; by work otherwise."""
        return self.limits.deadline is not None

    @property
    def enough(self) -> float:
        """A bound that needs no improvement."""
        return self.best.seconds * (1 - ENOUGH)

    @property
    def done(self) -> bool:
        """Whether time is up, or the bound high enough."""
        return self.limits.over or self.bound.seconds >= self.enough * (1 - _SLACK)

    def adopt(self, found: Evaluation) -> None:
        """Take a placement if it is the best."""
        if found.feasible and found.seconds < self.best.seconds:
            self.best = found

    def raise_bound(self, seconds: float, proof: str) -> None:
        """Take a bound if it is the highest."""
        if seconds > self.bound.seconds:
            self.bound = Bound(seconds, proof)

    def evaluate(
        self,
        shares: Shares,
        devices: Mapping[int, DeviceKey],
        brought: Iterable[str] = (),
        within: Problem | None = None,
    ) -> Evaluation:
        """Judge a placement of items of ``shares``.

        Args:
            shares: that number the items.
            devices: item -> device.
            brought: weights that are not kept where they are read.
            within: a narrower problem that says where weights live.
        """
        placed = {name: key for unit, key in devices.items() for name in shares.items[unit].members}
        operations = self.problem.obey(follow(self.problem.graph, placed))
        return evaluate(self.problem, reside(within or self.problem, operations, brought))

    def polish(self, found: Evaluation, *, briefly: bool = False) -> None:
        """Mend and refine what may become the best."""
        if not found.feasible:
            found = repair(self.problem, self.chain, found, deadline=self.limits.deadline)
        if found.feasible and found.seconds < self.best.seconds * _PROMISING:
            self.adopt(found)
            work = 10 * _POLISH_WORK if self.timed and not briefly else _POLISH_WORK
            self.adopt(refine(self.problem, self.chain, found, work, self.limits.deadline))

    def refine_to_the_end(self) -> None:
        """Refine the best as long as that helps and there is time."""
        while not self.done:
            before = self.best.seconds
            self.adopt(refine(self.problem, self.chain, self.best, _LONG_WORK, self.limits.deadline))
            if self.best.seconds >= before:
                return
