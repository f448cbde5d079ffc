"""One forward pass or training step, measured: when each operation and copy ran, and the most bytes there.

The generated code runs node by node with a mark before and after each. On CUDA a mark is an event on the
stream that the node's work is enqueued on, so that nothing waits while it runs; a copy of streamed
weights is marked on the copy stream. Elsewhere work is done when the host returns, and a mark is the
host's clock. Marks take time of their own: where operations are short, the forward pass is slower.
"""

from __future__ import annotations

import operator
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
from graphplan.report.html_page import to_html
from graphplan.report.model_explorer import save_model_explorer
from graphplan.report.perfetto import to_trace
from graphplan.report.svg import to_svg
from graphplan.report.text import size_text, table_lines, time_text
from graphplan.runtime.profile.efficiency import Sample, efficiencies
from graphplan.runtime.simulate.simulated_machine import SimulatedMachine

Kind = Literal["run", "move", "load", "wait"]
_IDLE = 10  # times that marks around nothing are measured
_NO_WAIT = 5e-6  # seconds that passing a copy which is there already may take


@dataclass(frozen=True, slots=True)
class Profile:
    """A measured forward pass, or training step, beside the estimated one. Sizes are bytes, times seconds.

    Attributes:
        plan: of the forward pass, or of forward and backward.
        measured: its measured timeline and peaks.
    """

    plan: PlanData
    measured: Measured

    @property
    def seconds(self) -> float:
        """Measured time of the forward pass, and the backward pass of a training step, marks included."""
        return self.measured.timeline.seconds

    @property
    def timeline(self) -> Timeline:
        """When each operation, move and copy of weights started and ended."""
        return self.measured.timeline

    @property
    def peak_bytes(self) -> Mapping[DeviceKey, int]:
        """Device key -> the most bytes that were allocated; the CPU is not measured."""
        return self.measured.peak_bytes

    @property
    def measurements(self) -> Measurements:
        """What types of operation reached of the plan's figures, for ``devices=`` of a plan.

        Simulated devices are left out: their speed says nothing.
        """
        graph, topology = self.plan.graph, self.plan.topology
        samples: dict[DeviceKey, list[Sample]] = {}
        for event in self.timeline.events:
            operation = graph.operations.get(event.name) if event.kind == "run" else None
            if operation is not None and topology[event.device].type != SIMULATED:
                seconds = event.end - event.start - self.measured.mark_seconds.get(event.device, 0.0)
                cost = operation.flops, operation.bytes_accessed, seconds
                samples.setdefault(event.device, []).append(Sample(operation.type, *cost))
        speeds = {}
        for key, found in samples.items():
            spec = topology[key]
            reached = {**spec.efficiency, **efficiencies(found, spec)}
            speeds[key] = replace(Speed.of(spec), efficiency=reached, origin="measured")
        return Measurements(speeds, topology.links)

    def summary(self) -> str:
        """A table: measured and estimated seconds and peaks of each device."""
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
        whole = f"one {call}: {time_text(self.plan.makespan)} estimated, {time_text(self.seconds)} measured"
        return "\n".join([whole, "", *table_lines(header, rows)])

    def __str__(self) -> str:
        return self.summary()

    def save_html(self, path: str | Path, *, title: str = "") -> None:
        """Write the page of the plan, with measured values beside the estimates."""
        page = to_html(self.plan, title, self.measured, self.plan.remarks())
        Path(path).write_text(page, encoding="utf-8")

    def save_trace(self, path: str | Path) -> None:
        """Write both timelines for Perfetto or ``chrome://tracing``."""
        Path(path).write_text(to_trace(self.plan, self.measured), encoding="utf-8")

    def save_svg(self, path: str | Path, *, title: str = "Plan") -> None:
        """Write the picture of the plan, with the measured peaks."""
        Path(path).write_text(to_svg(self.plan, title, self.measured), encoding="utf-8")

    def save_model_explorer(self, path: str | Path, *, title: str = "Plan") -> None:
        """Write the plan for Model Explorer, with the measured seconds as one more colouring."""
        save_model_explorer(self.plan, Path(path), title, self.measured)


Mark = Callable[[], float]
"""The seconds from the call's begin to a moment, once all work is done."""


@dataclass(frozen=True, slots=True)
class _Measured:
    kind: Kind
    name: str
    device: DeviceKey
    start: Mark
    end: Mark
    weights: tuple[str, ...] = ()


class Recorder(fx.Interpreter):
    """Runs generated code in place of the compiled function, and notes when what runs.

    Args:
        module: the generated code, over the weights of its module.
        plan: that it carries out.
        before: what ran the forward pass, where this runs the backward pass of the same step.
    """

    def __init__(self, module: fx.GraphModule, plan: PlanData, before: Recorder | None = None) -> None:
        super().__init__(module)
        self.plan, self.before = plan, before
        self.spans: list[_Measured] = []
        self.bases: dict[torch.device, torch.cuda.Event] = {}
        self.idle: dict[DeviceKey, list[tuple[Mark, Mark]]] = {}
        self.began = 0.0
        self.measured: Measured | None = None

    def __call__(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The flat results for the flat inputs; :attr:`measured` has what they took, from the first mark."""
        machine = current_machine.get()
        if self.before is None:
            self._begin(machine)
        else:
            first = self.before
            self.spans, self.bases, self.idle, self.began = first.spans, first.bases, first.idle, first.began
        results: Sequence[Any] = self.run(*tensors)
        self.env = {}  # which holds on to the results, and so to what a training step saves
        for device in self.bases:
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        marks = {key: min(end() - start() for start, end in pairs) for key, pairs in self.idle.items()}
        self.measured = Measured(self._timeline(ended), self._peaks(machine), marks)
        return results

    def _begin(self, machine: object) -> None:
        """Forget peaks, and set the clocks."""
        devices = [device for device in self.plan.devices.values() if device.type == "cuda"]
        for device in devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.bases[device] = torch.cuda.Event(enable_timing=True)
            self.bases[device].record(torch.cuda.current_stream(device))
        if isinstance(machine, SimulatedMachine):
            machine.reset_peaks()
        self.began = time.perf_counter()
        self.idle = {key: self._idle(device) for key, device in self.plan.devices.items()}
        self.began = time.perf_counter()

    def _idle(self, device: torch.device) -> list[tuple[Mark, Mark]]:
        """Marks around a node that does nothing."""
        node = fx.Graph().call_function(operator.pos, (1.0,))
        found = []
        for _ in range(_IDLE):
            start = self._mark(device)
            super().run_node(node)
            found.append((start, self._mark(device)))
        return found

    def run_node(self, n: fx.Node) -> Any:
        step = n.meta.get("move") or n.meta.get("stream")
        devices = self.plan.devices
        if isinstance(step, Move):
            source, target = devices.get(step.source), devices.get(step.destination)
            return self._span("move", step.value, step.destination, n, (source or target, target or source))
        if isinstance(step, Load):
            return self._load(n, step)
        if isinstance(step, Wait):
            buffer = next(
                buffer for buffer in self.plan.schedule.prefetch_buffers if buffer.device == step.device
            )
            weights = buffer.segments[step.segment].weights
            place = devices[step.device]
            return self._span("wait", ", ".join(weights), step.device, n, (place, place), weights)
        inside = self._first_of_stage(n)
        name = n.meta.get("operation", inside)
        if name is None:
            return super().run_node(n)
        key = self.plan.schedule.assignment.operations[name]
        there = devices.get(key)
        return self._span("run", name if inside is None else n.name, key, n, (there, there))

    def _first_of_stage(self, node: fx.Node) -> str | None:
        """The first operation of a compiled stage; None for any other node."""
        if node.op != "call_module":
            return None
        stage = self.fetch_attr(str(node.target))
        stage = uncompiled(stage)
        names = (inner.meta.get("operation") for inner in stage.graph.nodes)
        return next((name for name in names if name is not None), None)

    def _span(
        self,
        kind: Kind,
        name: str,
        key: DeviceKey,
        node: fx.Node,
        places: tuple[torch.device | None, torch.device | None],
        weights: tuple[str, ...] = (),
    ) -> Any:
        start = self._mark(places[0])
        result = super().run_node(node)
        self.spans.append(_Measured(kind, name, key, start, self._mark(places[1]), weights))
        return result

    def _load(self, node: fx.Node, step: Load) -> Any:
        stream = self.env[node.args[0]]  # type: ignore[index]  # the stream is the first argument
        queues = stream.call.storage.queues
        copies = getattr(queues, "copies", None)  # without a stream of their own copies are the host's
        place = self.plan.devices[step.device]
        queues.copies_wait(stream.segments[step.segment].free)  # the copy begins when its slot is free
        start = self._mark(place, copies)
        result = super().run_node(node)
        end = self._mark(place, copies)
        self.spans.append(_Measured("load", ", ".join(step.weights), step.device, start, end, step.weights))
        return result

    def _mark(self, device: torch.device | None, stream: torch.cuda.Stream | None = None) -> Mark:
        if device is None or device.type != "cuda":
            passed = time.perf_counter() - self.began
            return lambda: passed
        base, event = self.bases[device], torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(device))
        return lambda: float(base.elapsed_time(event)) / 1e3

    def _timeline(self, ended: float) -> Timeline:
        events = []
        for span in self.spans:
            start = max(0.0, span.start())
            end = max(start, span.end())
            if span.kind != "wait" or end - start > _NO_WAIT:
                events.append(Event(span.kind, span.name, span.device, start, end, span.weights))
        return Timeline(tuple(events), max([ended - self.began, *(event.end for event in events)]))

    def _peaks(self, machine: object) -> dict[DeviceKey, int]:
        found: dict[DeviceKey, int] = {}
        for key, device in self.plan.devices.items():
            if device.type == "cuda":
                found[key] = torch.cuda.max_memory_allocated(device)
            elif isinstance(machine, SimulatedMachine) and device.type == machine.device_type:
                found[key] = machine.peak_bytes(device.index or 0)
        return found
