"""What the planner answers: a placement, and a lower bound that holds for every other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from graphplan.passes.placement.evaluate import Evaluation
from graphplan.passes.placement.params import ROUNDING
from graphplan.warnings import warn


class Scope(Enum):
    """The placements that a bound holds for, each class a part of the one before it."""

    ANY = "weights may reside anywhere"
    SEARCHED = "weights reside where they are read, those of several where anything runs; or on the CPU"
    ON_ACCELERATORS = "on the accelerators"
    WITHOUT_OFFLOAD = "without offload"


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds that no placement of a problem takes less than.

    Attributes:
        seconds: of a forward pass.
        proof: the method that proved it.
        scope: the placements that it holds for.
    """

    seconds: float = 0.0
    proof: str = "no bound"
    scope: Scope = Scope.SEARCHED

    def raised(self, seconds: float, proof: str) -> Bound:
        """The higher of two bounds for the same placements."""
        return replace(self, seconds=seconds, proof=proof) if seconds > self.seconds else self

    @property
    def text(self) -> str:
        """The method, and the placements if they are a class that users know."""
        narrow = self.scope in (Scope.ON_ACCELERATORS, Scope.WITHOUT_OFFLOAD)
        return f"{self.proof}, {self.scope.value}" if narrow else self.proof


@dataclass(frozen=True, slots=True)
class Solution:
    """A placement within the budgets, and a bound on how much faster another could be."""

    evaluation: Evaluation
    bound: Bound

    @property
    def gap(self) -> float:
        """Share of the seconds that lies above the bound."""
        seconds = self.evaluation.seconds
        return 1 - self.bound.seconds / seconds if seconds else 0.0


def certify(evaluation: Evaluation, bound: Bound) -> Solution:
    """A placement with its bound, as far as :func:`checked` lets it pass."""
    return Solution(evaluation, checked(bound, evaluation.seconds))


def checked(bound: Bound, seconds: float) -> Bound:
    """The bound of a plan. One that is above its seconds is a bug, which must show: it is never clamped."""
    if bound.seconds > seconds * (1 + ROUNDING):
        warn(
            f"the planner proved a lower bound of {bound.seconds:.6g} s ({bound.text}) and found a plan of "
            f"{seconds:.6g} s: one of the two is wrong. The plan keeps its budgets, and is "
            "returned without a bound; please report this with the model and the budgets"
        )
        return Bound(0.0, "no bound: the one that was found contradicts the plan")
    # sums in another order may differ in the last bits
    return bound if bound.seconds < seconds else replace(bound, seconds=seconds)
