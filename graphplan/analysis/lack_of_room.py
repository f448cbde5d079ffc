"""Whether a forward pass is slow for lack of memory, compared with its time if there were enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphplan.analysis.plan_problem import constrained_problem
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import assign_weights, on_one_device

_SLOW = 1.5  # ratio to the time with room: beyond it, a third of the time or more is for lack of memory
_VERY_SLOW = 5.0  # ratio that a warning is worth: some operations on the CPU take a few times as long


def seconds_with_room(plan: PlanData) -> float:
    """Return the least seconds of a few simple placements, whatever memory they need.

    The weights reside where the plan has them. All operations are on one device, or each on the accelerator
    of the last weight before it that resides on one; the caller's constraints hold.
    """
    residence = plan.schedule.assignment.weights
    problem = constrained_problem(replace(plan, prefetch_limits={}, fixed_weights=residence))
    return min(evaluate(problem, placement).seconds for placement in _simple_placements(problem))


def slowness(plan: PlanData) -> float:
    """Return the ratio of a forward pass's time to its time with enough memory."""
    seconds = seconds_with_room(plan)
    return plan.makespan / seconds if seconds else 1.0


def lacks_room(plan: PlanData) -> bool:
    """Whether lack of memory makes a forward pass slower by more than the factor ``_SLOW``."""
    return slowness(plan) > _SLOW


def is_very_slow(plan: PlanData) -> bool:
    """Whether lack of memory makes a forward pass slower by more than the factor ``_VERY_SLOW``."""
    return slowness(plan) > _VERY_SLOW


def _simple_placements(problem: Problem) -> Iterator[Assignment]:
    graph, topology = problem.graph, problem.topology
    for spec in topology.computing:
        yield on_one_device(problem, spec.key)
    if not topology.accelerators:
        return
    current, devices = topology.accelerators[0].key, {}
    keys = topology.accelerator_keys
    for name, operation in graph.operations.items():
        homes = (problem.fixed_weights.get(value) for value in operation.inputs)
        current = devices[name] = next((key for key in homes if key in keys), current)
    yield assign_weights(problem, problem.on_allowed_devices(devices))
