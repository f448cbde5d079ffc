"""The placement problem whose solution a plan is."""

from __future__ import annotations

from dataclasses import replace

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


def as_if_first(plan: PlanData) -> PlanData:
    """The plan as if no earlier one had placed its weights: with other devices, they would be placed anew."""
    others = tuple(replace(one, fixed_weights={}) for one in plan.others)
    return replace(plan, fixed_weights={}, others=others)


def constrained_problem(plan: PlanData) -> Problem:
    """What was solved: :func:`plain_problem` with the caller's rules."""
    return constrain(plain_problem(plan), plan.constraints)
