"""The batch of several machines as a still picture: a lane for each, with its microbatches and waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from graphplan.ir.cluster.cluster_plan_data import ClusterPlanData
from graphplan.message_text import size_text
from graphplan.report.cluster.cluster_perfetto import Slot, batch_slots
from graphplan.report.cluster.cluster_text import shares_text
from graphplan.report.svg_elements import INK, MUTED, TRANSFER, opening, rect, text, titled
from graphplan.report.text import COLOURS, time_text

_WIDTH, _LEFT, _RIGHT, _LANE, _BOX, _HEAD = 1180, 190, 24, 64, 30, 62
_WAIT = "#f1f3f6"


def to_cluster_svg(
    plan: ClusterPlanData[Any],
    title: str = "Plan",
    measured: Sequence[Slot] = (),
    *,
    forward_only: bool = False,
) -> str:
    """Return the picture of the estimated batch, or of a measured one instead, as text."""
    slots = list(measured or batch_slots(plan, forward_only=forward_only))
    end, shares = max(slot.end for slot in slots), shares_text(plan)
    if measured or forward_only:
        computing = sum(slot.end - slot.start for slot in slots if slot.kind == "stage")
        shares = f"machines compute {100 * computing / (len(plan.used) * end):.0f} % of a batch"
    time = f"{time_text(end)}, {'measured' if measured else 'estimated'}"
    crossing = f"{size_text(plan.network_bytes)} over the network for each"
    figures = f"{plan.microbatches} microbatches in {time}; {shares}; {crossing}"
    return "\n".join(_lines(plan, title, figures, slots)) + "\n"


def _lines(plan: ClusterPlanData[Any], title: str, figures: str, slots: Sequence[Slot]) -> Iterator[str]:
    height = _HEAD + _LANE * len(plan.used) + 16
    yield opening(_WIDTH, height)
    yield text(16, 26, title, INK, size=16)
    yield text(16, 46, figures, MUTED)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(slot.end for slot in slots)
    for index, machine in enumerate(plan.used):
        top, stages = _HEAD + _LANE * index, plan.stages_of(machine)
        several = f", {len(stages)} stages" if len(stages) > 1 else ""
        yield text(16, top + 16, f"machine {machine}{several}", INK)
        weights = sum(stage.plan.graph.weight_bytes for stage in stages)
        yield text(16, top + 32, f"{size_text(weights)} of weights", MUTED)
        if sent := sum(one.nbytes for stage in stages for one in stage.sends):
            yield text(16, top + 48, f"sends {size_text(sent)} each", TRANSFER)
        yield rect(_LEFT, top + 4, _WIDTH - _LEFT - _RIGHT, _BOX, _WAIT)
    for slot in slots:
        if slot.kind != "wait":  # the colour of the lane shows a wait
            yield _slot(plan, slot, scale)
    yield "</svg>"


def _slot(plan: ClusterPlanData[Any], slot: Slot, scale: float) -> str:
    receiving, stage = slot.kind == "receive", plan.stages[slot.stage]
    inputs = "gradients" if slot.backward else ", ".join(one.name for one in stage.receives)
    of_stage = f", stage {slot.stage}" if len(plan.stages) > len(plan.used) else ""
    hint = f"{slot.name}{of_stage}: {inputs if receiving else 'computes'}, {time_text(slot.end - slot.start)}"
    colour = TRANSFER if receiving else COLOURS[slot.stage % len(COLOURS)]
    top = _HEAD + _LANE * plan.used.index(stage.machine) + (4 + _BOX if receiving else 4)
    width = max((slot.end - slot.start) * scale - 0.5, 0.5)
    box = rect(_LEFT + slot.start * scale, top, width, 8 if receiving else _BOX, colour)
    return titled(hint, box)
