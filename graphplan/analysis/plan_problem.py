"""The placement problem that a plan solves."""

from __future__ import annotations

from dataclasses import replace

from graphplan.ir.plan_data import PlanData
from graphplan.passes.placement.constrain import constrain
from graphplan.passes.placement.problem import Problem


def plain_problem(plan: PlanData) -> Problem:
    """Return the problem: graph, devices, weights of earlier plans; without the caller's constraints."""
    return Problem(
        plan.graph,
        plan.topology,
        plan.schedule.host,
        returns_to_host=plan.schedule.returns_to_host,
        fixed_weights=plan.fixed_weights,
        prefetch_bytes=plan.shared_prefetch_bytes,
        prefetch_limits=plan.prefetch_limits,
        streaming=plan.streaming,
    )


def as_if_first(plan: PlanData) -> PlanData:
    """Return the plan as if no earlier one had placed its weights, which on other devices could move."""
    others = tuple(replace(one, fixed_weights={}) for one in plan.others)
    return replace(plan, fixed_weights={}, others=others)


def constrained_problem(plan: PlanData) -> Problem:
    """Return the problem that was solved: :func:`plain_problem` with the caller's constraints."""
    return constrain(plain_problem(plan), plan.constraints)
