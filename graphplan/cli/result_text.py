"""Text and JSON of plans, runs, comparisons and devices. In JSON, sizes are bytes and times seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from graphplan.analysis.plan import Plan
from graphplan.devices.topology import SIMULATED, DeviceSpec, Topology
from graphplan.ir.schedule import prefetch_bytes
from graphplan.message_text import size_text
from graphplan.report.text import table_lines, time_text

if TYPE_CHECKING:  # their modules take seconds to import, which `graphplan show` must not wait for
    from graphplan.integrations.accelerate.comparison import Baseline
    from graphplan.runtime.profile.call_profile import Profile


def plan_digest(plan: Plan) -> dict[str, Any]:
    """Return the figures of ``plan.summary()`` and the device map, for JSON."""
    buffers = prefetch_bytes(plan.schedule.prefetch_buffers)
    return {
        "operations": len(plan.graph.operations),
        "weight_bytes": plan.graph.weight_bytes,
        "method": plan.method,
        "activations_known": plan.activations_known,
        "devices": [
            {
                "key": spec.key,
                "device": spec.device,
                "budget": spec.memory,
                "peak": plan.peak_bytes[spec.key],
                "weights": plan.peaks[spec.key].weights - buffers.get(spec.key, 0),
                "prefetch": buffers.get(spec.key, 0),
                "peak_at": plan.peaks[spec.key].operation,
            }
            for spec in plan.topology.devices
        ],
        "stages": [{"device": s.device, "operations": len(s.operations)} for s in plan.stages],
        "transfers": len(plan.transfers),
        "transfer_bytes": plan.transfer_bytes,
        "streams": len(plan.streams),
        "streamed_bytes": plan.streamed_bytes,
        "makespan": plan.makespan,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "proof": plan.proof,
        "device_map": plan.device_map(),
    }


def run_digest(profile: Profile) -> dict[str, Any]:
    """Return the planned seconds, and planned and measured peaks, for JSON."""
    return {
        "makespan": profile.plan.makespan,
        "devices": [
            {
                "key": spec.key,
                "budget": spec.memory,
                "planned_peak": profile.plan.peak_bytes[spec.key],
                "measured_peak": profile.peak_bytes.get(spec.key),
            }
            for spec in profile.plan.topology.devices
        ],
    }


def comparison_text(rows: Sequence[Baseline]) -> str:
    """Return a table of the planners, with notes on its columns."""
    header = [
        "planner",
        "forward pass",
        "over budget",
        "offloaded",
        "transferred",
        "streamed",
        "planning",
        "auto",
    ]
    lines = table_lines(header, [_cells(row) for row in rows])
    notes = [f"{row.name}: {row.error}" for row in rows if row.error]
    return "\n".join([*lines, "", *notes, *_NOTES])


_NOTES = (
    "Times are estimates. One evaluator computes all rows: it counts activations and prefetches offloaded",
    "weights, which accelerate's hooks do not. 'auto' is the map for device_map=\"auto\". Where that map",
    "exceeds a budget, the row shows the fastest map within all budgets, or the one that comes closest.",
)


def _cells(row: Baseline) -> list[str]:
    if row.seconds is None:
        return [row.name, "-", "-", "-", "-", "-", time_text(row.planning), "no placement"]
    first = "" if row.first_seconds is None else time_text(row.first_seconds)
    if row.first_over:
        first += f", over budget by {size_text(row.first_over)}"
    return [
        row.name,
        time_text(row.seconds),
        size_text(row.over) if row.over else "no",
        size_text(row.offloaded),
        size_text(row.transfer_bytes),
        size_text(row.streamed_bytes),
        time_text(row.planning),
        first,
    ]


def device_digest(topology: Topology) -> list[dict[str, Any]]:
    """Return each device with its budget and speeds, for JSON."""
    return [{**asdict(spec), "name": gpu_name_of(spec)} for spec in topology.devices]


def devices_text(topology: Topology) -> str:
    """Return a table of the devices with their budgets and speeds."""
    rows = [
        [
            str(spec.key),
            spec.device,
            size_text(spec.memory),
            f"{spec.flops / 1e12:.3g} TFLOP/s",
            f"{spec.bandwidth / 1e9:.3g} GB/s",
            time_text(spec.overhead),
            gpu_name_of(spec),
        ]
        for spec in topology.devices
    ]
    return "\n".join(table_lines(["key", "device", "free", "compute", "memory", "operation", "name"], rows))


def gpu_name_of(spec: DeviceSpec) -> str:
    """Return the driver's name of an accelerator; empty for other devices."""
    if not spec.is_accelerator or spec.type == SIMULATED:
        return ""
    name_of = getattr(getattr(torch, spec.type, None), "get_device_name", None)
    return str(name_of(spec.index)) if name_of is not None else ""
