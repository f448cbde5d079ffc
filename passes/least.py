"""What is known of all placements before a search: the better one of two quick bounds."""

from __future__ import annotations

from dataclasses import dataclass

from graphplan.passes.bound import Bound, lower_bound
from graphplan.passes.evaluate import Evaluation, Problem
from graphplan.passes.incumbent import ENOUGH
from graphplan.passes.master import mix_fractions
from graphplan.passes.shares import Shares

__all__ = ["Least"]

_LP_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Least:
    """A bound, and the shares that it was found with.

    Attributes:
        shares: of the whole problem.
        bound: seconds that no placement goes below.
    """

    shares: Shares
    bound: Bound

    @classmethod
    def of(cls, problem: Problem) -> Least:
        """The bounds of a problem: some tenths of a second for thousands of operations."""
        shares, bound = Shares(problem), lower_bound(problem)
        fractions = mix_fractions(shares)
        seconds = 0.0 if fractions is None else fractions.seconds * (1 - _LP_TOLERANCE)
        if seconds > bound.seconds:
            bound = Bound(seconds, "operations in fractions, without moves")
        return cls(shares, bound)

    def proves(self, best: Evaluation | None) -> bool:
        """Whether no search is worth while."""
        return best is not None and self.bound.seconds >= best.seconds * (1 - ENOUGH)
