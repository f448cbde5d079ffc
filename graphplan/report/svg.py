"""A plan as one still picture: stages over time, in the lane of their device, and memory below.

The width of stages and prefetches is their estimated time. The memory of each device is drawn over the order
of operations, with its budget.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from graphplan.devices.topology import DeviceKey, DeviceSpec
from graphplan.ir.plan_data import PlanData
from graphplan.ir.timeline import Measured
from graphplan.message_text import size_text
from graphplan.report.data_flows import Flow, find_flows
from graphplan.report.module_tree import stage_groups
from graphplan.report.svg_elements import INK, MUTED, TRANSFER, opening, rect, text, titled
from graphplan.report.text import (
    count_text,
    device_colours,
    device_name,
    device_text,
    gap_text,
    operation_text,
    time_text,
)

_WIDTH, _LEFT, _RIGHT = 1180, 150, 24
_LANE, _BOX, _STREAM, _CHART, _HEAD = 92, 40, 10, 84, 66
_LINE, _ACTIVATION, _BUDGET, _MEASURED = "#e1e5eb", "#e3a94a", "#c4372c", "#7a3fc0"


def to_svg(plan: PlanData, title: str = "Plan", measured: Measured | None = None) -> str:
    """Return the picture as text; peaks of a measured call are drawn with the estimated ones."""
    return "\n".join(_Picture(plan, title, measured).lines()) + "\n"


_LETTER = 7.0  # width of a letter in the sizes of transfers


class _Picture:
    def __init__(self, plan: PlanData, title: str, measured: Measured | None) -> None:
        self.plan, self.title, self.measured = plan, title, measured
        self.specs = plan.topology.devices
        self.lane = {spec.key: index for index, spec in enumerate(self.specs)}
        self.flows, self.colours = find_flows(plan), device_colours(plan.topology)
        self.written: dict[int, list[tuple[float, float]]] = {}  # row -> (left, right) of the sizes in it
        self.memory_top = _HEAD + _LANE * len(self.specs) + 56
        self.height = self.memory_top + _CHART * len(self.specs) + 12

    def lines(self) -> Iterator[str]:
        yield opening(_WIDTH, self.height)
        yield (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0L8,4L0,8Z" fill="{TRANSFER}"/></marker></defs>'
        )
        yield from self._head()
        for index, spec in enumerate(self.specs):
            yield from self._lane(index, spec)
        yield from self._stages()
        yield from self._streams()
        for arrow in self._arrows():
            yield from self._arrow(arrow)
        yield text(20, self.memory_top - 14, "Memory over the order of operations", INK, weight=600)
        for index, spec in enumerate(self.specs):
            yield from self._memory(index, spec)
        yield "</svg>"

    # -- time -------------------------------------------------------------------------------------

    def _x(self, seconds: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / (self.plan.makespan or 1.0)

    def _top(self, device: DeviceKey) -> int:
        """Return the y of the upper edge of a device's stages."""
        return _HEAD + self.lane[device] * _LANE + 18

    def _head(self) -> Iterator[str]:
        plan = self.plan
        yield text(20, 26, self.title, INK, size=16, weight=600)
        took = "" if self.measured is None else f", {time_text(self.measured.timeline.seconds)} measured"
        about = (
            f"{time_text(plan.makespan)} estimated{took}; {gap_text(plan)}; "
            f"{size_text(plan.transfer_bytes)} transferred, {size_text(plan.streamed_bytes)} streamed"
        )
        yield text(20, 46, about, MUTED)

    def _lane(self, index: int, spec: DeviceSpec) -> Iterator[str]:
        top = _HEAD + index * _LANE
        colour, name = self.colours[spec.key][0], device_name(spec.key)
        yield rect(0, top, _WIDTH, _LANE, colour, opacity=0.05)
        yield f'<line x1="0" x2="{_WIDTH}" y1="{top}" y2="{top}" stroke="{_LINE}"/>'
        yield text(20, top + 30, name, colour, weight=600, size=13)
        yield text(20, top + 48, size_text(self.plan.peak_bytes[spec.key]), MUTED)
        yield text(20, top + 64, f"of {size_text(spec.memory)}", MUTED)

    def _stages(self) -> Iterator[str]:
        runs = {e.name: e for e in self.plan.timeline.events if e.kind == "run"}
        for stage, group in zip(self.plan.stages, stage_groups(self.plan), strict=True):
            first, last = runs[stage.operations[0]].start, runs[stage.operations[-1]].end
            start, top, colour = self._x(first), self._top(stage.device), self.colours[stage.device][0]
            width, took = max(1.5, self._x(last) - start), time_text(last - first)
            lines = (group.label, f"{took}, {count_text(len(stage.operations), 'op')}")
            yield titled(
                f"stage {stage.index}: {group.label}, {took}",
                rect(start, top, width, _BOX, colour, opacity=0.28, stroke=colour),
                *(
                    text(start + width / 2, top + 17 + 15 * row, line, INK, anchor="middle", size=11)
                    for row, line in enumerate(lines)
                    if len(line) * 6.6 < width
                ),
            )

    def _streams(self) -> Iterator[str]:
        for flow in self.flows:
            if flow.kind == "weight":
                top = self._top(flow.destination) + _BOX + 8
                width = max(0.75, self._x(flow.end) - self._x(flow.start) - 0.5)
                note = f"{', '.join(flow.names)}: {size_text(flow.nbytes)} from {device_text(flow.source)}"
                colour = self.colours[flow.destination][0]
                yield titled(note, rect(self._x(flow.start), top, width, _STREAM, colour, opacity=0.5))

    def _arrows(self) -> Sequence[Flow]:
        """Return transfers; those between the same devices that closely follow each other are merged."""
        drawn: list[Flow] = []
        last: dict[tuple[DeviceKey, DeviceKey], int] = {}
        for flow in self.flows:
            if flow.kind != "activation":
                continue
            index = last.get((flow.source, flow.destination))
            if index is not None and flow.start - drawn[index].end < 0.06 * self.plan.makespan:
                drawn[index] = replace(drawn[index], end=flow.end, nbytes=drawn[index].nbytes + flow.nbytes)
            else:
                last[flow.source, flow.destination] = len(drawn)
                drawn.append(flow)
        return drawn

    def _arrow(self, arrow: Flow) -> Iterator[str]:
        start, end = self._top(arrow.source), self._top(arrow.destination)
        start, end = (start + _BOX, end) if end > start else (start, end + _BOX)
        x1, x2 = self._x(arrow.start), self._x(arrow.end)
        size = size_text(arrow.nbytes)
        yield (
            f'<path d="M{x1:.1f},{start}L{x2:.1f},{end}" stroke="{TRANSFER}" stroke-width="1.8" '
            f'fill="none" marker-end="url(#head)"><title>{size}</title></path>'
        )
        place = (x1 + x2) / 2 + 8, (start + end) / 2 + 4
        if self._is_free(*place, len(size) * _LETTER):
            yield text(*place, size, TRANSFER, size=11, weight=600, halo=True)

    def _is_free(self, left: float, top: float, width: float) -> bool:
        """Reserve room for a text; return whether there was. The arrow's tooltip has the text in any case."""
        taken = self.written.setdefault(round(top), [])
        right = left + width
        free = right < _WIDTH and all(right < start or left > end for start, end in taken)
        if free:
            taken.append((left, right))
        return free

    # -- memory -----------------------------------------------------------------------------------

    def _memory(self, index: int, spec: DeviceSpec) -> Iterator[str]:
        plan, peak = self.plan, self.plan.peaks[spec.key]
        most = max(peak.nbytes, 1)
        far = spec.memory > 4 * most
        scale = most * 1.1 if far else max(most, spec.memory) * 1.05
        bottom, room = self.memory_top + (index + 1) * _CHART - 14, _CHART - 26
        levels = plan.memory.profile[spec.key]
        across = (_WIDTH - _LEFT - _RIGHT) / max(1, len(levels))

        def y(nbytes: float) -> float:
            return bottom - room * nbytes / scale

        colour, name = self.colours[spec.key][0], device_name(spec.key)
        yield text(20, bottom - room / 2 + 4, name, colour, weight=600, size=13)
        path = "".join(
            f"V{y(max(nbytes, peak.weights)):.1f}H{_LEFT + (i + 1) * across:.1f}"
            for i, nbytes in _changes(levels)
        )
        yield f'<path d="M{_LEFT},{y(0):.1f}{path}V{y(0):.1f}Z" fill="{_ACTIVATION}"/>'
        if peak.weights:
            high = y(peak.weights)
            yield rect(_LEFT, high, _WIDTH - _LEFT - _RIGHT, y(0) - high, colour, opacity=0.9)
        budget = f"budget {size_text(spec.memory)}" + (", above this chart" if far else "")
        top = bottom - room if far else y(spec.memory)
        if not far:
            yield _dashed(top, _BUDGET)
        yield text(_WIDTH - _RIGHT, top - 4, budget, _BUDGET, anchor="end", size=11, halo=True)
        x = _LEFT + (max(0, peak.step) + 0.5) * across
        yield f'<circle cx="{x:.1f}" cy="{y(peak.nbytes):.1f}" r="3.5" fill="{INK}" stroke="#fff"/>'
        operation = plan.graph.operations.get(peak.operation or "")
        where = peak.operation if operation is None else operation_text(operation)
        note = f"peak {size_text(peak.nbytes)}" + (f" at {where}" if where else "")
        if self.measured is not None and spec.key in self.measured.peak_bytes:
            nbytes = self.measured.peak_bytes[spec.key]
            yield _dashed(y(nbytes), _MEASURED)
            note += f", measured peak {size_text(nbytes)}"
        yield text(_LEFT + 4, bottom - room - 4, note, INK, size=11, halo=True)


def _changes(levels: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the last position and the level of each run of equal levels."""
    for _, run in groupby(enumerate(levels), key=itemgetter(1)):
        yield deque(run, maxlen=1)[0]


def _dashed(y: float, colour: str) -> str:
    ends = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-dasharray="6 4"/>'
