"""The judge: what an assignment costs and whether it keeps the budgets.

Solvers propose, this disposes: it writes the schedule, counts its bytes and runs its clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from graphplan.cost import all_seconds
from graphplan.device import DeviceKey, DeviceSpec, Topology
from graphplan.graph import Graph, Operation
from graphplan.liveness import Memory, Peak, measure_memory
from graphplan.passes.transfers import build_schedule
from graphplan.schedule import Assignment, Schedule
from graphplan.timeline import call_seconds

__all__ = ["Evaluation", "Problem", "evaluate"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a solver is asked.

    Attributes:
        graph: what to place.
        topology: on what, within which budgets.
        host: key or name of the caller's device.
        returns_to_host: whether outputs go back there.
        fixed_weights: weights that have a place already: pinned by the caller, or settled by an
            earlier plan of the same model.
        allowed: operation -> the devices that it may run on; one that is not named may run on all.
        offload: whether the CPU may compute, and keep weights that accelerators fetch, where the
            accelerators do not hold the model.
        balance: spread the work evenly over the accelerators instead of moving the fewest bytes.
        rings: device -> bytes of the ring that calls of other structures have there already.
        growth: device -> bytes that this ring may have at most, where those calls leave no more room.
        streams: False where autograd keeps weights after the call: they are then copied one by one.
    """

    graph: Graph
    topology: Topology
    host: DeviceKey
    returns_to_host: bool = True
    fixed_weights: Mapping[str, DeviceKey] = field(default_factory=dict)
    allowed: Mapping[str, frozenset[DeviceKey]] = field(default_factory=dict)
    offload: bool = True
    balance: bool = False
    rings: Mapping[DeviceKey, int] = field(default_factory=dict)
    growth: Mapping[DeviceKey, int] = field(default_factory=dict)
    streams: bool = True
    # what each operation takes on each device: asked for at every evaluation
    _clocks: dict[DeviceKey, dict[str, float]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def seconds(self, operation: Operation, spec: DeviceSpec) -> float:
        """Seconds of an operation on a device, infinite where it may not run."""
        return self.clock(spec)[operation.name]

    def clock(self, spec: DeviceSpec) -> Mapping[str, float]:
        """The same of each operation, in the graph's order."""
        found = self._clocks.get(spec.key)
        if found is None:
            operations = self.graph.operations
            found = dict(zip(operations, all_seconds(operations.values(), spec), strict=True))
            for name, allowed in self.allowed.items():
                if spec.key not in allowed and name in found:
                    found[name] = math.inf
            self._clocks[spec.key] = found
        return found

    def obey(self, operations: Mapping[str, DeviceKey]) -> dict[str, DeviceKey]:
        """The same devices, but for operations that may not run there: those go where they may."""
        obeyed = dict(operations)
        for name, allowed in self.allowed.items():
            if obeyed[name] not in allowed:
                obeyed[name] = next(key for key in self.topology.keys if key in allowed)
        return obeyed


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An assignment's schedule, memory and modelled seconds.

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

    def peak(self, key: DeviceKey) -> Peak:
        """The peak of one device."""
        return self.memory.peaks[key]


def evaluate(problem: Problem, assignment: Assignment) -> Evaluation:
    """Judge an assignment. A ring of which it says nothing gets one slot where two do not fit."""
    if not problem.streams:
        assignment = replace(assignment, slots=dict.fromkeys(problem.topology.keys, 0))
    elif not all(assignment.slots.values()):
        assignment = replace(assignment, slots={key: max(1, n) for key, n in assignment.slots.items()})
    found = _judge(problem, assignment)
    tight = {
        ring.device: 1
        for ring in found.schedule.rings
        if ring.device in found.excess and ring.device not in assignment.slots and len(ring.slots) > 1
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
        rings=problem.rings,
    )
    memory = measure_memory(graph, topology, schedule)
    seconds = call_seconds(graph, topology, schedule, problem.seconds)
    excess = {
        spec.key: over for spec in topology.devices if (over := memory.peaks[spec.key].nbytes - spec.room) > 0
    }
    for ring in schedule.rings:
        over = ring.nbytes - problem.growth.get(ring.device, ring.nbytes)
        if over > 0:
            excess[ring.device] = max(over, excess.get(ring.device, 0))
    return Evaluation(schedule, memory, seconds, excess)
