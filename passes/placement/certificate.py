"""The planner's output: a placement, and a lower bound on the seconds of every other placement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from graphplan.passes.placement.evaluate import Evaluation
from graphplan.passes.placement.params import ROUNDING
from graphplan.warnings import warn


class Scope(Enum):
    """The set of placements that a bound holds for. Each member is a subset of the one before it."""

    ANY = "weights may reside anywhere"
    SEARCHED = "a weight that one macro-operation reads resides with it or on the CPU"
    ON_ACCELERATORS = "on the accelerators"
    WITHOUT_OFFLOAD = "without offload"


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on the seconds of a problem's placements.

    Attributes:
        seconds: the bound, for one forward pass.
        proof: the method that proved it.
        scope: the placements that it holds for.
    """

    seconds: float = 0.0
    proof: str = "no bound"
    scope: Scope = Scope.SEARCHED

    def raised(self, seconds: float, proof: str) -> Bound:
        """Return the higher of this bound and another for the same placements."""
        return replace(self, seconds=seconds, proof=proof) if seconds > self.seconds else self

    @property
    def text(self) -> str:
        """The proof, with the scope if users know it by name."""
        narrow = self.scope in (Scope.ON_ACCELERATORS, Scope.WITHOUT_OFFLOAD)
        return f"{self.proof}, {self.scope.value}" if narrow else self.proof


@dataclass(frozen=True, slots=True)
class Solution:
    """A placement within the budgets, and a lower bound on the seconds of every other."""

    evaluation: Evaluation
    bound: Bound

    @property
    def gap(self) -> float:
        """Relative gap: the share of the placement's seconds that lies above the bound."""
        seconds = self.evaluation.seconds
        return 1 - self.bound.seconds / seconds if seconds else 0.0


def certify(evaluation: Evaluation, bound: Bound) -> Solution:
    """Return the placement with its bound, as :func:`checked` returns that."""
    return Solution(evaluation, checked(bound, evaluation.seconds))


def checked(bound: Bound, seconds: float) -> Bound:
    """Return the bound of a plan; warn and return none if it is above the plan's seconds, which is a bug."""
    if bound.seconds > seconds * (1 + ROUNDING):
        warn(
            f"the planner proved a lower bound of {bound.seconds:.6g} s ({bound.text}) and found a plan of "
            f"{seconds:.6g} s: one of the two is wrong. The plan keeps its budgets, and is "
            "returned without a bound; please report this with the model and the budgets"
        )
        return Bound(0.0, "no bound: the one that was found contradicts the plan")
    # sums in another order may differ in the last bits
    return bound if bound.seconds < seconds else replace(bound, seconds=seconds)
