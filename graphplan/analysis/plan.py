"""The plan as users see it: the data, with methods that explain and export it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from graphplan.analysis.bottleneck import advice, find_bottleneck
from graphplan.analysis.explanation import Explanation, explain, stage_reasons
from graphplan.analysis.sensitivity import Bottleneck
from graphplan.ir.plan_data import PlanData
from graphplan.ir.plan_json import PLAN_FORMAT, decode_plan, encode_plan
from graphplan.ir.remarks import Remarks
from graphplan.report.dot import to_dot
from graphplan.report.html_page import to_html
from graphplan.report.model_explorer import save_model_explorer
from graphplan.report.perfetto import to_trace
from graphplan.report.svg import to_svg
from graphplan.report.text import count_text, summary_text
from graphplan.versioned_json import JsonFile
from graphplan.whole_files import write_whole


class Plan(PlanData, JsonFile):
    """A placed model. Sizes are bytes, times seconds, devices the caller's keys of ``max_memory``.

    Attributes are those of :class:`~graphplan.ir.plan_data.PlanData`; the methods here explain and export.
    """

    def explain(self, name: str) -> Explanation:
        """Return why a module, operation or weight is where it is: ``print(plan.explain("model.layers.3"))``.

        Gives its cost there, the estimated time of the forward pass with it on each other device and
        everything else unchanged, and the obstacle on that device.

        Raises:
            PlanError: nothing has that name; the error suggests similar ones.
        """
        return explain(self, name)

    def bottleneck(self, *, progress: bool = True) -> Bottleneck:
        """Return which budget, link or device to improve to save most time, by how much, and the time saved.

        Plans again with each device's budget increased, and each link and each device twice as fast. All
        improvements but the answer are estimated by local search from this plan: they may save more.

        Args:
            progress: show a progress bar if this takes over a second.
        """
        return find_bottleneck(self, progress=progress)

    def summary(self) -> str:
        """Return a table: devices with budgets and peaks, stages, transfers, estimated time and gap."""
        return summary_text(self)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        devices = {stage.device for stage in self.stages}
        return (
            f"Plan({count_text(len(self.stages), 'stage')} on {count_text(len(devices), 'device')}, "
            f"{self.transfer_bytes} bytes transferred, {self.streamed_bytes} bytes streamed)"
        )

    def to_json(self) -> str:
        """Return the plan as JSON text; :meth:`from_json` reads it back."""
        return json.dumps(encode_plan(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan.

        Raises:
            PlanError: the text is not a plan, is of an unknown version, or its checks fail.
        """
        return decode_plan(cls, PLAN_FORMAT.parse(text))

    def save_dot(self, path: str | Path) -> None:
        """Write the plan for Graphviz: a cluster per device and stage, an edge per value.

        Above 400 operations a node is a module's share of a stage, about a hundred in all, because
        Graphviz takes minutes for more nodes.
        """
        write_whole(path, to_dot(self))

    def remarks(self, bottleneck: Bottleneck | None = None) -> Remarks:
        """Return in words the changes that would save time, and the cost of each stage on other devices.

        Args:
            bottleneck: result of :meth:`bottleneck`; by default a quick look takes its place.
        """
        headline = advice(self) if bottleneck is None else bottleneck.headline
        return Remarks(headline, stage_reasons(self))

    def save_html(
        self,
        path: str | Path,
        *,
        title: str = "",
        bottleneck: Bottleneck | None = None,
        other: PlanData | None = None,
    ) -> None:
        """Write the plan as one self-contained interactive HTML page.

        Args:
            path: path of the file.
            title: heading of the page, such as the model's name.
            bottleneck: result of :meth:`bottleneck`, for what would help; by default a quick look takes its
                place.
            other: another plan of the same model and example inputs, such as one with other budgets or
                devices: the page shows the differences, and time and memory of both.

        Raises:
            PlanError: the other plan is of another graph; the error names the difference.
        """
        write_whole(path, to_html(self, title, remarks=self.remarks(bottleneck), other=other))

    def save_svg(self, path: str | Path, *, title: str = "Plan") -> None:
        """Write the plan as a picture: stages over time, transfers between them, memory below."""
        write_whole(path, to_svg(self, title))

    def save_trace(self, path: str | Path) -> None:
        """Write the estimated timeline for Perfetto or ``chrome://tracing``."""
        write_whole(path, to_trace(self))

    def save_model_explorer(self, path: str | Path, *, title: str = "Plan") -> None:
        """Write the plan for Model Explorer, with node data in files such as ``plan.device.json``."""
        save_model_explorer(self, Path(path), title)

    def _repr_html_(self) -> str:
        """Return the display of a notebook: the picture of :meth:`save_svg`."""
        return to_svg(self)
