"""Reasons why a stage is where it is, in a few words for each other device."""

from __future__ import annotations

from graphplan.analysis.plan_problem import as_if_first
from graphplan.analysis.relocation import EPSILON, Alternative, Mover, only_read_by
from graphplan.devices.topology import DeviceKey
from graphplan.ir.plan_data import PlanData
from graphplan.message_text import size_text
from graphplan.report.data_flows import run_seconds
from graphplan.report.text import device_text, operation_text, time_text

_MOST = 12  # stages that are examined: those that take most time
_EFFORT = 40_000  # operations of all evaluated placements together: about a second


def stage_reasons(plan: PlanData) -> dict[int, dict[DeviceKey, str]]:
    """Return stage -> other device -> the cost of the stage there, everything else unchanged.

    If there are many stages or operations, only for the slowest stages; empty for the method ``"hooks"``.
    """
    if plan.method == "hooks":
        return {}
    plan = as_if_first(plan)
    seconds = run_seconds(plan.timeline)
    longest = sorted(plan.stages, key=lambda stage: -sum(seconds[name] for name in stage.operations))
    computing = [spec.key for spec in plan.topology.computing]
    effort_per_stage = len(plan.graph.operations) * max(1, len(computing) - 1)
    reasons: dict[int, dict[DeviceKey, str]] = {}
    for stage in longest[: min(_MOST, _EFFORT // max(1, effort_per_stage))]:
        owned = only_read_by(plan.graph, stage.operations)
        mover = Mover(plan, f"stage {stage.index}", "stage", owned, stage.operations)
        others = (key for key in computing if key != stage.device)
        reasons[stage.index] = {key: _reason(plan, mover.to(key)) for key in others}
    return reasons


def _reason(plan: PlanData, other: Alternative) -> str:
    if other.along:
        return "would also move other operations, which share memory with these"
    if other.slower is None:
        return other.obstacle
    word = "slower" if other.slower > 0 else "faster"
    times = "the same time" if abs(other.slower) <= EPSILON else f"{time_text(abs(other.slower))} {word}"
    if not other.missing_bytes:
        return times if other.possible else other.obstacle
    missing = (f"{size_text(n)} too little on {device_text(key)}" for key, n in other.missing_bytes.items())
    operation = plan.graph.operations.get(other.operation or "")
    where = "" if operation is None else f", at {operation_text(operation)}"
    return f"{times}; {' and '.join(missing)}{where}"
