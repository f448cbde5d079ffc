"""The timeline of a call in Chrome's trace format, which Perfetto and ``chrome://tracing`` open.

Each device has tracks for computation, for arriving transfers and for streamed weights, and a counter of its
bytes; arrows lead from the producer of a value to its copy. A measured call is a second process next to the
estimated one. Times are microseconds, as the format requires.

Source: the Trace Event Format (Google, 2016).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from graphplan.ir.plan_data import PlanData
from graphplan.ir.timeline import Event, Measured, Timeline
from graphplan.report.data_flows import find_flows, made_bytes, timed_steps
from graphplan.report.text import device_name, device_text

_ESTIMATED, _MEASURED = 1, 2
_TITLES = {"run": "compute", "wait": "compute", "move": "transfers in", "load": "streamed weights"}
_TRACKS = {"run": 1, "wait": 1, "move": 2, "load": 3}


def to_trace(plan: PlanData, measured: Measured | None = None) -> str:
    """Return the trace of the estimated call, and of a measured one if given, as JSON text."""
    writer = _TraceWriter(plan)
    events = [*writer.process(_ESTIMATED, "estimated", plan.timeline), *writer.memory(), *writer.arrows()]
    if measured is not None:
        events += writer.process(_MEASURED, "measured", measured.timeline)
        events += writer.measured_peaks(measured)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


class _TraceWriter:
    def __init__(self, plan: PlanData) -> None:
        self.plan = plan
        keys = dict.fromkeys((*plan.topology.keys, plan.schedule.host))
        self.device = {key: index for index, key in enumerate(keys)}

    def _track(self, event: Event) -> int:
        return 3 * self.device[event.device] + _TRACKS[event.kind]

    def process(self, pid: int, name: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
        yield metadata("process_name", pid, 0, name=f"{name} {self.plan.graph.call}")
        tracks = {
            self._track(event): f"{device_name(event.device)} {_TITLES[event.kind]}"
            for event in timeline.events
        }
        for tid in sorted(tracks):
            yield metadata("thread_name", pid, tid, name=tracks[tid])
            yield metadata("thread_sort_index", pid, tid, sort_index=tid)
        for event in timeline.events:
            title = f"wait for {event.name}" if event.kind == "wait" else event.name
            track, arguments = self._track(event), self._arguments(event)
            yield bar(title, event.kind, event.start, event.end, pid, track, arguments)

    def _arguments(self, event: Event) -> dict[str, Any]:
        graph = self.plan.graph
        if event.kind == "run":
            operation = graph.operations.get(event.name)
            if operation is None:  # a compiled stage, measured as a whole
                return {}
            return {
                "module": operation.module_path,
                "target": operation.target,
                "flops": operation.flops,
                "bytes made": made_bytes(graph, operation),
                "source": operation.source,
            }
        if event.name in graph.values:
            return {"bytes": graph.values[event.name].copy_bytes}
        weights = event.weights or (event.name,)  # a prefetched segment, or a single weight
        return {"weights": list(weights), "bytes": sum(graph.weights[name].nbytes for name in weights)}

    def memory(self) -> Iterator[dict[str, Any]]:
        """Yield a counter for each device: weights, and everything else that it holds during a step."""
        starts = {id(step): event.start for step, event in timed_steps(self.plan)}
        for key in self.device:
            weights, before, now = self.plan.peaks[key].weights, -1, 0.0
            for step, nbytes in zip(self.plan.schedule.steps, self.plan.memory.profile[key], strict=True):
                now = max(now, starts.get(id(step), now))
                if nbytes != before:
                    yield _counter(_ESTIMATED, f"memory of {device_text(key)}", now, weights, nbytes)
                before = nbytes

    def measured_peaks(self, measured: Measured) -> Iterator[dict[str, Any]]:
        """Yield a counter for each device with a measured peak: the peak, as a constant level."""
        for key, nbytes in measured.peak_bytes.items():
            weights = min(nbytes, self.plan.peaks[key].weights)
            yield _counter(_MEASURED, f"measured peak of {device_text(key)}", 0.0, weights, nbytes)

    def arrows(self) -> Iterator[dict[str, Any]]:
        """Yield arrows from the middle of a value's producer to the middle of its copy."""
        runs = {event.name: event for event in self.plan.timeline.events if event.kind == "run"}
        for number, flow in enumerate(find_flows(self.plan)):
            if flow.maker is None:
                continue
            producer = runs[flow.maker]
            copy = Event("move", flow.names[0], flow.destination, start=flow.start, end=flow.end)
            for phase, event in (("s", producer), ("f", copy)):
                middle = (event.start + event.end) / 2
                place = {"pid": _ESTIMATED, "tid": self._track(event), "ts": middle * 1e6}
                end = {"bp": "e"} if phase == "f" else {}
                yield {"ph": phase, "name": "transfer", "cat": "transfer", "id": number, **place, **end}


def metadata(kind: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    """Return an event that names or orders a process or a track."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def bar(
    name: str, kind: str, start: float, end: float, pid: int, tid: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return an event that takes time, in a track."""
    place = {"ts": start * 1e6, "dur": (end - start) * 1e6, "pid": pid, "tid": tid}
    return {"ph": "X", "name": name, "cat": kind, **place, "args": arguments}


def _counter(pid: int, name: str, seconds: float, weights: int, nbytes: int) -> dict[str, Any]:
    levels = {"weights": weights, "activations": max(0, nbytes - weights)}
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": seconds * 1e6, "args": levels}
