"""The plan of several machines as text."""

from __future__ import annotations

from typing import Any

from graphplan.devices.topology import Link
from graphplan.ir.cluster_plan_data import ClusterPlanData, MachineStage
from graphplan.report.text import count_text, size_text, table_lines, time_text

HEADER = ("machine", "operations", "weights", "peaks", "seconds", "busy", "sends")
"""Of :func:`machine_rows`."""


def cluster_summary(plan: ClusterPlanData[Any]) -> str:
    """The plan as a table that a person can read."""
    used = len(plan.stages)
    idle = f", {plan.machines - used} of {plan.machines} not used" if used < plan.machines else ""
    parts = count_text(plan.microbatches, "microbatch", "microbatches")
    lines = [
        f"{count_text(used, 'machine')}{idle}, {parts}, schedule {plan.schedule}, for {plan.objective}",
        "",
        *table_lines(HEADER, machine_rows(plan)),
        "",
        f"network: {size_text(plan.network_bytes)} per microbatch, at {network_text(plan.network)}",
        f"time: {time_text(plan.makespan)} estimated for a batch, {time_text(plan.latency)} for one "
        f"microbatch; machines wait {100 * plan.bubble:.0f} % of it",
        f"lower bound {time_text(plan.lower_bound)}, gap {100 * plan.gap:.1f} % ({plan.proof})",
    ]
    return "\n".join(lines)


def network_text(network: Link) -> str:
    """What a network can do."""
    return f"{size_text(int(network.bandwidth))}/s and {time_text(network.latency)}"


def machine_rows(plan: ClusterPlanData[Any]) -> list[tuple[str, ...]]:
    """A row for each machine that is used."""
    return [_row(plan, index, stage) for index, stage in enumerate(plan.stages)]


def _row(plan: ClusterPlanData[Any], index: int, stage: MachineStage[Any]) -> tuple[str, ...]:
    peaks = plan.peak_bytes[stage.machine]
    return (
        str(stage.machine),
        f"{stage.start}-{stage.end - 1}",
        size_text(stage.plan.graph.weight_bytes),
        ", ".join(f"{key}: {size_text(nbytes)}" for key, nbytes in peaks.items() if nbytes),
        time_text(stage.plan.makespan),
        f"{100 * plan.loads[index] / max(plan.loads):.0f} %",
        size_text(sum(one.nbytes for one in stage.sends)) if stage.sends else "",
    )
