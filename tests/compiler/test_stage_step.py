"""Stages of training steps with other microbatches in flight."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import graphplan
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.sizes.microbatches import targets_of
from graphplan.capture.tracing import capture
from graphplan.compiler.cluster.stage_compiler import withholding
from graphplan.compiler.cluster.stage_step import plan_step
from graphplan.compiler.training import trained_values
from graphplan.devices.topology import DeviceSpec, Topology
from graphplan.passes.placement.params import Limits

GB = 10**9
MACHINE = Topology(
    (DeviceSpec(0, "cuda", 10 * GB, 1.0, 1.0, 0.0), DeviceSpec("cpu", "cpu", 99 * GB, 1.0, 1.0, 0.0))
)


def planned(kept: Mapping[Any, int]) -> Any:
    return SimpleNamespace(
        topology=withholding(MACHINE, kept), peak_bytes={0: 6 * GB, "cpu": 0}, makespan=1.0
    )


def nothing_beside(kept: Mapping[Any, int]) -> Any:
    if kept:
        raise graphplan.InfeasibleError(
            "the nearest needs 14.0 GB on device 0",
            needed={0: 14 * GB},
            available={0: 10 * GB},
            device=0,
        )
    return planned(kept)


def test_error_names_device_needed_and_available_bytes() -> None:
    with (
        patch("graphplan.compiler.cluster.stage_step.kept_bytes", lambda *_: {0: 8 * GB, "cpu": GB}),
        pytest.raises(
            graphplan.InfeasibleError, match=r"3 other microbatches.* on device 0: the nearest"
        ) as found,
    ):
        plan_step(nothing_beside, 3, frozenset(), Limits())
    error = found.value
    assert (error.device, error.needed[0], error.available[0]) == (0, 14 * GB, 10 * GB)


def test_error_names_bytes_if_every_plan_saves_too_much() -> None:
    kept = iter(range(8, 99))
    with (
        patch("graphplan.compiler.cluster.stage_step.kept_bytes", lambda *_: {0: next(kept) * GB}),
        pytest.raises(graphplan.InfeasibleError, match=r"device 0 needs .* and may hold") as found,
    ):
        plan_step(planned, 3, frozenset(), Limits())
    error = found.value
    assert (error.device, error.needed[0], error.available[0]) == (0, 19 * GB, 10 * GB)


@pytest.mark.parametrize(("limits", "tries"), [(Limits(), 6), (Limits.within(0), 2)])
def test_slow_feasible_step_is_accepted_after_the_deadline(limits: Limits, tries: int) -> None:
    tried: list[Mapping[Any, int]] = []

    def slower_beside(kept: Mapping[Any, int]) -> Any:
        tried.append(kept)
        plan = planned(kept)
        plan.makespan += bool(kept)
        return plan

    with patch("graphplan.compiler.cluster.stage_step.kept_bytes", lambda *_: {0: GB}):
        assert plan_step(slower_beside, 3, frozenset(), limits).withheld == {0: GB}
    assert len(tried) == tries


class Writes(nn.Module):
    """Gradients pass memory that is written to, and end at a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, y = torch.zeros(3, 4), self.linear(x)
        made[:, :2] = y
        return torch.tanh(made * 3) + y.argmax(1, keepdim=True).float().cos()


def test_trained_values_include_writes_and_exclude_integers() -> None:
    model_copy = ModelCopy(Writes())
    found = capture(model_copy, model_copy.bind((torch.ones(3, 2),), {}), keep_grad=True)
    named = trained_values(found, frozenset({"linear.weight", "linear.bias"}))
    assert {"linear", "mul", "tanh"} <= named
    assert not named & {"argmax", "cos"}


def test_target_rows_are_a_multiple_of_the_batch() -> None:
    parts = targets_of({"labels": torch.arange(8), "flat": torch.arange(24)}, 2, 8)
    assert [len(part["flat"]) for part in parts] == [12, 12]
    for rows in (4, 0, 9):
        with pytest.raises(graphplan.InputError, match="give it 8 rows"):
            targets_of(torch.zeros(rows, 1), 2, 8)
