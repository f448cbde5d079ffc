"""Static checks that a schedule is valid and keeps the budgets."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphplan.devices.topology import DISK, DeviceKey, Topology
from graphplan.errors import VerificationError
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.liveness import Memory, measure_memory
from graphplan.ir.schedule import Load, Move, PrefetchBuffer, Release, Run, Schedule, Wait, read_in_place
from graphplan.message_text import lines_around, readable_bytes


def check_schedule(graph: Graph, topology: Topology, schedule: Schedule) -> Memory:
    """Prove that a schedule is valid, and return the memory that it takes.

    Every operation runs once, in the graph's order, on its device, with all its tensors there; no value
    reaches a device twice; operations that share written memory share a device; written weights reside where
    they are written; no slot is loaded before its last reader has run, nor read before it is loaded; no
    budget is exceeded.

    Raises:
        VerificationError: a check fails; the message shows the steps around the failure.
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


@dataclass(slots=True)
class _BufferState:
    buffer: PrefetchBuffer
    loaded: int = 0  # number of segments loaded so far; they come in order
    tenant: dict[int, int] = field(default_factory=dict)  # slot -> its segment that is not released yet
    waited: set[int] = field(default_factory=set)  # segments that may be read


class _Walk:
    """Follows the steps of one call. The method for a kind of step returns its error, or None.

    A slot is loaded before it is read, never while. This holds across calls too, since each segment names the
    one that was in its slot before it.
    """

    def __init__(self, graph: Graph, topology: Topology, schedule: Schedule) -> None:
        self.graph, self.schedule, self.home = graph, schedule, schedule.assignment.weights
        # instances: a value or weight on a device
        self.present = {*self.home.items(), *read_in_place(topology, schedule.assignment)}
        self.present |= {(name, schedule.host) for name in graph.inputs}
        self.pending = list(reversed(graph.operations))
        self.buffers = {buffer.device: _BufferState(buffer) for buffer in schedule.prefetch_buffers}
        # instances whose bytes are in a slot, streamed weights and views of them -> their segment
        self.inside: dict[tuple[str, DeviceKey], int] = {}

    def run(self) -> None:
        if missing := set(self.graph.weights) - set(self.home):
            raise VerificationError(f"weight {sorted(missing)[0]!r} has no place")
        for index, step in enumerate(self.schedule.steps):
            if isinstance(step, Move):
                problem = self._move(step)
            elif isinstance(step, Run):
                problem = self._operate(step)
            else:
                problem = self._stream(step)
            if problem:
                where = lines_around(str(self.schedule).splitlines(), index)
                raise VerificationError(f"step {index}: {problem}\n{where}")
        if self.pending:
            raise VerificationError(f"operation {self.pending[-1]!r} never runs")
        for value in self.graph.values.values():
            home = self.home.get(value.gradient_of)
            if value.gradient_of and (home is None or (value.name, home) not in self.present):
                raise VerificationError(f"the gradient of {value.gradient_of!r} does not reach {home!r}")
        for state in self.buffers.values():
            if problem := _incomplete(state):
                raise VerificationError(problem)

    def _move(self, step: Move) -> str | None:
        if (step.value, step.source) not in self.present:
            return f"{step.value!r} is moved from {step.source!r}, where it is not"
        if (step.value, step.destination) in self.present and step.kind != "writeback":
            return f"{step.value!r} is moved to {step.destination!r}, where it is already"
        expected = self.graph.copy_bytes(step.value)
        if step.nbytes != expected:
            return f"{step.value!r} has {expected} bytes, but its move says {step.nbytes}"
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
        return self._follow_views(operation, step.device)

    # -- prefetch buffers ------------------------------------------------------------------------------

    def _stream(self, step: Load | Wait | Release) -> str | None:
        state = self.buffers.get(step.device)
        if state is None or not 0 <= step.segment < len(state.buffer.segments):
            return f"segment {step.segment} of {step.device!r} is in no prefetch buffer"
        if isinstance(step, Load):
            return self._load(step, state)
        if isinstance(step, Wait):
            return self._wait(step, state)
        return self._release(step, state)

    def _load(self, step: Load, state: _BufferState) -> str | None:
        buffer, segment = state.buffer, state.buffer.segments[step.segment]
        if step.segment != state.loaded:
            return f"segment {step.segment} is loaded out of order"
        if not 0 <= segment.slot < len(buffer.slots) or segment.nbytes > buffer.slots[segment.slot]:
            return f"segment {step.segment} of {segment.nbytes} bytes does not fit slot {segment.slot}"
        if segment.slot in state.tenant:
            return f"slot {segment.slot} is loaded while segment {state.tenant[segment.slot]} is read"
        sources = (buffer.source, DISK)
        if (step.weights, step.nbytes) != (segment.weights, segment.nbytes) or step.source not in sources:
            return f"segment {step.segment} is not the one loaded"
        if problem := self._contents(step, state):
            return problem
        state.loaded += 1
        state.tenant[segment.slot] = step.segment
        return None

    def _contents(self, step: Load, state: _BufferState) -> str | None:
        segment, end = state.buffer.segments[step.segment], 0
        for name, offset in zip(segment.weights, segment.offsets, strict=True):
            if name not in self.graph.streamable:
                return f"{name!r} is streamed, though forward writes to it or returns it"
            if self.home[name] != step.source:
                return f"{name!r} is loaded from {step.source!r}, where it is not"
            if offset < end:
                return f"{name!r} overlaps with another weight of segment {step.segment}"
            end = offset + self.graph.weights[name].nbytes
        if end != segment.nbytes:
            return f"segment {step.segment} has {end} bytes, but its load says {segment.nbytes}"
        return None

    def _wait(self, step: Wait, state: _BufferState) -> str | None:
        segment = state.buffer.segments[step.segment]
        if state.tenant.get(segment.slot) != step.segment:
            return f"segment {step.segment} is waited for before it is loaded"
        if step.segment in state.waited:
            return f"segment {step.segment} is waited for twice"
        for name in segment.weights:
            if (name, step.device) in self.present:
                return f"{name!r} is loaded to {step.device!r}, where it is already"
            self.present.add((name, step.device))
            self.inside[name, step.device] = step.segment
        state.waited.add(step.segment)
        return None

    def _release(self, step: Release, state: _BufferState) -> str | None:
        segment = state.buffer.segments[step.segment]
        if step.segment not in state.waited or state.tenant.get(segment.slot) != step.segment:
            return f"segment {step.segment} is released before it is read"
        del state.tenant[segment.slot]
        for place in [
            place for place, index in self.inside.items() if (place[1], index) == (step.device, step.segment)
        ]:
            del self.inside[place]
            self.present.discard(place)
        return None

    def _follow_views(self, operation: Operation, device: DeviceKey) -> str | None:
        """Follow the views that an operation makes of weights in a slot, which it must not write to."""
        for name in operation.mutates:
            if (name, device) in self.inside:
                return f"{operation.name!r} writes to {name!r}, which is in a slot"
        for name in operation.outputs:
            base = self.graph.values[name].alias_of
            self.inside.pop((name, device), None)
            if base is not None and (base, device) in self.inside:
                self.inside[name, device] = self.inside[base, device]
        return None


def _incomplete(state: _BufferState) -> str | None:
    """Return the error in a prefetch buffer at the end of the call, or None."""
    buffer, segments, slots = state.buffer, state.buffer.segments, sum(state.buffer.slots)
    if state.loaded != len(segments) or state.tenant or len(state.waited) != len(segments):
        return f"not every segment of the prefetch buffer of {buffer.device!r} is loaded and released"
    if slots > buffer.nbytes:
        return (
            f"the prefetch buffer of {buffer.device!r} has {buffer.nbytes} bytes, but its slots have {slots}"
        )
    last = {segment.slot: index for index, segment in enumerate(segments)}
    for index, segment in enumerate(segments):
        if segment.previous != last[segment.slot]:
            return f"segment {index} of {buffer.device!r} does not follow the last reader of its slot"
        last[segment.slot] = index
    return None
