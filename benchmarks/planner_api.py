"""What benchmarks call of the planner: the only benchmark module that names the planner's modules."""

from __future__ import annotations

from graphplan.passes.placement import disk as caller_of_place
from graphplan.passes.placement.certificate import Solution
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.limits import Limits
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import reside

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

FIRST_PLACEMENT = Limits(effort=0.2, proves=False)  # stop after the first good placement
