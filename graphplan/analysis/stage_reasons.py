"""Why a stage is where it is, in a few words for each other device."""

from __future__ import annotations

from collections.abc import Mapping

from graphplan.analysis.plan_problem import as_if_first
from graphplan.analysis.relocation import EPSILON, Alternative, Mover, only_read_by
from graphplan.devices.topology import DeviceKey
from graphplan.ir.plan_data import PlanData
from graphplan.message_text import size_text
from graphplan.report.data_flows import run_seconds
from graphplan.report.text import device_text, operation_text, time_text

_MOST = 12  # stages: those that take most time
_EFFORT = 40_000  # operations, over all placements that are evaluated: about a second


def stage_reasons(plan: PlanData) -> dict[int, dict[DeviceKey, str]]:
    """Stage -> other device -> what it would cost to run it there, everything else unchanged.

    Of many stages or operations, the stages that take most time; none for what hooks run.
    """
    if plan.method == "hooks":
        return {}
    plan = as_if_first(plan)
    seconds = run_seconds(plan.timeline)
    longest = sorted(plan.stages, key=lambda stage: -sum(seconds[name] for name in stage.operations))
    computing = [spec.key for spec in plan.topology.computing]
    each = len(plan.graph.operations) * max(1, len(computing) - 1)
    found: dict[int, dict[DeviceKey, str]] = {}
    for stage in longest[: min(_MOST, _EFFORT // max(1, each))]:
        owned = only_read_by(plan.graph, stage.operations)
        mover = Mover(plan, f"stage {stage.index}", "stage", owned, stage.operations)
        others = (key for key in computing if key != stage.device)
        found[stage.index] = {key: _said(plan, mover.to(key)) for key in others}
    return found


def _said(plan: PlanData, other: Alternative) -> str:
    if other.along:
        return "would take other operations along, which share memory with these"
    said = [] if other.slower is None else [_slower(other.slower)]
    if other.missing_bytes:
        return "; ".join([*said, _lacks(plan, other.missing_bytes, other.operation)])
    return "; ".join(said) if other.possible else other.obstacle


def _slower(seconds: float) -> str:
    if abs(seconds) <= EPSILON:
        return "the same time"
    return f"{time_text(abs(seconds))} {'slower' if seconds > 0 else 'faster'}"


def _lacks(plan: PlanData, missing: Mapping[DeviceKey, int], operation: str | None) -> str:
    sizes = " and ".join(
        f"{size_text(nbytes)} too little on {device_text(key)}" for key, nbytes in missing.items()
    )
    known = plan.graph.operations.get(operation or "")
    return sizes + (f", at {operation_text(known)}" if known is not None else "")
