"""Saved activations of a training step: never slower than recomputing every block."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from shortcuts import short_search
from torch import nn
from training_steps import ROOMY, needed
from transformers import ResNetConfig, ResNetForImageClassification

import graphplan
from graphplan.compiler.activation_choice import Trial, _SavingsSearch, next_count

SEARCH = "graphplan.compiler.activation_choice._SavingsSearch"


class Block(nn.Module):
    """A residual block, of linear layers or of convolutions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gelu = inner, nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gelu(self.inner(self.gelu(x)))


def linear() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block(nn.Linear(64, 64)) for _ in range(4))), torch.randn(256, 64)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    blocks = (Block(nn.Conv2d(8, 8, 3, padding=1)) for _ in range(4))
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.Flatten(), nn.LazyLinear(4)), torch.randn(
        4, 3, 16, 16
    )


def attention() -> tuple[nn.Module, torch.Tensor]:
    layers = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
    return nn.Sequential(*layers), torch.randn(4, 32, 32)


@cache
def made_by(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> tuple[nn.Module, torch.Tensor, int]:
    """A model, an example, and the bytes that a step takes."""
    torch.manual_seed(0)
    model, example = make()
    model(example)  # lazy parameters
    with short_search():
        return model, example, needed(model, {"input": example}, optimizer=torch.optim.AdamW)


QUICK = {(linear, 1, True)}
CASES = itertools.product((linear, convolutions, attention), (1, 2), (False, True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "devices", "large"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES],
)
def test_no_step_is_slower_than_recomputing_every_block(make: Any, devices: int, large: bool) -> None:
    model, example, size = made_by(make)
    options: dict[str, Any] = {"kwargs": {"input": example}, "train": True, "optimizer": torch.optim.AdamW}
    trials, blocks = _SavingsSearch.trials, list[float]()

    def beside(search: _SavingsSearch) -> list[Trial]:
        other = _SavingsSearch(search.state)
        other._try(1, other.every_block()[0])
        blocks.append(other.tried[1].seconds)
        return trials(search)

    for share in (0.9, 0.7, 0.5):
        budgets = dict.fromkeys(range(devices), int(share * size / devices))
        with (
            graphplan.simulate({**budgets, "cpu": ROOMY}) as machine,
            short_search(),
            patch(f"{SEARCH}.large", large),
            patch(f"{SEARCH}.trials", beside),
        ):
            plan = graphplan.plan(model, machine.max_memory, **options)
        assert plan.makespan <= blocks[-1] * (1 + 1e-9)
    assert any(map(math.isfinite, blocks))


@pytest.mark.slow
def test_recomputing_every_block_is_tried_unless_provably_slower() -> None:
    model, example = linear()
    size = needed(model, {"input": example})
    tried: list[dict[int, Trial]] = []
    trials = _SavingsSearch.trials

    def kept(search: _SavingsSearch) -> list[Trial]:
        found = trials(search)
        savings, again = search.every_block()
        tried.append(search.tried)
        assert len(savings.fully) == 4
        assert (
            len(search._items()) in search.tried or sum(search.fastest.values()) + again >= found[0].seconds
        )
        return found

    with graphplan.simulate({0: int(0.6 * size), "cpu": ROOMY}) as machine, patch(f"{SEARCH}.trials", kept):
        graphplan.plan(model, machine.max_memory, kwargs={"input": example}, train=True)
    assert len(tried) == 1


@pytest.mark.slow
def test_two_slightly_short_devices_do_not_recompute_every_block() -> None:
    """Two devices lack more together than one twice as large, since layers are not cut."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(nn.Linear(8192, 8192)) for _ in range(12)))
        step: dict[str, Any] = {"kwargs": {"input": torch.zeros(1 << 15, 8192)}, "train": True}
    size = graphplan.plan(model, {0: "99GiB"}, **step).peak_bytes[0]
    plan = graphplan.plan(model, dict.fromkeys(range(2), size // 2), **step)
    again = [op.repeats.partition("_")[0] for op in plan.graph.operations.values() if op.repeats]
    assert "gelu" in again
    assert again.count("addmm") < 6


class Stem(nn.Module):
    """Saves far more than the layers that follow it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = torch.tanh(x)
        return x


@pytest.mark.slow
def test_other_modules_are_recomputed_if_layers_free_too_little() -> None:
    """Regression: weights were streamed, since no savings beyond the layers were tried."""
    with torch.device("meta"):
        layers = nn.ModuleDict({str(i): Block(nn.Linear(1024, 1024)) for i in range(4)})
        model = nn.Sequential(OrderedDict(stem=Stem(), **layers))
        step: dict[str, Any] = {
            "kwargs": {"input": torch.zeros(1 << 13, 1024, requires_grad=True)},
            "train": True,
        }
    size = graphplan.plan(model, {0: "99GiB"}, **step).peak_bytes[0]
    with short_search():
        plan = graphplan.plan(model, {0: int(0.55 * size), "cpu": "99GiB"}, **step)
    assert any(op.repeats for op in plan.graph.operations.values() if op.module_path == "stem")
    assert not plan.streams


@pytest.mark.slow
def test_slightly_short_fast_device_holds_a_recomputing_step() -> None:
    """The step would fit unchanged with a slow second device."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(nn.Linear(4096, 4096)) for _ in range(8)))
        step: dict[str, Any] = {"kwargs": {"input": torch.zeros(1 << 13, 4096)}, "train": True}
    devices: dict[str | int | torch.device, Any] = {0: "H100 SXM", 1: "A10"}
    alone = graphplan.plan(model, {0: "99GiB"}, devices={0: "H100 SXM"}, **step)
    budgets = {0: int(0.9 * alone.peak_bytes[0]), 1: "99GiB"}
    plan = graphplan.plan(model, budgets, devices=devices, **step)
    assert plan.peak_bytes[1] == 0
    assert plan.makespan < 1.1 * alone.makespan


@pytest.mark.parametrize(
    ("seconds", "guess", "most", "expected"),
    [
        ({0: 5.0}, 0, 0, 0),  # nothing to try
        ({0: 5.0}, 0, 1, 1),
        ({0: 5.0}, 3, 10, 3),
        ({0: 5.0}, 10, 10, 10),
        ({0: 5.0}, 0, 10, 4),
        ({0: math.inf, 10: 9.0}, 2, 10, 2),
        ({0: math.inf, 2: math.inf, 10: 9.0}, 1, 10, 6),  # the guess did not fit: towards what does not
        ({0: math.inf, 2: math.inf, 6: 7.0, 10: 9.0}, 1, 10, 4),
        ({0: math.inf, 5: math.inf, 6: 7.0, 10: 9.0}, 1, 10, 8),  # none is left on the more promising side
        ({0: math.inf, 5: math.inf, 6: 7.0, 7: 9.0}, 1, 7, 6),  # none is left
        ({0: math.inf, 10: math.inf}, 4, 10, 4),  # nothing fits
        ({0: 8.0, 4: 7.0, 10: 9.0}, 0, 10, 2),  # towards the faster side
        ({0: 9.0, 4: 7.0, 10: 8.0}, 0, 10, 7),
        ({0: 5.0, 10: 9.0}, 3, 2, 3),  # of a best count at the end there is one side
    ],
)
def test_next_count_is_next_to_the_best(
    seconds: dict[int, float], guess: int, most: int, expected: int
) -> None:
    assert next_count(seconds, guess, most) == expected


@pytest.mark.slow
def test_fewer_segments_are_offloaded_if_cpu_memory_is_short() -> None:
    """Not all fit there, but as many as the accelerator needs to free."""
    with torch.device("meta"):
        layers = (nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 512)) for _ in range(8))
        model, step = nn.Sequential(*layers), {"kwargs": {"input": torch.zeros(1 << 14, 512)}, "train": True}
    size = graphplan.plan(model, {0: "99GiB"}, **step).peak_bytes[0]
    with short_search():
        plan = graphplan.plan(model, {0: int(0.8 * size), "cpu": int(0.4 * size)}, recompute=False, **step)
    assert 0 < len(plan.offloaded_activations) < 8


@pytest.mark.slow
@pytest.mark.full_search
def test_cpu_memory_does_not_slow_a_two_device_step() -> None:
    """The quick search does not find this placement."""
    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(num_labels=10)).train()
        inputs = {"pixel_values": torch.zeros(32, 3, 224, 224), "labels": torch.zeros(32, dtype=torch.long)}
    step: dict[str, Any] = {"kwargs": inputs, "train": True, "optimizer": torch.optim.AdamW}
    size = graphplan.plan(model, {0: "400GiB"}, **step).peak_bytes[0]
    budgets: dict[str | int | torch.device, Any] = dict.fromkeys(range(2), int(0.385 * size))
    without = graphplan.plan(model, budgets, **step)
    plan = graphplan.plan(model, {**budgets, "cpu": "256GiB"}, **step)
    assert plan.makespan < 1.1 * without.makespan
