"""The timeline of one forward pass: when each step starts and ends, as estimated or as measured.

Operations and moves follow one another on one clock. Each accelerator to which weights are streamed has a
copy queue with a clock of its own: a segment's copy starts when the copy before it and the last readers of
its slot are done, and its first reader waits for it. For two segments in one slot::

    compute   |wait 0|==run a==|----wait 1----|==run b==|
    copies    |load 0|         |---load 1-----|

Runs, moves and waits fill the call without a gap: their seconds add up to those of the call. Loads run in
parallel to them, and are hidden as far as nothing waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

from graphplan.devices.topology import CPU, DISK, DeviceKey, Topology
from graphplan.ir.cost_model import move_seconds, operation_seconds
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.schedule import Load, Move, Release, Run, Schedule, Wait


@dataclass(frozen=True, slots=True)
class Event:
    """An event that takes time.

    Attributes:
        kind: ``"run"`` of an operation, ``"move"`` of a value, ``"load"`` of a segment (on the device's copy
            queue), or ``"wait"`` for a load that has not finished.
        name: name of the operation or the value, or names of the segment's weights.
        device: device of an operation, or destination of a copy.
        start: seconds since the call began.
        end: seconds since the call began.
        weights: for a load or a wait, the names of the segment's weights.
    """

    kind: Literal["run", "move", "load", "wait"]
    name: str
    device: DeviceKey
    start: float
    end: float
    weights: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of one forward pass, in the order of its schedule, and its seconds."""

    events: tuple[Event, ...]
    seconds: float

    def busy(self, kind: str, device: DeviceKey | None = None) -> float:
        """Return the total seconds of the events of a kind, on one device or on all."""
        chosen = (e for e in self.events if e.kind == kind and device in (None, e.device))
        return sum(event.end - event.start for event in chosen)

    @property
    def copy_seconds(self) -> float:
        """Seconds in which only copies run: transfers, and waits for streamed weights."""
        return self.busy("move") + self.busy("wait")

    @property
    def hidden_seconds(self) -> float:
        """Seconds of weight streaming that overlap with other work."""
        return max(0.0, self.busy("load") - self.busy("wait"))


def make_timeline(graph: Graph, topology: Topology, schedule: Schedule) -> Timeline:
    """Return the estimated timeline of a schedule."""
    events: list[Event] = []
    seconds = _run(graph, topology, schedule, _estimated(graph, topology, schedule), events)
    return Timeline(tuple(events), seconds)


def call_seconds(
    graph: Graph, topology: Topology, schedule: Schedule, seconds: Mapping[str, float] | None = None
) -> float:
    """Return the seconds of one call, given the seconds of its operations, which are estimated by default."""
    if seconds is None:
        seconds = _estimated(graph, topology, schedule)
    return _run(graph, topology, schedule, seconds, None)


def _estimated(graph: Graph, topology: Topology, schedule: Schedule) -> dict[str, float]:
    specs, placed = {spec.key: spec for spec in topology.devices}, schedule.assignment.operations
    return {name: operation_seconds(one, specs[placed[name]]) for name, one in graph.operations.items()}


def _run(
    graph: Graph,
    topology: Topology,
    schedule: Schedule,
    seconds: Mapping[str, float],
    events: list[Event] | None,
) -> float:
    segments = {
        (buffer.device, index): segment
        for buffer in schedule.prefetch_buffers
        for index, segment in enumerate(buffer.segments)
    }
    on_disk = {name for name, key in schedule.assignment.weights.items() if key == DISK}
    on_cpu = {spec.key for spec in topology.devices if spec.type == CPU and on_disk}
    now = 0.0
    queue_free: dict[DeviceKey, float] = {}  # when each copy queue is done
    slot_free: dict[tuple[DeviceKey, int], float] = {}  # when each slot's last readers are done
    arrived: dict[tuple[DeviceKey, int], float] = {}  # when each segment has arrived
    for step in schedule.steps:
        if isinstance(step, Run):
            start, now = now, now + seconds[step.operation]
            if step.device in on_cpu:
                now += _reading(graph, topology, graph.operations[step.operation], on_disk)
            if events is not None:
                events.append(Event("run", step.operation, step.device, start=start, end=now))
        elif isinstance(step, Move):
            start, now = now, now + move_seconds(step, topology)
            if events is not None:
                events.append(Event("move", step.value, step.destination, start=start, end=now))
        elif isinstance(step, Load):
            slot = step.device, segments[step.device, step.segment].slot
            start = max(queue_free.get(step.device, 0.0), slot_free.get(slot, 0.0))
            end = start + move_seconds(step, topology)
            queue_free[step.device] = arrived[step.device, step.segment] = end
            if events is not None:
                events.append(
                    Event(
                        "load",
                        ", ".join(step.weights),
                        step.device,
                        start=start,
                        end=end,
                        weights=step.weights,
                    )
                )
        elif isinstance(step, Wait):
            start, now = now, max(now, arrived[step.device, step.segment])
            if events is not None and now > start:
                held = segments[step.device, step.segment].weights
                events.append(Event("wait", ", ".join(held), step.device, start=start, end=now, weights=held))
        else:
            assert isinstance(step, Release)
            slot_free[step.device, segments[step.device, step.segment].slot] = now
    return now


def _reading(graph: Graph, topology: Topology, operation: Operation, on_disk: Set[str]) -> float:
    """Return the seconds to read an operation's weights from disk, also by views of them.

    An embedding reads few of its bytes.
    """
    if operation.host_only:
        return 0.0
    read = dict.fromkeys(map(graph.root, operation.inputs))
    sizes = [graph.weights[name].nbytes for name in read if name in on_disk]
    link = topology.link(DISK, topology.cpu or CPU)
    return sum(link.seconds(min(n, operation.bytes_accessed)) for n in sizes)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured time and memory of one call.

    Attributes:
        timeline: the operations, moves and copies of weights.
        peak_bytes: device key -> the most bytes that were allocated, for devices that count them.
        operation_seconds: seconds of each operation, without the overhead of measuring it.
    """

    timeline: Timeline
    peak_bytes: Mapping[DeviceKey, int]
    operation_seconds: Mapping[str, float]
