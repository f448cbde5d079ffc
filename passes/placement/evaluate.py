"""The only judge of a placement: it writes the schedule, counts its bytes and runs its clocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphplan.devices.topology import DeviceKey
from graphplan.ir.liveness import Memory, Peak, measure_memory
from graphplan.ir.schedule import Assignment, Schedule
from graphplan.ir.timeline import call_seconds
from graphplan.passes.placement.problem import Problem
from graphplan.passes.schedule.transfers import build_schedule


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An assignment's schedule, memory and estimated seconds.

    ``excess`` maps each device over its budget to the bytes by which it is over.
    """

    schedule: Schedule
    memory: Memory
    seconds: float
    excess: Mapping[DeviceKey, int]

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
    if not problem.streaming:
        assignment = replace(assignment, slots=dict.fromkeys(problem.topology.keys, 0))
    elif not all(assignment.slots.values()):
        assignment = replace(assignment, slots={key: max(1, n) for key, n in assignment.slots.items()})
    found = _judge(problem, assignment)
    tight = {
        buffer.device: 1
        for buffer in found.schedule.prefetch_buffers
        if buffer.device in found.excess and buffer.device not in assignment.slots and len(buffer.slots) > 1
    }
    if not tight:
        return found
    again = _judge(problem, replace(assignment, slots={**assignment.slots, **tight}))
    return again if sum(again.excess.values()) < sum(found.excess.values()) else found


def _judge(problem: Problem, assignment: Assignment) -> Evaluation:
    graph, topology = problem.graph, problem.topology
    schedule = build_schedule(
        graph,
        topology,
        assignment,
        problem.host,
        returns_to_host=problem.returns_to_host,
        prefetch_bytes=problem.prefetch_bytes,
    )
    memory = measure_memory(graph, topology, schedule)
    seconds = call_seconds(graph, topology, schedule, problem.seconds)
    excess = {
        spec.key: over for spec in topology.devices if (over := memory.peaks[spec.key].nbytes - spec.room) > 0
    }
    for buffer in schedule.prefetch_buffers:
        over = buffer.nbytes - problem.prefetch_limits.get(buffer.device, buffer.nbytes)
        if over > 0:
            excess[buffer.device] = max(over, excess.get(buffer.device, 0))
    return Evaluation(schedule, memory, seconds, excess)
