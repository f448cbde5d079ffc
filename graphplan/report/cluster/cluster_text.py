"""The plan of several machines as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphplan.devices.topology import Link
from graphplan.ir.cluster.cluster_plan_data import ClusterPlanData
from graphplan.message_text import size_text
from graphplan.report.text import count_text, table_lines, time_text

HEADER = ("machine", "operations", "weights", "peaks", "seconds", "computes", "network", "waits", "sends")
"""Column titles of :func:`machine_rows`."""


def cluster_summary(plan: ClusterPlanData[Any]) -> str:
    """Return the plan as a readable table."""
    used = len(plan.used)
    idle = f", {plan.machines - used} of {plan.machines} not used" if used < plan.machines else ""
    parts = count_text(plan.microbatches, "microbatch", "microbatches")
    lines = [
        f"{count_text(used, 'machine')}{idle}, {parts}, {schedule_text(plan)}, for {plan.objective}",
        "",
        *table_lines(HEADER, machine_rows(plan)),
        "",
        f"network: {size_text(plan.network_bytes)} per microbatch, at {network_text(plan.network)}",
        f"time: {time_text(plan.makespan)} estimated for a batch, {time_text(plan.latency)} for one "
        f"microbatch; {shares_text(plan)}",
        f"lower bound of {bounded_text(plan)}: {time_text(plan.lower_bound)}, gap {100 * plan.gap:.1f} % "
        f"({plan.proof})",
    ]
    return "\n".join(lines)


def bounded_text(plan: ClusterPlanData[Any]) -> str:
    """Return the placements for which the lower bound holds."""
    return "one microbatch" if plan.objective == "latency" else "a batch"


def shares_text(plan: ClusterPlanData[Any]) -> str:
    """Return the average shares of a batch in which machines compute, transfer and wait."""
    means = [sum(column) / len(plan.used) for column in zip(*plan.shares.values(), strict=True)]
    computes, network, waits = (f"{100 * mean:.0f} %" for mean in means)
    return f"machines compute {computes} of a batch, send and receive {network}, wait {waits}"


def network_text(network: Link) -> str:
    """Return the bandwidth and latency of a network."""
    return f"{network.bandwidth / 1e9:.3g} GB/s and {time_text(network.latency)}"


def schedule_text(plan: ClusterPlanData[Any]) -> str:
    """Return the schedule, with the number of stages of each machine if there are several."""
    each = f" of {plan.flight.stages_per_machine} stages each" if plan.schedule == "interleaved" else ""
    return f"schedule {plan.schedule}{each}"


def machine_rows(plan: ClusterPlanData[Any]) -> list[tuple[str, ...]]:
    """Return a row for each machine that is used."""
    return [_row(plan, machine, shares) for machine, shares in plan.shares.items()]


def _row(plan: ClusterPlanData[Any], machine: int, shares: Sequence[float]) -> tuple[str, ...]:
    stages, peaks = plan.stages_of(machine), plan.peak_bytes[machine]
    sent = sum(one.nbytes for stage in stages for one in stage.sends)
    return (
        str(machine),
        ", ".join(f"{stage.start}-{stage.end - 1}" for stage in stages),
        size_text(sum(stage.plan.graph.weight_bytes for stage in stages)),
        ", ".join(f"{key}: {size_text(nbytes)}" for key, nbytes in peaks.items() if nbytes),
        time_text(sum(stage.plan.makespan for stage in stages)),
        *(f"{100 * share:.0f} %" for share in shares),
        size_text(sent) if sent else "",
    )
