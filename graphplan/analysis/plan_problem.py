"""The placement problem whose solution a plan is."""

from __future__ import annotations

from graphplan.ir.plan_data import PlanData
from graphplan.passes.placement.constrain import constrain
from graphplan.passes.placement.problem import Problem


def plain_problem(plan: PlanData) -> Problem:
    """The graph, the devices and what earlier plans have settled, without the caller's rules."""
    return Problem(
        plan.graph,
        plan.topology,
        plan.schedule.host,
        plan.schedule.returns_to_host,
        plan.fixed_weights,
        prefetch_bytes=plan.shared_prefetch_bytes,
        prefetch_limits=plan.prefetch_limits,
        streaming=plan.streaming,
    )


def constrained_problem(plan: PlanData) -> Problem:
    """What was solved: :func:`plain_problem` with the caller's rules."""
    return constrain(plain_problem(plan), plan.constraints)
