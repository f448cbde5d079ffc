"""Close the gap by column generation: of the whole, of its parts, and of their branches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graphplan.passes.branch import Tree
from graphplan.passes.columns import ColumnGeneration
from graphplan.passes.dive import dive
from graphplan.passes.evaluate import evaluate
from graphplan.passes.incumbent import Incumbent
from graphplan.passes.limits import Limits
from graphplan.passes.parts import Part
from graphplan.passes.shares import Shares

__all__ = ["generate_columns"]

Floats = npt.NDArray[np.float64]

_WORK = 6e9  # numbers that knapsacks may touch, some seconds
_LARGE = 300  # operations from which all of this work is done
_HUGE = 1500  # from which less is done: rounds take long, and bounds without them are good
_BRANCH_WORK = 2e8  # the same for branches
_TURN = 60  # rounds of column generation between dives


def generate_columns(incumbent: Incumbent, shares: Shares, parts: list[Part], limits: Limits) -> None:
    """Raise the bounds of the parts; where labels have found no placements, dive for some.

    Args:
        incumbent: the best placement and bound, which are made better.
        shares: of the whole problem.
        parts: it, or those that it falls into.
        limits: when to stop.
    """
    if parts and not incumbent.done:
        _Columns(incumbent, parts, limits).run(shares)


class _Columns:
    def __init__(self, incumbent: Incumbent, parts: list[Part], limits: Limits) -> None:
        self.incumbent, self.parts, self.limits = incumbent, parts, limits
        self.ran: list[Part] = []

    @property
    def over(self) -> bool:
        return self.incumbent.done or self.limits.over

    def run(self, shares: Shares) -> None:
        whole = self._run_whole(shares)
        if whole is None or whole.generation is None or whole.generation.converged:
            self._run_parts(whole)
        self._finish()
        self._branch_out()

    def _run_whole(self, shares: Shares) -> Part | None:
        """The bound of the whole is one of its parts too; not where labels have seen the end of some."""
        parts, enough = self.parts, self.incumbent.enough
        limits = self.limits.until(0.9)
        if len(parts) == 1:
            whole = parts[0]
            self._run(whole, whole.worth, limits, dives=whole.labels is None)
            return whole
        if any(part.bound >= enough for part in parts):
            return None
        whole = Part(self.incumbent.problem, shares)  # prices of a part are not the whole's
        self._run(whole, None, limits, dives=False)
        for part in parts:
            part.bound = max(part.bound, whole.bound)
        self._tell()
        return whole

    def _run_parts(self, whole: Part | None) -> None:
        waiting = [part for part in self.parts if part.generation is None]
        waiting.sort(key=lambda part: part.bound)
        for part in waiting:  # one after the other: what has not converged proves little
            if self.over:
                return
            if part.bound < self.incumbent.enough:
                near = whole or next((one for one in reversed(self.ran) if one.is_like(part)), None)
                worth = part.worth if near is None else near.worth
                self._run(part, worth, self.limits.until(0.9), dives=False, near=near)

    def _finish(self) -> None:
        """What has not converged goes on where there is time."""
        for part in sorted(self.parts, key=lambda part: part.bound):
            generation = part.generation
            if self.incumbent.timed and generation is not None and not generation.converged and not self.over:
                generation.run(enough=self.incumbent.enough, work=np.inf, deadline=self.limits.deadline)
                part.bound = max(part.bound, generation.bound)
                self._tell()

    def _branch_out(self) -> None:
        """Branch in the part with the lowest bound, again and again."""
        effort = min(1.0, self.parts[0].shares.units / _LARGE)
        work = np.inf if self.incumbent.timed else effort * _BRANCH_WORK
        while not self.over and work > 0:
            part = min(self.parts, key=lambda part: part.bound)
            if part.generation is None or not part.generation.converged:
                return
            work -= self._branch(part, part.generation, work)
            if part.tree is None or part.tree.lowest is None:
                return

    def _branch(self, part: Part, generation: ColumnGeneration, work: float) -> float:
        """A turn of branching in a part, and a dive into its weakest branch; the work that it took."""
        before = generation if part.tree is None else part.tree.lowest
        part.tree = part.tree or Tree(generation)
        turn = min(work, _TURN * generation.pricing.work(rough=False))
        part.tree.grow(enough=self.incumbent.enough, work=turn, deadline=self.limits.deadline)
        part.bound = max(part.bound, part.tree.bound)
        self._tell()
        if part.tree.lowest is not None and part.tree.lowest is not before:
            self._dive(part, part.tree.lowest, work)
        return turn

    def _run(
        self, part: Part, worth: Floats | None, limits: Limits, *, dives: bool, near: Part | None = None
    ) -> None:
        effort = min(1.0, part.shares.units / _LARGE, _HUGE / part.shares.units)
        work = effort * _WORK if limits.deadline is None else np.inf
        generation = part.begin_columns(self.incumbent.best, worth)
        if near is not None and near.generation is not None and near.is_like(part):
            generation.borrow(near.generation)
        self.ran.append(part)
        deadline = limits.until(0.8 if dives else 1.0).deadline
        generation.run(enough=self.incumbent.enough, work=work, deadline=deadline)
        part.bound = max(part.bound, generation.bound)
        self._tell()
        if dives:
            self._dive(part, generation, work / 4)

    def _dive(self, part: Part, generation: ColumnGeneration, work: float) -> None:
        if self.over:
            return
        found, _ = dive(part.problem, generation, work=work, deadline=self.limits.deadline)
        for evaluation in found:
            self.incumbent.polish(evaluate(self.incumbent.problem, evaluation.schedule.assignment))

    def _tell(self) -> None:
        if self.ran and self.ran[0].shares.ties_travel:
            return
        self.incumbent.raise_bound(min(part.bound for part in self.parts), self._proof())

    def _proof(self) -> str:
        """What column generation was run over."""
        shares = self.ran[0].shares
        rounds = sum(part.generation.rounds for part in self.ran if part.generation is not None)
        looked = sum(part.tree.looked for part in self.ran if part.tree is not None)
        homes = sum(1 for part in self.ran if part.problem is not self.incumbent.problem)
        apart = f" by the home of a shared weight ({homes} of them)" if homes else ""
        branches = f", {looked} branches" if looked else ""
        groups = f"{shares.units} operations in {len(shares.counts)} groups"
        return f"column generation over {groups}{apart}, {rounds} rounds{branches}"
