"""Stages of training steps with other microbatches in flight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphplan
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.sizes.microbatches import targets_of
from graphplan.capture.tracing import capture
from graphplan.compiler.training import trained_values


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
