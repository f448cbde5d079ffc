"""The batch of several machines as a still picture: a lane for each, its microbatches, where it waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from graphplan.ir.cluster_plan_data import ClusterPlanData
from graphplan.report.cluster_perfetto import Slot, batch_slots
from graphplan.report.text import COLOURS, size_text, time_text

_WIDTH, _LEFT, _RIGHT, _LANE, _BOX, _HEAD = 1180, 190, 24, 64, 30, 62
_INK, _MUTED, _TRANSFER, _WAIT = "#1b2330", "#5f6b7c", "#c75d1c", "#f1f3f6"


def to_cluster_svg(plan: ClusterPlanData[Any], title: str = "Plan", measured: Sequence[Slot] = ()) -> str:
    """The picture as text.

    Args:
        plan: whose batch is drawn.
        title: above the picture.
        measured: a measured batch, drawn in place of the estimated one.
    """
    return "\n".join(_lines(plan, title, measured)) + "\n"


def _lines(plan: ClusterPlanData[Any], title: str, measured: Sequence[Slot]) -> Iterator[str]:
    height = _HEAD + _LANE * len(plan.stages) + 16
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="system-ui, sans-serif" font-size="12">'
    )
    yield f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    yield _text(16, 26, title, _INK, 16)
    slots = list(measured or batch_slots(plan))
    end = max(slot.end for slot in slots)
    time, bubble = f"{time_text(plan.makespan)}, estimated", plan.bubble
    if measured:
        time, bubble = f"{time_text(end)}, measured", _bubble(measured, len(plan.stages))
    crossing = f"{size_text(plan.network_bytes)} over the network for each"
    said = f"{plan.microbatches} microbatches in {time}; machines wait {100 * bubble:.0f} %; {crossing}"
    yield _text(16, 46, said, _MUTED)
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    for index, stage in enumerate(plan.stages):
        top = _HEAD + _LANE * index
        yield _text(16, top + 16, f"machine {stage.machine}", _INK)
        yield _text(16, top + 32, f"{size_text(stage.plan.graph.weight_bytes)} of weights", _MUTED)
        if stage.sends:
            sent = sum(one.nbytes for one in stage.sends)
            yield _text(16, top + 48, f"sends {size_text(sent)} each", _TRANSFER)
        yield _rect(_LEFT, top + 4, _WIDTH - _LEFT - _RIGHT, _BOX, _WAIT, "")
    for slot in slots:
        if slot.kind != "wait":  # the lane's own colour shows that
            yield _slot(plan, slot, scale)
    yield "</svg>"


def _bubble(slots: Sequence[Slot], stages: int) -> float:
    """The share of the machines' time in which they do not compute."""
    computing = sum(slot.end - slot.start for slot in slots if slot.kind == "stage")
    return 1.0 - computing / (stages * max(slot.end for slot in slots))


def _slot(plan: ClusterPlanData[Any], slot: Slot, scale: float) -> str:
    receiving = slot.kind == "receive"
    names = ", ".join(one.name for one in plan.stages[slot.stage].receives) if receiving else "computes"
    hint = f"microbatch {slot.microbatch}: {names}, {time_text(slot.end - slot.start)}"
    colour = _TRANSFER if receiving else COLOURS[slot.stage % len(COLOURS)]
    top = _HEAD + _LANE * slot.stage + (4 + _BOX if receiving else 4)
    width = max((slot.end - slot.start) * scale - 0.5, 0.5)
    return _rect(_LEFT + slot.start * scale, top, width, 8 if receiving else _BOX, colour, hint)


def _rect(x: float, y: float, width: float, height: float, colour: str, hint: str) -> str:
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}">{inside}</rect>'


def _text(x: float, y: float, text: str, colour: str, size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}">{escape(text)}</text>'
