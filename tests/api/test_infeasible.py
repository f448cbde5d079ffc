"""Errors of models that do not fit name a sufficient ``max_memory=``, ready to paste."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

import pytest
import torch
from builders import bytes_of
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


class Buffered(nn.Module):
    """Has weights that stay on no disk."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(40, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mixed", torch.eye(32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x)) @ self.mixed
        return self.head(x)


IDS = torch.arange(10).view(2, 5)
CASES: list[tuple[Any, dict[Any, int], dict[str, Any]]] = [
    (stack, {0: 20000, 1: 20000}, {"args": (X,)}),
    (stack, {0: 1000, "cpu": 1000}, {"args": (X,)}),
    (stack, {0: 1000, "cpu": 1000, "disk": 1000}, {"args": (X,)}),
    (stack, {0: 60000, 1: 60000}, {"calls": [((X,), {}), ((WIDE,), {})]}),
    (Deciding, {0: 2000, 1: 2000}, {"args": (X,)}),
    (Deciding, {0: 2000, "cpu": 2000}, {"args": (X,)}),
]


def test_budgets_with_disk_exclude_unused_buffers() -> None:
    """Regression: the CPU was to hold pinned buffers for an accelerator that streamed nothing."""
    with pytest.raises(graphplan.InfeasibleError) as caught:
        graphplan.plan(stack(), {0: 0, "cpu": 1024, "disk": 1 << 20}, (X,))
    assert caught.value.needed["cpu"] < 10_000


@pytest.mark.parametrize(("make", "budgets", "call"), CASES)
def test_printed_budgets_suffice(make: Any, budgets: dict[Any, int], call: dict[str, Any]) -> None:
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


HELPED: list[tuple[dict[Any, int], dict[str, Any]]] = [
    ({0: 40000}, {}),
    ({0: 20000, 1: 20000}, {}),
    ({0: 40000}, {"cpu_compute": False}),
    ({0: 16000}, {"cpu_compute": False}),  # in slices
    ({0: 40000}, {"reserve": 2000}),
    ({0: 40000}, {"offload": False}),
    ({0: 40000, "cpu": 1 << 20}, {"offload": False}),
    ({0: 40000}, {"train": True, "optimizer": torch.optim.SGD}),
    ({0: 10000, "disk": 1 << 40}, {}),
]


@pytest.mark.parametrize(("budgets", "options"), HELPED)
def test_error_names_sufficient_cpu_memory(budgets: dict[Any, int], options: dict[str, Any]) -> None:
    with graphplan.simulate({0: 1 << 30, 1: 1 << 30, "cpu": 1 << 30}):
        with pytest.raises(graphplan.InfeasibleError, match="So do these, with weights in CPU") as caught:
            graphplan.plan(stack(), budgets, (X,), **options)
        printed = ast.literal_eval(str(caught.value).rpartition("max_memory=")[2].removesuffix(WITHOUT))
        assert str(caught.value).endswith(WITHOUT) == ("offload" in options)
        assert printed == {**budgets, "cpu": printed["cpu"]}
        assert printed["cpu"] < 1 << 30
        assert graphplan.plan(stack(), printed, (X,), **{**options, "offload": True}).placement


WITHOUT = ", without offload=False"
PINNED = {"pin": {str(n): 0 for n in range(6)}}
UNHELPED: list[tuple[dict[Any, int], dict[str, Any]]] = [
    ({0: 40000}, PINNED),
    ({0: 40000, "cpu": 10000}, {}),
    ({0: 40000, "cpu": 10000}, {"offload": False}),
    ({0: 1100}, {"cpu_compute": False}),
]


@pytest.mark.parametrize(("budgets", "options"), UNHELPED)
def test_cpu_memory_that_does_not_help_is_not_named(budgets: dict[Any, int], options: dict[str, Any]) -> None:
    with graphplan.simulate({0: 1 << 30, 1: 1 << 30, "cpu": 1 << 30}):
        with pytest.raises(graphplan.InfeasibleError) as caught:
            graphplan.plan(stack(), budgets, (X,), **options)
        assert "So do these" not in str(caught.value)


def test_budget_probably_in_another_unit_warns() -> None:
    said = r"max_memory\[0\] is 24 bytes: write '24GiB'"
    with (
        pytest.warns(graphplan.GraphplanWarning, match=said),
        pytest.raises(graphplan.InfeasibleError, match=said),
    ):
        graphplan.plan(stack(), {0: 24}, (X,))
    with pytest.warns(graphplan.GraphplanWarning, match=said):  # the CPU holds the model, and computes
        graphplan.plan(stack(), {0: 24, "cpu": "1GiB"}, (X,))


TIGHT: list[Any] = [
    (stack, {0: 57344, "cpu": 57344}, X),
    pytest.param(Buffered, {0: 10240, "cpu": 4096, "disk": 1 << 20}, IDS, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.full_search
@pytest.mark.parametrize(("make", "budgets", "x"), TIGHT)
def test_time_limit_still_finds_a_placement(make: Any, budgets: dict[Any, int], x: Any) -> None:
    with graphplan.simulate({0: "1MiB"}):
        assert graphplan.plan(make(), budgets, (x,), time_limit=1e-3).placement


@pytest.mark.full_search
@pytest.mark.slow
def test_named_budgets_with_a_disk_suffice() -> None:
    budgets = {0: 10240, "cpu": 6144, "disk": 1 << 20}
    with graphplan.simulate({0: "1MiB"}):
        with pytest.raises(graphplan.InfeasibleError, match="These budgets suffice") as caught:
            graphplan.plan(Buffered(), budgets, (IDS,))
        assert graphplan.plan(Buffered(), caught.value.needed, (IDS,)).placement


def test_time_limited_search_error_has_no_context() -> None:
    """A chained error would keep the caller's objects alive, such as weights to move."""
    with pytest.raises(graphplan.InfeasibleError) as caught:
        graphplan.plan(stack(), {0: "20KiB"}, (X,), offload=False, time_limit=5.0)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "machines",
    [
        [{0: "50KiB"}] * 2,
        [{0: "20KiB"}] * 3,
        pytest.param([{0: 1100}, {0: "60KiB", "cpu": 1100}], marks=pytest.mark.slow),
    ],
)
def test_named_budgets_of_machines_suffice(machines: Any) -> None:
    with pytest.raises(graphplan.InfeasibleError) as caught:
        graphplan.plan(stack(), machines=machines, args=(WIDE,))
    named = re.search(r"These budgets suffice: machines=(\[.*\])", str(caught.value))
    assert named is not None
    budgets = ast.literal_eval(named[1])
    graphplan.plan(stack(), machines=budgets, args=(WIDE,)).verify()
    # no more than is of use: all were grown by the same factor, 10 MB next to 1100 bytes
    assert max(nbytes for one in budgets for nbytes in one.values()) < 4 * bytes_of(stack())


@pytest.mark.slow
@pytest.mark.full_search
def test_named_budgets_are_near_the_smallest() -> None:
    """Budgets grow in steps and are then bisected; the effort must suffice for both."""
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(60))), torch.ones(600, 64)
    size = bytes_of(model)
    with pytest.raises(graphplan.InfeasibleError) as caught:
        graphplan.plan(model, {0: int(0.28 * size), **dict.fromkeys((1, 2, 3), int(0.14 * size))}, (x,))
    with pytest.raises(graphplan.InfeasibleError):
        graphplan.plan(model, {key: int(0.9 * nbytes) for key, nbytes in caught.value.needed.items()}, (x,))
