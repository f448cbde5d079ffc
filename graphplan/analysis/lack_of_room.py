"""Whether a call is slow for lack of memory: beside what it would take if there were enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphplan.analysis.plan_problem import constrained_problem
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import on_one_device, reside

SLOW = 5.0  # times as long as with room: some operations on the CPU cost a few times as much


def seconds_with_room(plan: PlanData) -> float:
    """The least seconds of some simple placements, whatever memory they take.

    All operations are on one device, or each where the weights before it are, but for the caller's rules.
    """
    problem = constrained_problem(replace(plan, prefetch_limits={}))
    return min(evaluate(problem, found).seconds for found in _simple(problem))


def slowness(plan: PlanData) -> float:
    """How many times as long a call takes as it would with room."""
    least = seconds_with_room(plan)
    return plan.makespan / least if least else 1.0


def lacks_room(plan: PlanData) -> bool:
    """Whether memory keeps a call from being nearly as fast as it might be."""
    return slowness(plan) > SLOW


def _simple(problem: Problem) -> Iterator[Assignment]:
    graph, topology = problem.graph, problem.topology
    for spec in topology.computing:
        yield on_one_device(problem, spec.key)
    if not topology.accelerators:
        return
    here, found = topology.accelerators[0].key, {}
    keys = topology.accelerator_keys
    for name, operation in graph.operations.items():
        homes = (problem.fixed_weights.get(value) for value in operation.inputs)
        here = found[name] = next((key for key in homes if key in keys), here)
    yield reside(problem, problem.obey(found))
