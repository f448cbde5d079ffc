"""What benchmarks call of the planner: the only benchmark module that names the planner's modules."""

from __future__ import annotations

from graphplan.passes import disk as caller_of_place
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.limits import Limits
from graphplan.passes.place import Solution, place
from graphplan.passes.residence import reside

__all__ = [
    "FIRST_PLACEMENT",
    "Evaluation",
    "Limits",
    "Problem",
    "Solution",
    "caller_of_place",
    "evaluate",
    "place",
    "reside",
]

FIRST_PLACEMENT = Limits(exhaustive=False)  # stop after the first good placement
