"""Proof that the slots of prefetch buffers are loaded before they are read, and not while they are.

Follows the steps of one call. The next call begins as this one did, since each segment names the one
that is in its slot before it, across calls too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphplan.devices.topology import DISK, DeviceKey
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.schedule import Load, PrefetchBuffer, Release, Schedule, Wait


@dataclass(slots=True)
class _BufferState:
    """What is known of a prefetch buffer at a step."""

    buffer: PrefetchBuffer  # whose
    loaded: int = 0  # how many segments have been loaded; they come in order
    tenant: dict[int, int] = field(default_factory=dict)  # slot -> the segment in it that is not released yet
    waited: set[int] = field(default_factory=set)  # segments that may be read


class SlotCheck:
    """Walks the loads, waits and releases of a schedule."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.home = schedule.assignment.weights
        self.prefetch_buffers = {buffer.device: _BufferState(buffer) for buffer in schedule.prefetch_buffers}
        # instances whose bytes are in a slot: streamed weights and views of them
        self.inside: dict[tuple[str, DeviceKey], int] = {}

    def visit(self, step: Load | Wait | Release, present: set[tuple[str, DeviceKey]]) -> str | None:
        """Take one step; returns what is wrong with it."""
        state = self.prefetch_buffers.get(step.device)
        if state is None or not 0 <= step.segment < len(state.buffer.segments):
            return f"segment {step.segment} of {step.device!r} is in no prefetch buffer"
        if isinstance(step, Load):
            return self._load(step, state)
        if isinstance(step, Wait):
            return self._wait(step, state, present)
        return self._release(step, state, present)

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
            return f"segment {step.segment} is not what is loaded"
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
            return f"segment {step.segment} has {end} bytes, its load says {segment.nbytes}"
        return None

    def _wait(self, step: Wait, state: _BufferState, present: set[tuple[str, DeviceKey]]) -> str | None:
        segment = state.buffer.segments[step.segment]
        if state.tenant.get(segment.slot) != step.segment:
            return f"segment {step.segment} is waited for before it is loaded"
        if step.segment in state.waited:
            return f"segment {step.segment} is waited for twice"
        for name in segment.weights:
            if (name, step.device) in present:
                return f"{name!r} is loaded to {step.device!r}, where it is already"
            present.add((name, step.device))
            self.inside[name, step.device] = step.segment
        state.waited.add(step.segment)
        return None

    def _release(self, step: Release, state: _BufferState, present: set[tuple[str, DeviceKey]]) -> str | None:
        segment = state.buffer.segments[step.segment]
        if step.segment not in state.waited or state.tenant.get(segment.slot) != step.segment:
            return f"segment {step.segment} is released before it is read"
        del state.tenant[segment.slot]
        gone = {
            place for place, index in self.inside.items() if place[1] == step.device and index == step.segment
        }
        for place in gone:
            del self.inside[place]
        present -= gone
        return None

    def operate(self, operation: Operation, device: DeviceKey) -> str | None:
        """Follow the views that an operation makes of what is in a slot."""
        for name in operation.mutates:
            if (name, device) in self.inside:
                return f"{operation.name!r} writes to {name!r}, which is in a slot"
        for name in operation.outputs:
            base = self.graph.values[name].alias_of
            self.inside.pop((name, device), None)
            if base is not None and (base, device) in self.inside:
                self.inside[name, device] = self.inside[base, device]
        return None

    def finish(self) -> str | None:
        """What is wrong at the end of the call."""
        for key, state in self.prefetch_buffers.items():
            segments = state.buffer.segments
            if state.loaded != len(segments) or state.tenant or len(state.waited) != len(segments):
                return f"not every segment of the prefetch buffer of {key!r} is loaded and released"
            if sum(state.buffer.slots) > state.buffer.nbytes:
                slots = sum(state.buffer.slots)
                return f"the prefetch buffer of {key!r} has {state.buffer.nbytes} bytes, its slots {slots}"
            last = {segment.slot: index for index, segment in enumerate(segments)}
            for index, segment in enumerate(segments):
                if segment.previous != last[segment.slot]:
                    return f"segment {index} of {key!r} does not follow the last reader of its slot"
                last[segment.slot] = index
        return None
