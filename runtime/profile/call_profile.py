"""Measure one forward pass or training step: the times of each operation and copy, and peak memory.

The generated code runs node by node with a time mark before and after each. On CUDA a mark is an event on the
stream of the node's work, so that nothing waits for it; a copy of streamed weights is marked on the copy
stream. On other devices work is done when the host returns, and a mark is the host's clock. Marks take time,
which slows down short operations. This overhead is measured with an operation of one element and subtracted,
except from operations that began on a GPU after the host had enqueued them and their marks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx

from graphplan._compat.torch import uncompiled
from graphplan.devices.machine import current_machine
from graphplan.devices.speeds import Measurements, Speed
from graphplan.devices.topology import SIMULATED, DeviceKey
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule import Load, Move, Wait
from graphplan.ir.timeline import Event, Measured, Timeline
from graphplan.message_text import size_text
from graphplan.report.html_page import to_html
from graphplan.report.model_explorer import save_model_explorer
from graphplan.report.perfetto import to_trace
from graphplan.report.svg import to_svg
from graphplan.report.text import table_lines, time_text
from graphplan.runtime.profile.efficiency import Sample, efficiencies
from graphplan.whole_files import write_whole

Kind = Literal["run", "move", "load", "wait"]
_TINY = 20  # repetitions of the operation of one element
_NO_WAIT = 5e-6  # seconds; shorter waits, for copies that are complete already, are left out


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured forward pass or training step, with its plan. Sizes are bytes, times seconds.

    Attributes:
        plan: plan of the forward pass, or of forward and backward.
        measured: measured timeline and peaks.
    """

    plan: PlanData
    measured: Measured

    @property
    def seconds(self) -> float:
        """Measured time of the forward pass, and the backward pass of a training step, marks included."""
        return self.measured.timeline.seconds

    @property
    def timeline(self) -> Timeline:
        """Measured start and end of each operation, transfer and copy of weights."""
        return self.measured.timeline

    @property
    def peak_bytes(self) -> Mapping[DeviceKey, int]:
        """Device key -> the most bytes that were allocated; the CPU is not measured."""
        return self.measured.peak_bytes

    @property
    def measurements(self) -> Measurements:
        """Efficiencies of operation types relative to the plan's device speeds, for ``devices=`` of a plan.

        Simulated devices are left out: their speed has no meaning.
        """
        graph, topology = self.plan.graph, self.plan.topology
        samples: dict[DeviceKey, list[Sample]] = {}
        for name, seconds in self.measured.operation_seconds.items():
            operation = graph.operations.get(name)
            key = self.plan.schedule.assignment.operations.get(name)
            if operation is not None and key is not None and topology[key].type != SIMULATED:
                cost = operation.flops, operation.bytes_accessed, seconds
                samples.setdefault(key, []).append(Sample(operation.type, *cost))
        speeds = {}
        for key, device_samples in samples.items():
            spec = topology[key]
            efficiency = {**spec.efficiency, **efficiencies(device_samples, spec)}
            speeds[key] = replace(Speed.of(spec), efficiency=efficiency, origin="measured")
        return Measurements(speeds, topology.links)

    def summary(self) -> str:
        """Return a table of the measured and estimated seconds and peaks of each device."""
        rows = []
        for key in self.plan.topology.keys:
            times = [
                time_text(line.busy("run", key)) for line in (self.plan.timeline, self.measured.timeline)
            ]
            peak = self.peak_bytes.get(key)
            sizes = [size_text(self.plan.peak_bytes[key]), "-" if peak is None else size_text(peak)]
            rows.append([str(key), *times, *sizes])
        header = ["key", "compute", "measured", "peak", "measured"]
        call = self.plan.graph.call
        headline = (
            f"one {call}: {time_text(self.plan.makespan)} estimated, {time_text(self.seconds)} measured"
        )
        return "\n".join([headline, "", *table_lines(header, rows)])

    def __str__(self) -> str:
        return self.summary()

    def save_html(self, path: str | Path, *, title: str = "") -> None:
        """Write the page of the plan, with measured values next to the estimates."""
        write_whole(path, to_html(self.plan, title, self.measured, self.plan.remarks()))

    def save_trace(self, path: str | Path) -> None:
        """Write both timelines for Perfetto or ``chrome://tracing``."""
        write_whole(path, to_trace(self.plan, self.measured))

    def save_svg(self, path: str | Path, *, title: str = "Plan") -> None:
        """Write the picture of the plan, with the measured peaks."""
        write_whole(path, to_svg(self.plan, title, self.measured))

    def save_model_explorer(self, path: str | Path, *, title: str = "Plan") -> None:
        """Write the plan for Model Explorer, with the measured seconds as an additional coloring."""
        save_model_explorer(self.plan, Path(path), title, self.measured)


@dataclass(frozen=True, slots=True)
class _Mark:
    """``seconds()`` from the call's start, valid once all work is done; ``set_at``: when the host set it."""

    seconds: Callable[[], float]
    set_at: float


@dataclass(frozen=True, slots=True)
class _MeasuredSpan:
    kind: Kind
    name: str
    device: DeviceKey
    start: _Mark
    end: _Mark
    weights: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end.seconds() - self.start.seconds()

    def without(self, marking: float) -> float:
        """Return the seconds less the overhead ``marking`` of marks, if the device waited for the host."""
        waited = self.start.seconds() < self.end.set_at
        # the overhead was measured on another operation, and may exceed the seconds
        return max(0.0, self.seconds - marking * waited)


class Recording:
    """The marks of one forward pass, and of the backward pass of the same step, by clocks that they share.

    Attributes:
        plan: the plan of both.
        measured: what was measured so far; None before the first pass.
    """

    def __init__(self, plan: PlanData) -> None:
        self.plan = plan
        self.spans: list[_MeasuredSpan] = []
        self.measured: Measured | None = None
        self._bases: dict[torch.device, torch.cuda.Event] = {}
        self._marking: dict[DeviceKey, float] = {}
        self._began = 0.0

    def begin(self, marking: Callable[[torch.device], float]) -> None:
        """Reset the peaks and set the clocks; ``marking`` measures the overhead of marks on a device."""
        devices = self.plan.devices.items()
        timed = {key: device for key, device in devices if device.type != SIMULATED}
        self._set_clocks(timed)
        self._marking = {key: marking(device) for key, device in timed.items()}
        self._set_clocks(timed)
        machine = current_machine.get()
        if machine is not None:
            machine.reset_peaks()

    def _set_clocks(self, devices: Mapping[DeviceKey, torch.device]) -> None:
        for device in devices.values():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
                self._bases[device] = torch.cuda.Event(enable_timing=True)
                self._bases[device].record(torch.cuda.current_stream(device))
        self._began = time.perf_counter()

    def mark(self, device: torch.device | None, stream: torch.cuda.Stream | None = None) -> _Mark:
        """Return a mark of the present time, or of that of a CUDA device's stream."""
        if device is None or device.type != "cuda":
            passed = time.perf_counter() - self._began
            return _Mark(lambda: passed, passed)
        base, event = self._bases[device], torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(device))
        return _Mark(lambda: float(base.elapsed_time(event)) / 1e3, time.perf_counter() - self._began)

    def finish(self) -> None:
        """Set :attr:`measured` at the end of a pass."""
        for device in self._bases:
            torch.cuda.synchronize(device)
        ended = time.perf_counter() - self._began
        runs = (span for span in self.spans if span.kind == "run")
        seconds = {span.name: span.without(self._marking.get(span.device, 0.0)) for span in runs}
        self.measured = Measured(self._timeline(ended), self._peaks(), seconds)

    def _timeline(self, ended: float) -> Timeline:
        events = []
        for span in self.spans:
            start = max(0.0, span.start.seconds())
            end = max(start, span.end.seconds())
            if span.kind != "wait" or end - start > _NO_WAIT:
                events.append(Event(span.kind, span.name, span.device, start, end, span.weights))
        return Timeline(tuple(events), max([ended, *(event.end for event in events)]))

    def _peaks(self) -> dict[DeviceKey, int]:
        peaks, machine = dict[DeviceKey, int](), current_machine.get()
        for key, device in self.plan.devices.items():
            if device.type == "cuda":
                peaks[key] = torch.cuda.max_memory_allocated(device)
            elif machine is not None and device.type == SIMULATED:
                peaks[key] = machine.peak_bytes(device.index or 0)
        return peaks


class ProfilingInterpreter(fx.Interpreter):
    """Run generated code in place of the compiled function, and record the times of its nodes.

    Args:
        module: the generated code, over the weights of its module.
        recording: where the times go; the first recorder that runs begins it.
    """

    def __init__(self, module: fx.GraphModule, recording: Recording) -> None:
        super().__init__(module)
        self.recording, self.plan = recording, recording.plan

    def __call__(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the flat results for the flat inputs, and finish the recording of this pass."""
        if self.recording.measured is None:
            self.recording.begin(self._marking)
        results: Sequence[Any] = self.run(*tensors)
        self.env = {}  # it refers to the results, and so to tensors saved for the backward pass
        self.recording.finish()
        return results

    def _marking(self, device: torch.device) -> float:
        """Return the seconds that marks and the interpreter add to a short operation."""
        element, mark = torch.ones(1, device=device), self.recording.mark
        node = fx.Graph().create_node("call_function", lambda: torch.neg(element), name="tiny")
        marked = []
        for _ in range(_TINY):
            start = mark(device)
            super().run_node(node)
            marked.append((start, mark(device)))
        plain = mark(device)
        for _ in range(_TINY):
            torch.neg(element)
        end = mark(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        unmarked = (end.seconds() - plain.seconds()) / _TINY
        return max(0.0, min(end.seconds() - start.seconds() for start, end in marked) - unmarked)

    def run_node(self, n: fx.Node) -> Any:
        step = n.meta.get("move") or n.meta.get("stream")
        devices = self.plan.devices
        if isinstance(step, Move):
            source, target = devices.get(step.source), devices.get(step.destination)
            if "non_blocking" in n.kwargs:
                target = source  # its stream does the copy; the host waits later
            return self._span("move", step.value, step.destination, n, (source or target, target or source))
        if isinstance(step, Load):
            return self._load(n, step)
        if isinstance(step, Wait):
            weights, place = self.plan.schedule.segment(step).weights, devices[step.device]
            return self._span("wait", ", ".join(weights), step.device, n, (place, place), weights)
        first_inside = self._first_of_stage(n)
        name = n.meta.get("operation", first_inside)
        if name is None:
            return super().run_node(n)
        key = self.plan.schedule.assignment.operations[name]
        device = devices.get(key)
        return self._span("run", name if first_inside is None else n.name, key, n, (device, device))

    def _first_of_stage(self, node: fx.Node) -> str | None:
        """Return the name of the first operation of a compiled stage; None for any other node."""
        if node.op != "call_module":
            return None
        stage = uncompiled(self.fetch_attr(str(node.target)))
        names = (inner.meta.get("operation") for inner in stage.graph.nodes)
        return next((name for name in names if name is not None), None)

    def _span(
        self,
        kind: Kind,
        name: str,
        key: DeviceKey,
        node: fx.Node,
        devices: tuple[torch.device | None, torch.device | None],
        weights: tuple[str, ...] = (),
        stream: torch.cuda.Stream | None = None,
    ) -> Any:
        """Run a node between a mark on the first and a mark on the second of ``devices``."""
        start = self.recording.mark(devices[0], stream)
        result = super().run_node(node)
        end = self.recording.mark(devices[1], stream)
        self.recording.spans.append(_MeasuredSpan(kind, name, key, start=start, end=end, weights=weights))
        return result

    def _load(self, node: fx.Node, step: Load) -> Any:
        stream = self.env[node.args[0]]  # type: ignore[index]  # the stream is the first argument
        queues, place = stream.storage.queues, self.plan.devices[step.device]
        copies = getattr(queues, "copies", None)  # without a copy stream the host copies
        queues.copies_wait(stream.segments[step.segment].free)  # the copy begins when its slot is free
        name = ", ".join(step.weights)
        return self._span("load", name, step.device, node, (place, place), step.weights, copies)
