"""How many slots the rings have: as many as shorten the call, within the budgets.

More slots let copies run further ahead, and never delay one: a segment then follows one that is released
earlier or at the same time. They take memory that could hold weights instead, so they come last.
"""

from __future__ import annotations

from dataclasses import replace

from graphplan.device import DeviceKey
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.transfers import build_schedule
from graphplan.schedule import Assignment
from graphplan.timeline import call_seconds

__all__ = ["deepen", "deepest_seconds"]

_TOLERANCE = 1e-12
_MANY = 1 << 30  # slots: one for each segment


def deepen(problem: Problem, found: Evaluation, most: int | None = None) -> Evaluation:
    """The same placement with the slots that make it fastest, and no more of them than that takes.

    Args:
        problem: what is placed.
        found: a placement; returned as it is where it passes a budget or streams nothing.
        most: slots of a ring at most; None for as many as it has segments.
    """
    if not found.feasible or not any(ring.segments for ring in found.schedule.rings):
        return found
    counts = {ring.device: len(ring.slots) for ring in found.schedule.rings if ring.segments}
    deepest = found
    for ring in found.schedule.rings:
        limit = len(ring.segments) if most is None else min(most, len(ring.segments))
        for count in range(len(ring.slots) + 1, limit + 1):
            trial = _with_slots(problem, deepest, ring.device, count)
            if trial.feasible:  # slots of unequal size may take less when there are more of them
                deepest, counts[ring.device] = trial, count
    if deepest.seconds >= found.seconds * (1 - _TOLERANCE):
        return found
    for key, count in counts.items():
        for fewer in range(count - 1, 0, -1):
            trial = _with_slots(problem, deepest, key, fewer)
            if not trial.feasible or trial.seconds > deepest.seconds * (1 + _TOLERANCE):
                break
            deepest = trial
    return deepest


def deepest_seconds(problem: Problem, assignment: Assignment) -> float:
    """Seconds that a placement takes at least: with a slot for each segment, whether they fit or not."""
    slots = {spec.key: _MANY if problem.streams else 0 for spec in problem.topology.devices}
    schedule = build_schedule(
        problem.graph,
        problem.topology,
        replace(assignment, slots=slots),
        problem.host,
        returns_to_host=problem.returns_to_host,
        rings=problem.rings,
    )
    return call_seconds(problem.graph, problem.topology, schedule, problem.seconds)


def _with_slots(problem: Problem, found: Evaluation, key: DeviceKey, count: int) -> Evaluation:
    assignment = found.schedule.assignment
    return evaluate(problem, replace(assignment, slots={**assignment.slots, key: count}))
