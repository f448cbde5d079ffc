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
from graphplan.passes.occupancy import count_waits
from graphplan.passes.parts import Part
from graphplan.passes.pricing import Effort
from graphplan.passes.shares import Shares

__all__ = ["Columns"]

Floats = npt.NDArray[np.float64]

_WORK = 6e9  # numbers that knapsacks may touch, some seconds
_LARGE = 300  # operations from which all of this work is done
_HUGE = 1500  # from which less is done: rounds take long, and bounds without them are good
_BRANCH_WORK = 2e8  # the same for branches
_TURN = 60  # rounds of column generation between dives
_ROUNDS = 15  # after which prices are near their best, mostly
_SPEED = 5e8  # numbers that knapsacks touch in a second, about
_EARLY = 0.75  # of the time that is left that these rounds may take to come before labels, ...
_EARLY_WORK = 2e9  # ... numbers, where nobody asked for time
_PREPARING = 0.3e-3  # seconds per operation that it takes at least to prepare knapsacks, ...
_WAITING = 1e-5  # ... and for each that runs while a value waits
_MANY, _UNLIKE = 5, 4  # devices, and kinds of them, from which there are many labels


class Columns:
    """Raises the bounds of the parts; where labels have found no placements, dives for some.

    Args:
        incumbent: the best placement and bound, which are made better.
        shares: of the whole problem.
        parts: it, or those that it falls into.
        stacked: whether most units are like others.
    """

    def __init__(self, incumbent: Incumbent, shares: Shares, parts: list[Part], *, stacked: bool) -> None:
        self.stacked = stacked
        self.incumbent, self.parts, self.limits = incumbent, parts, incumbent.limits
        # prices of a part are not the whole's
        self.whole = parts[0] if len(parts) == 1 else Part(incumbent.problem, shares)
        self.ran: list[Part] = []

    @property
    def over(self) -> bool:
        return self.incumbent.done or self.limits.over

    def run_early(self) -> None:
        """Where rounds are quick, as in stacks of equal layers, what they prove spares others their work."""
        limits = self.incumbent.limits
        allowed = _EARLY_WORK if limits.left is None else _EARLY * _SPEED * limits.left
        shares = self.whole.shares
        kinds = [kind for kind, some in zip(shares.kinds, shares.runs, strict=True) if some]
        many = sum(len(kind.keys) for kind in kinds) >= _MANY
        if self.incumbent.done or not (many or len(kinds) >= _UNLIKE) or self._is_late(self.whole):
            return
        if self._begin(self.whole, None).foresee(_ROUNDS) > allowed:
            return
        self.limits = limits.until(0.95 if many else 0.6)  # labels of many devices prove little
        self._run_whole(dives=False)
        if self.whole.generation is not None and self.whole.generation.converged:
            self._run_parts()

    def run(self, limits: Limits) -> None:
        """Do what has not been done, until there is an end of time or work."""
        if self.incumbent.done:
            return
        self.limits = limits
        known = any(part in self.ran or part.bound >= self.incumbent.enough for part in self.parts)
        if self.whole in self.parts or not known:  # else some part has shown that the whole proves less
            # in a stack, shares say how many layers a device has, and not which
            self._run_whole(dives=not self.stacked and all(part.labels is None for part in self.parts))
        generation = self.whole.generation
        if generation is None or generation.converged or generation.futile:
            self._run_parts()
        self._finish()
        self._branch_out()

    def _run_whole(self, *, dives: bool) -> None:
        """The bound of the whole is one of its parts too."""
        generation = self.whole.generation
        if generation is not None and generation.converged:
            return
        worth = self.whole.worth if self.whole in self.parts else None
        self._run(self.whole, worth, self.limits.until(0.9), dives=dives)
        for part in self.parts:
            part.bound = max(part.bound, self.whole.bound)
        self._tell()

    def _run_parts(self) -> None:
        waiting = [part for part in self.parts if part not in self.ran]
        waiting.sort(key=lambda part: part.bound)
        for part in waiting:  # one after the other: what has not converged proves little
            if self.over:
                return
            if part.bound < self.incumbent.enough:
                like = next((one for one in reversed(self.ran) if one.is_like(part)), None)
                near = like or (self.whole if self.whole.generation is not None else None)
                worth = part.worth if near is None else near.worth
                self._run(part, worth, self.limits.until(0.9), dives=False, near=near)

    def _finish(self) -> None:
        """What has not converged goes on where there is time."""
        for part in sorted(self.parts, key=lambda part: part.bound):
            generation = part.generation
            if not self.incumbent.timed or generation is None or generation.converged or generation.futile:
                continue
            if not self.over:
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
            if part.tree is None or part.tree.lowest is None or part.tree.late:
                return

    def _branch(self, part: Part, generation: ColumnGeneration, work: float) -> float:
        """A turn of branching in a part, and a dive into its weakest branch; the work that it took."""
        before = generation if part.tree is None else part.tree.lowest
        part.tree = part.tree or Tree(generation)
        turn = min(work, _TURN * generation.pricing.work(Effort.WHOLE))
        part.tree.grow(enough=self.incumbent.enough, work=turn, deadline=self.limits.deadline)
        part.bound = max(part.bound, part.tree.bound)
        self._tell()
        if not self.stacked and part.tree.lowest is not None and part.tree.lowest is not before:
            self._dive(part, part.tree.lowest, work)
        return turn

    def _run(
        self, part: Part, worth: Floats | None, limits: Limits, *, dives: bool, near: Part | None = None
    ) -> None:
        if self._is_late(part):
            return
        effort = min(1.0, part.shares.units / _LARGE, _HUGE / part.shares.units)
        work = effort * _WORK if limits.deadline is None else np.inf
        generation = self._begin(part, worth, near)
        if part not in self.ran:
            self.ran.append(part)
        deadline = limits.until(0.8 if dives else 1.0).deadline
        proven = max(part.bound, self.incumbent.bound.seconds)
        generation.run(enough=self.incumbent.enough, work=work, deadline=deadline, proven=proven)
        part.bound = max(part.bound, generation.bound)
        self._tell()
        if dives:
            self._dive(part, generation, work / 4)

    def _is_late(self, part: Part) -> bool:
        """Whether time would be up before the knapsacks of a part are prepared."""
        left = self.limits.left
        if part.generation is not None or left is None:
            return False
        return left < _PREPARING * part.shares.units + _WAITING * count_waits(part.shares.graph)

    def _begin(self, part: Part, worth: Floats | None, near: Part | None = None) -> ColumnGeneration:
        if part.generation is not None:
            return part.generation
        generation = part.begin_columns(self.incumbent.best, worth)
        if near is not None and near.generation is not None and near.is_like(part):
            generation.borrow(near.generation)
        return generation

    def _dive(self, part: Part, generation: ColumnGeneration, work: float) -> None:
        if self.over:
            return
        found, _ = dive(part.problem, generation, work=work, deadline=self.limits.deadline)
        for evaluation in found:
            self.incumbent.polish(evaluate(self.incumbent.problem, evaluation.schedule.assignment))

    def _tell(self) -> None:
        if not self.ran or self.ran[0].shares.ties_travel:
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
