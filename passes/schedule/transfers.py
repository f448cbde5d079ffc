"""Make every move explicit: a graph and an assignment become a schedule.

A value is copied to a device right before its first reader there, once; outputs return to the caller's
device at the end of the forward pass, and gradients go where their parameters reside. Weights that are
streamed get their steps from :mod:`graphplan.passes.schedule.prefetch_segments`. Before and after, for
``b`` on device 1 and the others on device 0::

    a = linear(x, w)             move x: cpu -> 0
    b = relu(a)                  run a on 0
    c = add(a, b)                move a: 0 -> 1
                                 run b on 1
                                 move b: 1 -> 0
                                 run c on 0
                                 move c: 0 -> cpu
"""

from __future__ import annotations

from collections.abc import Mapping

from graphplan.devices.topology import DeviceKey, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.schedule import Assignment, Move, MoveKind, Run, Runs, Schedule, read_in_place
from graphplan.passes.schedule.prefetch_segments import Streamed, add_streams


def build_schedule(
    graph: Graph,
    topology: Topology,
    assignment: Assignment,
    host: DeviceKey,
    *,
    returns_to_host: bool = True,
    prefetch_bytes: Mapping[DeviceKey, int] | None = None,
    runs: Runs | None = None,
) -> Schedule:
    """Return the schedule of ``assignment`` in the graph's order.

    Args:
        graph: the graph to schedule.
        topology: the devices; accelerators may have prefetch buffers.
        assignment: devices of operations and weights.
        host: key or name of the caller's device.
        returns_to_host: whether outputs go back there.
        prefetch_bytes: device -> bytes of an existing prefetch buffer.
        runs: steps that this schedule shares with others of the graph.
    """
    writer = _ScheduleWriter(graph, topology, assignment, host, Runs() if runs is None else runs)
    operations = graph.operations.values()
    for operation in operations:
        if not operation.backward:
            writer.run(operation)
    for name in graph.changed_inputs:
        writer.write_back(name, host)
    if returns_to_host:
        for name in graph.outputs:
            if name in writer.home and writer.is_tensor(name):
                writer.move(name, host, "output")
    backward = len(writer.steps)
    for operation in operations:
        if operation.backward:
            writer.run(operation)
            writer.move_gradients(operation)
    steps, buffers = add_streams(
        graph, topology, assignment, writer.streamed, writer.steps, backward, prefetch_bytes or {}
    )
    return Schedule(steps, assignment, host, returns_to_host, buffers)


class _ScheduleWriter:
    def __init__(
        self, graph: Graph, topology: Topology, assignment: Assignment, host: DeviceKey, runs: Runs
    ) -> None:
        self.graph, self.assignment, self.runs = graph, assignment, runs
        self.streamed = Streamed(graph, topology, assignment)
        self.steps: list[Run | Move] = []
        self.home: dict[str, DeviceKey] = dict(assignment.weights)
        self.home.update(dict.fromkeys(graph.inputs, host))
        self.copied: set[tuple[str, DeviceKey]] = set(read_in_place(topology, assignment))

    def is_tensor(self, name: str) -> bool:
        return name not in self.graph.not_tensors

    def run(self, operation: Operation) -> None:
        device, home = self.assignment.operations[operation.name], self.home
        for name in self.graph.device_inputs[operation.name]:
            if home[name] != device and (name, device) not in self.copied and not self.streamed(name, device):
                self.move(name, device, self._kind(name))
        self.steps.append(self.runs[operation.name, device])
        for name in operation.outputs:
            home[name] = device

    def move_gradients(self, operation: Operation) -> None:
        for name in operation.outputs:
            parameter = self.graph.values[name].gradient_of
            if parameter:
                self.move(name, self.assignment.weights[parameter], "gradient")

    def move(self, name: str, device: DeviceKey, kind: MoveKind) -> None:
        if self.home[name] == device or (name, device) in self.copied:
            return
        self.copied.add((name, device))
        self.steps.append(Move(name, self.home[name], device, self.graph.copy_bytes(name), kind))

    def write_back(self, name: str, host: DeviceKey) -> None:
        # operations on a changed input share a device, so at most one other device has a copy
        for device in {key for value, key in self.copied if value == name} - {host}:
            self.steps.append(Move(name, device, host, self.graph.copy_bytes(name), "writeback"))

    def _kind(self, name: str) -> MoveKind:
        root = self.graph.root(name)
        if root in self.graph.weights:
            return "weight"
        return "input" if root in self.graph.inputs else "activation"
