"""What does not fit says which ``max_memory=`` would do, ready to paste."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import graphplan

X, WIDE = torch.ones(2, 64), torch.ones(200, 64)


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


class Deciding(nn.Module):
    """By its data, so that hooks run it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) if float(x.sum()) < 1e9 else x


CASES: list[tuple[Any, dict[Any, int], dict[str, Any]]] = [
    (stack, {0: 20000, 1: 20000}, {"args": (X,)}),
    (stack, {0: 1000, "cpu": 1000}, {"args": (X,)}),
    (stack, {0: 1000, "cpu": 1000, "disk": 1000}, {"args": (X,)}),
    (stack, {0: 60000, 1: 60000}, {"calls": [((X,), {}), ((WIDE,), {})]}),
    (Deciding, {0: 2000, 1: 2000}, {"args": (X,)}),
    (Deciding, {0: 2000, "cpu": 2000}, {"args": (X,)}),
]


@pytest.mark.parametrize(("make", "budgets", "call"), CASES)
def test_the_budgets_that_are_printed_do(make: Any, budgets: dict[Any, int], call: dict[str, Any]) -> None:
    with graphplan.simulate({0: 1 << 30, 1: 1 << 30, "cpu": 1 << 30}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        place = graphplan.partition if make is Deciding else graphplan.plan
        with pytest.raises(graphplan.InfeasibleError) as caught:
            place(make(), budgets, **call)
        found = re.search(r"max_memory=(\{.*?\})", str(caught.value))
        assert found is not None
        printed = ast.literal_eval(found[1])
        assert printed == caught.value.needed
        assert all(printed[key] >= nbytes for key, nbytes in budgets.items())
        place(make(), printed, **call)


def test_bytes_that_are_meant_as_another_unit() -> None:
    with pytest.raises(graphplan.InfeasibleError, match=r"max_memory\[0\] is 24 bytes: write '24GiB'"):
        graphplan.plan(stack(), {0: 24}, (X,))
