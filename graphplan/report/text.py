"""A plan as text, and the formats of its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import cycle

from graphplan.devices.topology import CPU, DISK, DeviceKey, Topology
from graphplan.ir.graph_elements import Operation, Value, Weight
from graphplan.ir.plan_data import PlanData, Stage
from graphplan.ir.schedule import PrefetchBuffer, prefetch_bytes
from graphplan.message_text import size_text
from graphplan.report.data_flows import find_flows

COLOURS = ("#3b6fd4", "#0f8b7d", "#8350c8", "#c2417a", "#4b8b3b", "#2a8fb3")
"""Colours of accelerators, in the order of ``max_memory``, on the page, in SVG and in DOT."""
_DARK = ("#7aa5f7", "#45c4b4", "#b58df0", "#f07fb0", "#86c972", "#6cc5e6")  # the same on a dark page
_WHERE = 38  # most characters of "peak at", so that a table fits a terminal of 100 columns
_OTHER = {CPU: ("#64748b", "#94a3b8"), DISK: ("#8a6d52", "#c1a487")}


def device_colours(topology: Topology) -> dict[DeviceKey, tuple[str, str]]:
    """Return device key -> its colours on a light and on a dark page; the caller's CPU is included."""
    pairs = cycle(zip(COLOURS, _DARK, strict=True))
    colours = {one.key: next(pairs) if one.is_accelerator else _OTHER[one.type] for one in topology.devices}
    return {CPU: _OTHER[CPU], **colours}


def time_text(seconds: float) -> str:
    """Return seconds as text: ``0.0015 -> "1.50 ms"``."""
    if round(seconds * 1e6, 1) < 1000:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if round(seconds * 1e3, 2) < 1000 else f"{seconds:.2f} s"


def device_text(key: DeviceKey) -> str:
    """Return a device for a sentence: ``"GPU 0"``, ``"the CPU"``, ``"cuda:1"``."""
    return f"GPU {key}" if isinstance(key, int) else {"cpu": "the CPU", "disk": "the disk"}.get(key, key)


def operation_text(operation: Operation) -> str:
    """Return an operation by its module: ``"lm_head (linear)"``; by its own name if it has none."""
    path = operation.module_path
    return f"{path} ({operation.target})" if path else operation.name


def device_name(key: DeviceKey) -> str:
    """Return a device for a label: ``"GPU 0"``, ``"CPU"``, ``"cuda:1"``."""
    return device_text(key).removeprefix("the ")


def shape_text(value: Value | Weight) -> str:
    """Return dtype and shape of a value or weight (``float32[2, 4]``); empty if unknown."""
    return f"{value.dtype}{list(value.shape)}" if value.dtype else ""


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: first and last column left-aligned, others right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0], cells[-1] = row[0].ljust(widths[0]), row[-1]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def summary_text(plan: PlanData) -> str:
    """Return the plan as a readable table."""
    graph = plan.graph
    weights = size_text(graph.weight_bytes)
    hooked = plan.method == "hooks"
    time = f"{time_text(plan.makespan)} estimated" + (", copies only" if hooked else "")
    bound = "" if hooked else f"lower bound {time_text(plan.lower_bound)}, "
    lines = [
        f"{count_text(len(graph.operations), 'operation')}, {count_text(len(graph.weights), 'weight')} "
        f"of {weights}, {'runs module by module' if hooked else f'traced by {plan.method}'}",
        "",
        *_devices(plan),
        "",
        *_stages(plan),
        "",
        *_moves(plan),
        f"time       {time}, {bound}{gap_text(plan, 2)}",
    ]
    if plan.others:
        lines.append(
            f"weighted   {time_text(plan.weighted_makespan)} for {len(plan.calls)} example inputs, lower "
            f"bound {time_text(plan.weighted_lower_bound)}"
        )
    lines += [*_sliced(plan), *_saved_less(plan)]
    if not plan.activations_known:
        lines.append("activation sizes are unknown: peaks and times count weights only")
    return "\n".join(lines)


def count_text(count: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 copy``, ``2 copies``."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def gap_text(plan: PlanData, digits: int = 1) -> str:
    """Return how far from optimal a plan may be, and the proof; the gap is unknown without a bound."""
    if not (plan.lower_bound > 0 or plan.makespan == 0):
        return f"gap unknown ({plan.proof})"
    return f"within {100 * plan.gap:.{digits}f} % of optimal ({plan.proof})"


def _sliced(plan: PlanData) -> list[str]:
    """Return a line for each sliced weight, with the devices of its parts."""
    lines = []
    for name in dict.fromkeys(part.part_of for part in plan.graph.parts):
        parts = [part for part in plan.graph.parts if part.part_of == name]
        homes = [plan.parts[part.name] for part in parts]
        listed = ", ".join(f"{homes.count(key)} on {key}" for key in dict.fromkeys(homes))
        lines.append(
            f"sliced     {name}, {size_text(sum(p.nbytes for p in parts))} in {len(parts)} parts: {listed}"
        )
    return lines


def _saved_less(plan: PlanData) -> list[str]:
    """Return lines on recomputation, the optimizer and offloading in a training step."""
    lines = []
    if plan.recomputed:
        lines.append(
            f"recomputes {count_text(len(plan.recomputed), 'operation')} in the backward pass, "
            f"{time_text(plan.recompute_seconds)} of the time"
        )
    if plan.optimizer_seconds:
        lines.append(f"optimizer  {time_text(plan.optimizer_seconds)} after the step")
    if plan.offloaded_activations:
        size = size_text(sum(plan.offloaded_activations.values()))
        count = count_text(len(plan.offloaded_activations), "activation")
        lines.append(f"offloads   {count}, {size}, to CPU memory until the backward pass")
    return lines


def _moves(plan: PlanData) -> list[str]:
    """Return lines on transfers and weight streaming, if there are any."""
    lines, call, buffers = [], plan.graph.call, plan.schedule.prefetch_buffers
    if plan.transfers:
        count = count_text(len(plan.transfers), "value")
        lines.append(f"transfers  {count}, {size_text(plan.transfer_bytes)} per {call}")
    if plan.streams or buffers:
        count = count_text(len(plan.streams), "prefetch", "prefetches")
        held = "".join(map(_buffer_text, buffers))
        lines.append(f"streams    {count}, {size_text(plan.streamed_bytes)} per {call}{held}")
    return lines


def _buffer_text(buffer: PrefetchBuffer) -> str:
    if not buffer.slots:
        return f", {size_text(buffer.nbytes)} on {buffer.device} for other calls"
    buffers = count_text(len(buffer.slots), "prefetch buffer")
    return f", {size_text(buffer.nbytes)} in {buffers} on {buffer.device}"


def _devices(plan: PlanData) -> list[str]:
    buffers = prefetch_bytes(plan.schedule.prefetch_buffers)
    rows = []
    for spec in plan.topology.devices:
        peak, buffer = plan.peaks[spec.key], buffers.get(spec.key, 0)
        count = sum(len(stage.operations) for stage in plan.stages if stage.device == spec.key)
        rows.append(
            [
                str(spec.key),
                spec.device,
                size_text(spec.memory),
                size_text(peak.nbytes),
                f"{100 * peak.nbytes / spec.memory:.0f}" if spec.memory else "-",
                size_text(peak.weights - buffer),
                *([size_text(buffer)] if buffers else []),
                str(count),
                _where(plan, peak.operation),
            ]
        )
    streamed = ["prefetch"] if buffers else []
    header = ["key", "device", "budget", "peak", "% of budget", "weights", *streamed, "operations", "peak at"]
    return table_lines(header, rows)


def _where(plan: PlanData, operation: str) -> str:
    """Return the operation at a peak, by its module; the optimizer; or ``-`` before any operation."""
    peak_operation = plan.graph.operations.get(operation)
    if peak_operation is None:
        return operation or "-"
    label = operation_text(peak_operation)
    return label if len(label) <= _WHERE else _shortened(peak_operation.module_path or label)


def _shortened(path: str) -> str:
    """Return a long path without its middle: ``"encoder.layer.0...intermediate_act_fn"``."""
    *parts, last = path.split(".")
    while parts and len(path) > _WHERE:
        path = f"{'.'.join(parts)}...{last}"
        parts.pop()
    return path


def module_range(plan: PlanData, stage: Stage) -> str:
    """Return the modules of the first and the last operation of a stage."""
    ends = (plan.graph.operations[stage.operations[at]].module_path or "(root)" for at in (0, -1))
    return " .. ".join(dict.fromkeys(ends))


def _stages(plan: PlanData) -> list[str]:
    first_read: Counter[str] = Counter()  # operation -> bytes that it is the first to read
    for flow in find_flows(plan):
        if flow.kind == "activation" and flow.reader is not None:
            first_read[flow.reader] += flow.nbytes
    rows = []
    for stage in plan.stages:
        arriving = sum(first_read[name] for name in stage.operations)
        count, ends = str(len(stage.operations)), module_range(plan, stage)
        rows.append([str(stage.index), str(stage.device), count, size_text(arriving), ends])
    shown = rows if len(rows) <= 24 else [*rows[:12], ["...", "", "", "", ""], *rows[-11:]]
    return table_lines(["stage", "device", "operations", "reads", "modules"], shown)
