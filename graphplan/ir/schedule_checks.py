"""Proof, without running anything, that a schedule does what a plan promises."""

from __future__ import annotations

from graphplan.devices.topology import DeviceKey, Topology
from graphplan.errors import VerificationError, lines_around, readable_bytes
from graphplan.ir.graph import Graph
from graphplan.ir.liveness import Memory, measure_memory
from graphplan.ir.schedule import Move, Run, Schedule, read_in_place
from graphplan.ir.slot_checks import SlotCheck


def check_schedule(graph: Graph, topology: Topology, schedule: Schedule) -> Memory:
    """Prove that a schedule is sound, and return the bytes that it takes.

    Every operation runs once, in the graph's order, on its device, with all its tensors there; no
    value reaches a device twice; operations that share written memory share a device; written
    weights live where they are written; no slot is loaded before its last reader has run,
    nor read before it is loaded; no budget is passed.

    Raises:
        VerificationError: with the steps around the culprit.
    """
    _Walk(graph, topology, schedule).run()
    _check_ties(graph, schedule)
    memory = measure_memory(graph, topology, schedule)
    for spec in topology.devices:
        peak = memory.peaks[spec.key]
        if peak.nbytes > spec.room:
            raise VerificationError(
                f"device {spec.key!r} needs {readable_bytes(peak.nbytes)} at {peak.operation!r}, "
                f"its budget is {readable_bytes(spec.room)}\n"
                + lines_around(str(schedule).splitlines(), peak.step)
            )
    return memory


class _Walk:
    def __init__(self, graph: Graph, topology: Topology, schedule: Schedule) -> None:
        self.graph, self.schedule = graph, schedule
        self.present: set[tuple[str, DeviceKey]] = set()
        for name, key in schedule.assignment.weights.items():
            self.present.add((name, key))
        self.present.update(read_in_place(topology, schedule.assignment))
        for name in graph.inputs:
            self.present.add((name, schedule.host))
        self.pending = list(reversed(graph.operations))
        self.slots = SlotCheck(graph, schedule)

    def run(self) -> None:
        if missing := set(self.graph.weights) - set(self.schedule.assignment.weights):
            raise VerificationError(f"weight {sorted(missing)[0]!r} has no place")
        for index, step in enumerate(self.schedule.steps):
            if isinstance(step, Move):
                problem = self._move(step)
            elif isinstance(step, Run):
                problem = self._operate(step)
            else:
                problem = self.slots.visit(step, self.present)
            if problem:
                where = lines_around(str(self.schedule).splitlines(), index)
                raise VerificationError(f"step {index}: {problem}\n{where}")
        if self.pending:
            raise VerificationError(f"operation {self.pending[-1]!r} never runs")
        if problem := self.slots.finish():
            raise VerificationError(problem)

    def _move(self, step: Move) -> str | None:
        if (step.value, step.source) not in self.present:
            return f"{step.value!r} is moved from {step.source!r}, where it is not"
        if (step.value, step.destination) in self.present and step.kind != "writeback":
            return f"{step.value!r} is moved to {step.destination!r}, where it is already"
        weight = self.graph.weights.get(step.value)
        expected = self.graph.values[step.value].copy_bytes if weight is None else weight.nbytes
        if step.nbytes != expected:
            return f"{step.value!r} has {expected} bytes, the move says {step.nbytes}"
        self.present.add((step.value, step.destination))
        return None

    def _operate(self, step: Run) -> str | None:
        if not self.pending or self.pending[-1] != step.operation:
            return f"{step.operation!r} runs out of the graph's order"
        self.pending.pop()
        operation = self.graph.operations[step.operation]
        if self.schedule.assignment.operations[step.operation] != step.device:
            return f"{step.operation!r} runs on {step.device!r}, not where it was placed"
        if not operation.host_only:
            for name in operation.inputs:
                value = self.graph.values.get(name)
                scalar = value is not None and not value.is_tensor
                if not scalar and (name, step.device) not in self.present:
                    return f"{step.operation!r} runs on {step.device!r}, where {name!r} is not"
        self.present.update((name, step.device) for name in operation.outputs)
        return self.slots.operate(operation, step.device)


def _check_ties(graph: Graph, schedule: Schedule) -> None:
    device = schedule.assignment.operations
    for group in graph.together:
        if len({device[name] for name in group}) > 1:
            raise VerificationError(f"operations {sorted(group)} share written memory, but not a device")
    for operation in graph.operations.values():
        for name in operation.inputs:
            weight = graph.weights.get(name)
            if weight is None or weight.streamable or operation.host_only:
                continue
            home = schedule.assignment.weights[name]
            if home != device[operation.name]:
                raise VerificationError(
                    f"{operation.name!r} runs on {device[operation.name]!r}, but its weight {name!r}, "
                    f"which cannot be streamed, resides on {home!r}"
                )
