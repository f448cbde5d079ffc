"""What optimizers take for a step, on devices where they may change all parameters at once."""

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
def test_only_what_changes_all_at_once_takes_a_part_for_each(optimizer: Any, at_once: int) -> None:
    found = optimizer_memory({"w": torch.empty(256, 256)}, optimizer, None)["w"]
    assert found.together == at_once
    assert found.step > at_once


def test_a_loop_takes_what_its_largest_parameter_takes_on_a_gpu_too() -> None:
    model, x = nn.Linear(256, 256, bias=False), torch.randn(1, 256)
    plan = graphplan.plan(model, {0: "1GiB"}, (x,), train=True, optimizer=Loops)
    assert plan.topology[0].type == "cuda"
    step = optimizer_memory({"w": model.weight}, Loops, None)["w"].step
    assert 2 * SIZE + step <= plan.peak_bytes[0] < 2 * SIZE + step + 16_384
