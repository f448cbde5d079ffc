"""Warnings are of our own class, and point at the line that called graphplan."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import graphplan
from graphplan.warnings import unwarned

BUDGETS = {0: "1MiB", "cpu": "1GiB", "disk": "1GiB"}


class Leaves(nn.Linear):
    """Leaves a loss in an object."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.found = SimpleNamespace(loss=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found.loss = super().forward(x).square().mean()
        return x + 1


def here() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_warning_of_planning_points_at_the_caller() -> None:
    calls = [{"input": torch.ones(2, 8)}, {"input": torch.ones(3, 8)}]
    with pytest.warns(graphplan.GraphplanWarning, match="no weight is left on 'disk'") as caught:
        line, _ = here(), graphplan.plan(nn.Linear(8, 8), BUDGETS, calls=calls)
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line)]


def test_a_warning_of_a_first_call_passes_over_torch() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        with pytest.warns(graphplan.GraphplanWarning, match="first call"):
            placed = graphplan.partition(Leaves(), machine.max_memory, grad=True)
        with pytest.warns(graphplan.GraphplanWarning, match="loss with a gradient") as caught:
            line, _ = here(), placed(torch.ones(2))
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, line)]


class NeverReplaced(list[Any]):
    """What another thread adds while the whole is replaced is lost."""

    def __setitem__(self, *_args: Any) -> None:
        raise AssertionError("replaced as a whole")


def test_filters_of_other_threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "filters", NeverReplaced(warnings.filters))
    before = list(warnings.filters)
    with unwarned("only this"):
        assert len(warnings.filters) == len(before) + 1
        warnings.warn("only this", stacklevel=1)
        with pytest.raises(UserWarning, match="and this"):
            warnings.warn("and this", stacklevel=1)
    assert warnings.filters == before
    with unwarned():
        warnings.filters.clear()  # type: ignore[attr-defined]  # as a user may


class Deciding(nn.Module):
    def forward(self, x: torch.Tensor, by_data: bool = True) -> torch.Tensor:
        return x + 1 if by_data and float(x.sum()) > 0 else x - 1


def test_warnings_of_modular_runs_point_at_the_caller() -> None:
    x = torch.ones(2)
    with graphplan.simulate({0: "1MiB"}) as machine:
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module") as caught:
            line, _ = here(), graphplan.partition(Deciding(), machine.max_memory, (x,))
        assert [(one.filename, one.lineno) for one in caught] == [(__file__, line)]
        placed = graphplan.partition(Deciding(), machine.max_memory, (x, False))
        with pytest.warns(graphplan.GraphplanWarning, match="module by module") as caught:
            line, _ = here(), placed(x)
        assert [(one.filename, one.lineno) for one in caught] == [(__file__, line)]
