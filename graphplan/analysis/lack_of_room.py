"""Whether a call is slow for lack of memory: beside what it would take on one device if that had enough."""

from __future__ import annotations

from graphplan.analysis.plan_problem import constrained_problem
from graphplan.ir.plan_data import PlanData
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.residence import reside

_SLOW = 5.0  # times as long as with room: some operations on the CPU cost a few times as much


def seconds_with_room(plan: PlanData) -> float:
    """The least seconds with all operations on one device, but for rules, whatever memory that takes."""
    problem = constrained_problem(plan)
    found = []
    for spec in problem.topology.computing:
        operations = problem.obey(dict.fromkeys(problem.graph.operations, spec.key))
        found.append(evaluate(problem, reside(problem, operations)).seconds)
    return min(found)


def lacks_room(plan: PlanData) -> bool:
    """Whether memory keeps a call from being nearly as fast as it might be."""
    return plan.makespan > _SLOW * seconds_with_room(plan)
