"""The measured times of one batch over several machines: when each of them computed and waited."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphplan.ir.cluster.cluster_plan_data import ClusterPlanData
from graphplan.report.cluster.cluster_page import to_cluster_html
from graphplan.report.cluster.cluster_perfetto import Slot, to_cluster_trace
from graphplan.report.cluster.cluster_svg import to_cluster_svg
from graphplan.report.text import table_lines, time_text
from graphplan.runtime.distributed.agreement import gather_texts
from graphplan.whole_files import write_whole


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """The measured times of the forward pass of a batch, with the plan's estimate. Times are seconds.

    Attributes:
        plan: plan for all machines.
        slots: intervals of computing and waiting of each stage; time 0 is when all ranks were ready.
    """

    plan: ClusterPlanData[Any]
    slots: tuple[Slot, ...]

    @property
    def seconds(self) -> float:
        """Measured time of the batch, until the end of its last microbatch."""
        return max(slot.end for slot in self.slots)

    def busy(self, stage: int) -> float:
        """Return the measured seconds that a stage computed."""
        return sum(s.end - s.start for s in self.slots if s.stage == stage and s.kind == "stage")

    def summary(self) -> str:
        """Return a table of the measured and estimated seconds of each machine."""
        rows = [self._row(machine) for machine in self.plan.used]
        estimate = max(one.end for one in self.plan.forward_actions)
        estimated, measured = time_text(estimate), time_text(self.seconds)
        lines = table_lines(("machine", "compute", "measured", "waits"), rows)
        return "\n".join([f"one batch forward: {estimated} estimated, {measured} measured", "", *lines])

    def _row(self, machine: int) -> tuple[str, ...]:
        stages = [index for index, stage in enumerate(self.plan.stages) if stage.machine == machine]
        estimated = sum(self.plan.stage_seconds[stage].forward for stage in stages)
        busy = sum(map(self.busy, stages))
        return (
            str(machine),
            time_text(estimated * self.plan.microbatches),
            time_text(busy),
            time_text(self.seconds - busy),
        )

    def __str__(self) -> str:
        return self.summary()

    def save_html(self, path: str | Path, *, title: str = "") -> None:
        """Write the page of the plan, with the measured batch below the estimated one."""
        write_whole(path, to_cluster_html(self.plan, title, self.slots))

    def save_trace(self, path: str | Path) -> None:
        """Write both batches for Perfetto or ``chrome://tracing``: lanes for each machine."""
        write_whole(path, to_cluster_trace(self.plan, self.slots))

    def save_svg(self, path: str | Path, *, title: str = "Plan") -> None:
        """Write the measured batch as a picture."""
        write_whole(path, to_cluster_svg(self.plan, title, self.slots))


def merge_spans(
    plan: ClusterPlanData[Any], spans: Mapping[str, Sequence[tuple[float, float]]]
) -> ClusterProfile:
    """Gather the measured times of all ranks; every rank calls this.

    Args:
        plan: plan for all machines.
        spans: stage of this rank -> its start and end with each microbatch, in seconds since all were ready.
    """
    spans_by_rank = [json.loads(text) for text in gather_texts(json.dumps(spans), "the measured times")]
    slots = []
    for machine in plan.used:
        spans_of_machine = [
            (start, end, int(stage), microbatch)
            for stage, intervals in spans_by_rank[machine].items()
            for microbatch, (start, end) in enumerate(intervals)
        ]
        free = 0.0
        for start, end, stage, microbatch in sorted(spans_of_machine):
            slots += [
                Slot(stage, microbatch, "wait", start=free, end=start),
                Slot(stage, microbatch, "stage", start=start, end=end),
            ]
            free = end
    return ClusterProfile(plan, tuple(slots))
