"""What the planner answers: a placement, and a lower bound that holds for every other."""

from __future__ import annotations

from dataclasses import dataclass

from graphplan.passes.placement.evaluate import Evaluation
from graphplan.passes.placement.params import ROUNDING
from graphplan.warnings import warn


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds that no placement of a problem takes less than, and the method that proved it."""

    seconds: float = 0.0
    proof: str = "no bound"

    def raised(self, seconds: float, proof: str) -> Bound:
        """The higher of two bounds of one problem."""
        return Bound(seconds, proof) if seconds > self.seconds else self


@dataclass(frozen=True, slots=True)
class Solution:
    """A placement within the budgets, and a bound on how much faster another could be."""

    evaluation: Evaluation
    lower_bound: float
    proof: str

    @property
    def gap(self) -> float:
        """Share of the seconds that lies above the bound."""
        seconds = self.evaluation.seconds
        return 1 - self.lower_bound / seconds if seconds else 0.0


def certify(evaluation: Evaluation, bound: Bound) -> Solution:
    """A placement with its bound, as far as :func:`checked` lets it pass."""
    found = checked(bound, evaluation.seconds)
    return Solution(evaluation, found.seconds, found.proof)


def checked(bound: Bound, seconds: float) -> Bound:
    """The bound of a plan. One that is above it is a bug, which must show: it is never clamped.

    Args:
        bound: that was proved.
        seconds: of the plan.
    """
    if bound.seconds > seconds * (1 + ROUNDING):
        warn(
            f"the planner proved a lower bound of {bound.seconds:.6g} s ({bound.proof}) and found a plan of "
            f"{seconds:.6g} s: one of the two is wrong. The plan keeps its budgets, and is "
            "returned without a bound; please report this with the model and the budgets"
        )
        return Bound(0.0, "no bound: the one that was found contradicts the plan")
    # sums in another order may differ in the last bits
    return Bound(bound.seconds if bound.seconds < seconds else seconds, bound.proof)
