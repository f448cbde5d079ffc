"""How a plan shows itself in a notebook: its figures, its devices with their memory as bars."""

from __future__ import annotations

from html import escape

from graphplan.devices.topology import DeviceSpec
from graphplan.ir.plan_data import PlanData
from graphplan.report.text import COLOURS, count_text, gap_text, size_text, time_text

__all__ = ["to_notebook"]

_CELL = "padding:2px 12px 2px 0;text-align:left;white-space:nowrap"
_ACTIVATIONS = "#e3a94a"


def to_notebook(plan: PlanData) -> str:
    """A table in HTML, with its styles in place: notebooks drop style sheets."""
    figures = {
        "time": f"{time_text(plan.makespan)} estimated; {gap_text(plan)}",
        "transfers": f"{count_text(len(plan.transfers), 'value')}, "
        f"{size_text(plan.transfer_bytes)} per forward pass",
        "streamed": f"{count_text(len(plan.streams), 'copy', 'copies')} of weights, "
        f"{size_text(plan.streamed_bytes)} per forward pass",
        "model": f"{count_text(len(plan.graph.operations), 'operation')} "
        f"in {count_text(len(plan.stages), 'stage')}, "
        f"{size_text(plan.graph.weight_bytes)} of weights",
    }
    rows = "".join(
        f'<tr><th style="{_CELL};font-weight:500">{name}</th>'
        f'<td style="{_CELL};white-space:normal" colspan="4">{escape(text)}</td></tr>'
        for name, text in figures.items()
    )
    devices = "".join(_device(plan, spec, i) for i, spec in enumerate(plan.topology.devices))
    head = "".join(
        f'<th style="{_CELL}">{name}</th>' for name in ("device", "memory", "peak", "budget", "operations")
    )
    note = (
        "" if plan.activations_known else "<p>No example inputs were given: activation sizes are unknown.</p>"
    )
    return (
        '<div style="font-size:13px;line-height:1.5"><table style="border-collapse:collapse;border:0">'
        f"{rows}<tr>{head}</tr>{devices}</table>{note}</div>"
    )


def _device(plan: PlanData, spec: DeviceSpec, index: int) -> str:
    peak = plan.peaks[spec.key]
    whole = max(spec.memory, peak.nbytes, 1)
    count = sum(len(stage.operations) for stage in plan.stages if stage.device == spec.key)
    parts = [(peak.weights, COLOURS[index % len(COLOURS)]), (peak.nbytes - peak.weights, _ACTIVATIONS)]
    bar = "".join(
        '<i style="display:inline-block;height:10px;'
        f'width:{100 * nbytes / whole:.2f}%;background:{colour}"></i>'
        for nbytes, colour in parts
    )
    meter = (
        '<div style="width:220px;height:10px;font-size:0;border-radius:5px;overflow:hidden;'
        f'background:rgba(128,128,128,.22)" title="weights and activations">{bar}</div>'
    )
    name = escape(f"{spec.key}" if str(spec.key) == spec.device else f"{spec.key} ({spec.device})")
    cells = (name, meter, size_text(peak.nbytes), size_text(spec.memory), str(count))
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"
