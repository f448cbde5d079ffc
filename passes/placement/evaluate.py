"""The only judge of a placement: it writes the schedule, counts its bytes and runs its clocks."""

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
    """An assignment's schedule and estimated seconds; bytes are counted when they are asked for.

    Attributes:
        problem: whose assignment it is.
        schedule: every step of it.
        seconds: that a forward pass takes.
        highest: device -> its peak, where that is not the schedule's own.
    """

    problem: Problem = field(repr=False, compare=False)
    schedule: Schedule
    seconds: float
    highest: Mapping[DeviceKey, Peak] = field(default_factory=dict)

    @cached_property
    def memory(self) -> Memory:
        """The bytes at each step: most moves of a search are refused for their seconds, without them."""
        found = measure_memory(self.problem.graph, self.problem.topology, self.schedule)
        return replace(found, peaks={**found.peaks, **self.highest})

    @cached_property
    def excess(self) -> dict[DeviceKey, int]:
        """Each device over its budget -> the bytes by which it is over."""
        problem, peaks = self.problem, self.memory.peaks
        over = ((spec.key, peaks[spec.key].nbytes - spec.room) for spec in problem.topology.devices)
        found = {key: nbytes for key, nbytes in over if nbytes > 0}
        for buffer in self.schedule.prefetch_buffers:
            beyond = buffer.nbytes - problem.prefetch_limits.get(buffer.device, buffer.nbytes)
            if beyond > 0:
                found[buffer.device] = max(beyond, found.get(buffer.device, 0))
        return found

    @property
    def feasible(self) -> bool:
        """Whether every budget is kept and every operation runs where it may."""
        return not self.excess and math.isfinite(self.seconds)

    @property
    def assignment(self) -> Assignment:
        """What was judged."""
        return self.schedule.assignment

    def peak(self, key: DeviceKey) -> Peak:
        """The peak of one device."""
        return self.memory.peaks[key]


def evaluate(problem: Problem, assignment: Assignment) -> Evaluation:
    """Judge an assignment.

    Prefetch buffers of which it says nothing get one slot where two do not fit.
    """
    return _with_fewer_slots(_judge(problem, assignment))


def _with_fewer_slots(found: Evaluation) -> Evaluation:
    """What was judged, with one slot where its assignment says nothing and two do not fit: no faster."""
    problem, assignment = found.problem, found.assignment
    free = [b.device for b in found.schedule.prefetch_buffers if len(b.slots) > 1]
    tight = {key: 1 for key in free if key not in assignment.slots and key in found.excess}
    if not tight:
        return found
    again = _judge(problem, replace(assignment, slots={**assignment.slots, **tight}))
    return again if sum(again.excess.values()) < sum(found.excess.values()) else found


def evaluate_filled(
    problem: Problem, assignment: Assignment, unread: Sequence[Weight], most_seconds: float = math.inf
) -> Evaluation:
    """As :func:`evaluate`; weights that nobody reads leave devices without room for those that have some.

    ``unread``: as :func:`~graphplan.passes.placement.residence.unread_weights` finds them. A placement of
    more than ``most_seconds`` is judged by its seconds alone: no other slots or homes would make it faster.
    """
    found = _judge(problem, assignment)
    if found.seconds > most_seconds:
        return found
    found = _with_fewer_slots(found)
    if not unread or not found.excess:
        return found
    free = {
        spec.key: spec.room - found.peak(spec.key).nbytes
        for spec in problem.topology.devices
        if spec.computes
    }
    for weight in unread:
        home = found.assignment.weights[weight.name]
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
    """With none where nothing is streamed, and with at least one of each prefetch buffer elsewhere."""
    if not problem.streaming:
        return replace(assignment, slots=dict.fromkeys(problem.topology.keys, 0))
    if all(assignment.slots.values()):
        return assignment
    return replace(assignment, slots={key: max(1, n) for key, n in assignment.slots.items()})
