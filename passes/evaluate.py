"""The judge: what an assignment costs and whether it keeps the budgets.

Solvers propose, this disposes: it writes the schedule, counts its bytes and adds up its seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphplan.cost import move_seconds, operation_seconds
from graphplan.device import DeviceKey, Topology
from graphplan.graph import Graph
from graphplan.liveness import Memory, Peak, measure_memory
from graphplan.passes.transfers import build_schedule
from graphplan.schedule import Assignment, Run, Schedule

__all__ = ["Evaluation", "Problem", "evaluate"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a solver is asked.

    Attributes:
        graph: what to place.
        topology: on what, within which budgets.
        host: key or name of the caller's device.
        returns_to_host: whether outputs go back there.
        fixed_weights: weights that have a place already (a further graph over the same model).
    """

    graph: Graph
    topology: Topology
    host: DeviceKey
    returns_to_host: bool = True
    fixed_weights: Mapping[str, DeviceKey] | None = None


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
        """Whether every budget is kept."""
        return not self.excess

    def peak(self, key: DeviceKey) -> Peak:
        """The peak of one device."""
        return self.memory.peaks[key]


def evaluate(problem: Problem, assignment: Assignment) -> Evaluation:
    """Judge an assignment."""
    graph, topology = problem.graph, problem.topology
    schedule = build_schedule(graph, assignment, problem.host, returns_to_host=problem.returns_to_host)
    memory = measure_memory(graph, topology, schedule)
    specs = {spec.key: spec for spec in topology.devices}
    seconds = 0.0
    for step in schedule.steps:
        if isinstance(step, Run):
            seconds += operation_seconds(graph.operations[step.operation], specs[step.device])
        else:
            seconds += move_seconds(step, topology)
    excess = {
        spec.key: over
        for spec in topology.devices
        if (over := memory.peaks[spec.key].nbytes - spec.memory) > 0
    }
    return Evaluation(schedule, memory, seconds, excess)
