"""The plan of several machines as users see it."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from graphplan.analysis.plan import Plan
from graphplan.ir.cluster.cluster_plan_data import ClusterPlanData
from graphplan.report.cluster.cluster_page import to_cluster_html
from graphplan.report.cluster.cluster_perfetto import to_cluster_trace
from graphplan.report.cluster.cluster_svg import to_cluster_svg
from graphplan.report.cluster.cluster_text import cluster_summary
from graphplan.versioned_json import JsonFile
from graphplan.whole_files import write_whole


class ClusterPlan(ClusterPlanData[Plan], JsonFile):
    """A model placed over several machines. Sizes are bytes, times seconds.

    Attributes are those of :class:`~graphplan.ir.cluster.cluster_plan_data.ClusterPlanData`. The plan of one
    machine is ``plan.stages[i].plan``, a :class:`graphplan.Plan`.
    """

    def summary(self) -> str:
        """Return a table: machines with their stages, peaks, and bytes over the network."""
        return cluster_summary(self)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return (
            f"ClusterPlan({len(self.stages)} stages on {self.machines} machines, "
            f"{self.network_bytes} bytes over the network per microbatch)"
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan.

        Raises:
            PlanError: the text is not such a plan, is of an unknown version, or its checks fail.
        """
        return cls._read(Plan, text)

    def save_html(self, path: str | Path, *, title: str = "") -> None:
        """Write a page: figures, the picture of :meth:`save_svg`, a table of the machines."""
        write_whole(path, to_cluster_html(self, title))

    def save_trace(self, path: str | Path) -> None:
        """Write the estimated batch for Perfetto or ``chrome://tracing``: lanes for each machine."""
        write_whole(path, to_cluster_trace(self))

    def save_svg(self, path: str | Path, *, title: str = "Plan") -> None:
        """Write the estimated batch as a picture: a lane for each machine, its microbatches and waits."""
        write_whole(path, to_cluster_svg(self, title))

    def _repr_html_(self) -> str:
        """Return the display of a notebook: the picture of :meth:`save_svg`."""
        return to_cluster_svg(self)
