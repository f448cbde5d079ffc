"""The largest batch that fits, above or below the example's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import graphplan


def widening() -> nn.Module:
    """A row takes 16 bytes of input, and 4 KiB and 16 bytes of results: two are there at once."""
    return nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 4)).eval()


def largest(given: int, budget: int, **options: Any) -> int:
    with torch.no_grad():
        return graphplan.largest_batch(
            widening(), {"cpu": budget}, (torch.ones(given, 4),), time_limit=0.1, **options
        )


@pytest.mark.parametrize("given", [6, 40])
def test_result_does_not_depend_on_the_example_batch(given: int) -> None:
    weights = sum(p.numel() * p.element_size() for p in widening().parameters())
    found = largest(given, weights + 24 * 4200)
    assert 20 <= found < 26
    graphplan.plan(widening(), {"cpu": weights + 24 * 4200}, (torch.ones(found, 4),))
    with pytest.raises(graphplan.InfeasibleError):
        graphplan.plan(widening(), {"cpu": weights + 24 * 4200}, (torch.ones(found + 1, 4),))


@pytest.mark.parametrize("given", [1, 40])
def test_result_is_at_most_the_limit(given: int) -> None:
    assert largest(given, 1 << 30, limit=7) == 7
    assert largest(given, 1 << 30, max_batch=7) == 7


@pytest.mark.parametrize("given", [1, 6])
def test_infeasible_batch_of_one_raises_with_shortage(given: int) -> None:
    with pytest.raises(graphplan.InfeasibleError, match="cpu"):
        largest(given, 20_000)


def test_inputs_without_a_batch_raise() -> None:
    with pytest.raises(graphplan.InputError, match="first tensor"):
        graphplan.largest_batch(widening(), {"cpu": 1 << 30})
    with pytest.raises(graphplan.InputError, match="args must be a tuple"):  # a tensor would be taken in rows
        graphplan.largest_batch(torch.nn.ReLU(), {"cpu": 1 << 30}, torch.ones(1, 4), limit=8)


@dataclass
class Sized:
    x: torch.Tensor


class OfSized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = widening()

    def forward(self, sized: Sized) -> torch.Tensor:
        return self.body(sized.x)


def test_tensors_in_dataclasses_are_resized() -> None:
    with torch.no_grad():
        found = graphplan.largest_batch(OfSized(), {"cpu": 140_000}, (Sized(torch.ones(1, 4)),), limit=64)
    assert 20 < found < 40


@pytest.mark.slow
def test_integer_inputs_keep_values_for_branches() -> None:
    class ByLengths(nn.Module):
        """Branches by whether all rows are whole."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * (1 if (lengths == x.shape[1]).all() else 2)

    inputs = torch.randn(2, 8, 16), torch.tensor([3, 8])
    assert graphplan.largest_batch(ByLengths(), {0: "1MB"}, inputs, limit=8) == 8
