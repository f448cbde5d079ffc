"""Memory of an optimizer step, on devices where it may update all parameters at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import graphplan
from graphplan.passes.training.optimizer_memory import optimizer_memory

SIZE = 256 * 256 * 4


class Loops(torch.optim.Optimizer):
    """As many of one's own: no ``foreach``, and three tensors for each parameter at once."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                twice = parameter.grad * 2
                parameter.sub_(twice * twice + twice)


@pytest.mark.parametrize(
    ("optimizer", "at_once"),
    [
        (torch.optim.AdamW, SIZE),
        (torch.optim.Adadelta, 2 * SIZE),
        (partial(torch.optim.AdamW, foreach=False), 0),
        (partial(torch.optim.AdamW, lr=torch.tensor(1e-3), foreach=False), 0),
        (Loops, 0),
    ],
)
def test_only_foreach_optimizers_have_together_bytes(optimizer: Any, at_once: int) -> None:
    found = optimizer_memory({"w": torch.empty(256, 256)}, optimizer, None)["w"]
    assert found.together == at_once
    assert found.step > at_once


def test_optimizer_loop_needs_workspace_of_largest_parameter() -> None:
    model, x = nn.Linear(256, 256, bias=False), torch.randn(1, 256)
    plan = graphplan.plan(model, {0: "1GiB"}, (x,), train=True, optimizer=Loops)
    assert plan.topology[0].type == "cuda"
    step = optimizer_memory({"w": model.weight}, Loops, None)["w"].step
    assert 2 * SIZE + step <= plan.peak_bytes[0] < 2 * SIZE + step + 16_384


@pytest.mark.parametrize(
    ("optimizer", "accesses"),
    [
        (torch.optim.SGD, 3),  # reads a parameter and its gradient, writes the parameter
        (torch.optim.AdamW, 21),
        (partial(torch.optim.AdamW, fused=True), 7),
    ],
)
def test_optimizer_step_traffic_is_measured(optimizer: Any, accesses: int) -> None:
    found = optimizer_memory({"w": torch.empty(256, 256)}, optimizer, None)["w"]
    assert SIZE * accesses <= found.traffic <= SIZE * accesses + 64


def test_optimizer_seconds_depend_on_device_of_each_parameter() -> None:
    model, x = (
        nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)),
        torch.randn(1, 256),
    )
    options: dict[str, Any] = {"train": True, "optimizer": torch.optim.SGD}
    speeds = {0: graphplan.Speed(1e12, 1e9, 0.0), "cpu": graphplan.Speed(1e12, 1e7, 0.0)}
    plans = [
        graphplan.plan(model, {0: "1GiB", "cpu": "1GiB"}, (x,), devices=speeds, pin=pin, **options)
        for pin in ({}, {"1": "cpu"})
    ]
    assert [plan.optimizer_seconds for plan in plans] == [2 * 3 * SIZE / 1e9, 3 * SIZE / 1e7]
    assert "optimizer" in str(plans[0])
    plain = graphplan.plan(model, {0: "1GiB"}, (x,))
    assert not plain.optimizer_seconds
    assert "optimizer" not in str(plain)
