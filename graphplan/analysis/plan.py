"""The plan as users hold it: the data, and what can be asked of it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Self

from graphplan.analysis.bottleneck import find_bottleneck
from graphplan.analysis.explanation import Explanation, explain
from graphplan.analysis.plan_problem import constrained_problem, plain_problem
from graphplan.analysis.sensitivity import Bottleneck
from graphplan.ir.plan_data import PlanData
from graphplan.ir.plan_json import read_plan, write_plan
from graphplan.passes.placement.problem import Problem
from graphplan.report.dot import to_dot
from graphplan.report.html_page import to_html
from graphplan.report.model_explorer import save_model_explorer
from graphplan.report.notebook import to_notebook
from graphplan.report.perfetto import to_trace
from graphplan.report.svg import to_svg
from graphplan.report.text import count_text, summary_text

__all__ = ["Plan"]


class Plan(PlanData):
    """A placed model. Sizes are bytes, times seconds, devices the caller's keys of ``max_memory``.

    What it holds is in :class:`~graphplan.ir.plan_data.PlanData`; the methods here ask other rooms about it.
    """

    @property
    def plain_problem(self) -> Problem:
        """The graph, the devices and what earlier plans have settled, without the caller's rules."""
        return plain_problem(self)

    @cached_property
    def problem(self) -> Problem:
        """What was solved: :attr:`plain_problem` with the caller's rules."""
        return constrained_problem(self)

    def explain(self, name: str) -> Explanation:
        """Why a module, operation or weight is where it is: ``print(plan.explain("model.layers.3"))``.

        What it costs there, what it would cost on each other device with all else where it is, as the
        evaluator judges it, and what stops it.

        Raises:
            PlanError: no such name; the error says which are close.
        """
        return explain(self, name)

    def bottleneck(self, *, progress: bool = True) -> Bottleneck:
        """Which budget's increase would save most time, how much of it is needed, and what is saved.

        Plans again with each device's budget grown, each link and each device twice as fast. All of these
        are found by local search from this plan, so that others than the answer may help more than is said.

        Args:
            progress: whether to show a bar when it takes over a second.
        """
        return find_bottleneck(self, progress=progress)

    def summary(self) -> str:
        """A table: devices with budgets and peaks, stages, what moves, and how good the plan is."""
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
        """The plan as JSON text; :meth:`from_json` reads it back."""
        return write_plan(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan.

        Raises:
            PlanError: the text is no plan, one of an unknown version, or one that does not hold.
        """
        return read_plan(cls, text)

    def save_json(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def save_dot(self, path: str | Path) -> None:
        """Write the plan for graphviz: a cluster per device and stage, an edge per value that passes.

        Where there are more than 400 operations, a node is what a stage runs of a module: graphviz would
        take minutes otherwise.
        """
        Path(path).write_text(to_dot(self), encoding="utf-8")

    def save_html(self, path: str | Path, *, title: str = "") -> None:
        """Write the plan as one HTML file that shows it and needs nothing else.

        Args:
            path: of the file.
            title: shown above the plan: the model's name, say.
        """
        Path(path).write_text(to_html(self, title), encoding="utf-8")

    def save_svg(self, path: str | Path, *, title: str = "Plan") -> None:
        """Write the plan as a picture: stages over time, transfers between them, memory below."""
        Path(path).write_text(to_svg(self, title), encoding="utf-8")

    def save_trace(self, path: str | Path) -> None:
        """Write the modelled timeline for Perfetto or ``chrome://tracing``."""
        Path(path).write_text(to_trace(self), encoding="utf-8")

    def save_model_explorer(self, path: str | Path, *, title: str = "Plan") -> None:
        """Write the plan for Model Explorer, and its colours beside: ``plan.device.json`` and others."""
        save_model_explorer(self, Path(path), title)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return to_notebook(self)
