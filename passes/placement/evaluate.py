"""The evaluator, the only judge of a placement: it writes the schedule, counts bytes and runs the clocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from graphplan.devices.topology import DeviceKey, round_up
from graphplan.ir.graph_elements import Weight
from graphplan.ir.liveness import Memory, Peak, measure_memory
from graphplan.ir.schedule import Assignment, Schedule
from graphplan.ir.timeline import call_seconds
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import fill
from graphplan.passes.schedule.transfers import build_schedule


@dataclass(frozen=True)
class Evaluation:
    """The schedule and estimated seconds of an assignment; its memory is measured on first use.

    Attributes:
        problem: the problem that the assignment places.
        schedule: the schedule of the assignment.
        seconds: estimated seconds of a forward pass.
        highest: device -> its peak, where that is not the schedule's own.
    """

    problem: Problem = field(repr=False, compare=False)
    schedule: Schedule
    seconds: float
    highest: Mapping[DeviceKey, Peak] = field(default_factory=dict)

    @cached_property
    def memory(self) -> Memory:
        """The bytes at each step; lazy because most moves of a search are rejected by their seconds alone."""
        measured = measure_memory(self.problem.graph, self.problem.topology, self.schedule)
        return replace(measured, peaks={**measured.peaks, **self.highest})

    @cached_property
    def excess(self) -> dict[DeviceKey, int]:
        """Device -> bytes by which it exceeds its budget, or its prefetch buffer exceeds its limit."""
        problem, peaks = self.problem, self.memory.peaks
        over = ((spec.key, peaks[spec.key].nbytes - spec.room) for spec in problem.topology.devices)
        exceeded = {key: nbytes for key, nbytes in over if nbytes > 0}
        for buffer in self.schedule.prefetch_buffers:
            beyond = buffer.nbytes - problem.prefetch_limits.get(buffer.device, buffer.nbytes)
            if beyond > 0:
                exceeded[buffer.device] = max(beyond, exceeded.get(buffer.device, 0))
        return exceeded

    @property
    def feasible(self) -> bool:
        """Whether every budget is kept and every operation is allowed on its device."""
        return not self.excess and math.isfinite(self.seconds)

    @property
    def assignment(self) -> Assignment:
        """The assignment that the schedule carries out."""
        return self.schedule.assignment

    def peak(self, key: DeviceKey) -> Peak:
        """Return the peak of a device."""
        return self.memory.peaks[key]


def evaluate(problem: Problem, assignment: Assignment) -> Evaluation:
    """Evaluate an assignment.

    A prefetch buffer whose slots the assignment does not give gets two, or one where two do not fit.
    """
    return _with_fewer_slots(_judge(problem, assignment))


def _with_fewer_slots(evaluation: Evaluation) -> Evaluation:
    """Return the evaluation with one slot in buffers that exceed a budget and whose slots are not given."""
    problem, assignment = evaluation.problem, evaluation.assignment
    growable = [b.device for b in evaluation.schedule.prefetch_buffers if len(b.slots) > 1]
    single_slots = {key: 1 for key in growable if key not in assignment.slots and key in evaluation.excess}
    if not single_slots:
        return evaluation
    retried = _judge(problem, replace(assignment, slots={**assignment.slots, **single_slots}))
    return retried if sum(retried.excess.values()) < sum(evaluation.excess.values()) else evaluation


def evaluate_filled(
    problem: Problem, assignment: Assignment, unread: Sequence[Weight], max_seconds: float = math.inf
) -> Evaluation:
    """Evaluate an assignment; move unread weights to devices with room if a budget is exceeded.

    ``unread``: as :func:`~graphplan.passes.placement.residence.unread_weights` returns them. If the placement
    takes more than ``max_seconds`` it is returned as it is: no other slots or homes make it faster.
    """
    evaluation = _judge(problem, assignment)
    if evaluation.seconds > max_seconds:
        return evaluation
    evaluation = _with_fewer_slots(evaluation)
    if not unread or not evaluation.excess:
        return evaluation
    free = {
        spec.key: spec.room - evaluation.peak(spec.key).nbytes
        for spec in problem.topology.devices
        if spec.computes
    }
    for weight in unread:
        home = evaluation.assignment.weights[weight.name]
        free[home] += round_up(weight.held_bytes)
    homes = fill(
        unread, problem.topology.cpu, lambda placed, nbytes: {k: free[k] - placed[k] - nbytes for k in free}
    )
    return evaluate(problem, replace(assignment, weights={**assignment.weights, **homes}))


def _judge(problem: Problem, assignment: Assignment) -> Evaluation:
    graph, topology, assignment = problem.graph, problem.topology, _with_slots(problem, assignment)
    schedule = build_schedule(
        graph,
        topology,
        assignment,
        problem.host,
        returns_to_host=problem.returns_to_host,
        prefetch_bytes=problem.prefetch_bytes,
        runs=problem.runs,
    )
    clocks = {spec.key: problem.clock(spec) for spec in topology.devices}
    seconds = {name: clocks[assignment.operations[name]][name] for name in graph.operations}
    return Evaluation(problem, schedule, call_seconds(graph, topology, schedule, seconds))


def _with_slots(problem: Problem, assignment: Assignment) -> Assignment:
    """Return the assignment with no slots if the problem has no streaming, else with at least one of each."""
    if not problem.streaming:
        return replace(assignment, slots=dict.fromkeys(problem.topology.keys, 0))
    if all(assignment.slots.values()):
        return assignment
    return replace(assignment, slots={key: max(1, n) for key, n in assignment.slots.items()})
