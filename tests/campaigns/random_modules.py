"""Random modules that write in place, return views, tie weights, keep buffers, go by modes: are they right?

A seed is a module with budgets. It is placed on simulated devices, and called as it is, half of them in the
other mode and as it was again, beside eager: results, inputs that were written to, buffers, peaks and copies
are compared.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from builders import bytes_of, largest_difference, moves_of, planned_moves
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "sweep"))

from shortcuts import short_search

import graphplan

WIDTH = 24
TOLERANCE = 1e-5
LAYER_STEPS = ("linear", "relu_", "norm", "shared", "split")
VALUE_STEPS = ("add", "iadd", "view", "transpose", "skip", "write", "arange", "mask")
STATE_STEPS = ("buffer", "cached", "batch_norm", "mode", "fill")
STEPS = (*LAYER_STEPS, *VALUE_STEPS, *STATE_STEPS)
SHARES: tuple[dict[Any, float], ...] = (
    {0: 0.5, 1: 0.7},
    {0: 0.4, 1: 0.4, 2: 0.4},
    {0: 0.3, "cpu": 99.0},
    {0: 0.1, "cpu": 99.0},
    {3: 0.2, 1: 0.3, "cpu": 99.0},
    {0: 2.0},
)


class RandomModule(nn.Module):
    """A module that does the steps it is given, over a growing list of values.

    Args:
        steps: what to do, and which of the earlier values or layers it is about.
        writes_input: whether the first value is the caller's tensor, so that steps in place write to it.
    """

    def __init__(self, steps: list[tuple[str, int]], *, writes_input: bool = False) -> None:
        super().__init__()
        self.steps, self.writes_input = steps, writes_input
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in steps)
        self.norms = nn.ModuleList(
            (nn.BatchNorm1d if step == "batch_norm" else nn.LayerNorm)(WIDTH) for step, _ in steps
        )
        for layer, (step, pick) in zip(self.layers, steps, strict=True):
            if step == "linear" and pick % 4 == 0:
                layer.weight = self.layers[pick % len(steps)].weight
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(2, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor, double: bool = False) -> dict[str, Any]:
        values = [x if self.writes_input else x + 0]
        for index, (step, pick) in enumerate(self.steps):
            values.append(self.apply_step(step, index, values[-1], values[pick % len(values)], pick))
        out = values[-1] * 2 if double else values[-1]
        return {"out": out, "all": tuple(values[1::2]), "none": None}

    def apply_step(
        self, step: str, index: int, last: torch.Tensor, other: torch.Tensor, pick: int
    ) -> torch.Tensor:
        if step in LAYER_STEPS:
            return self.layer_step(step, index, last, pick)
        return (self.value_step if step in VALUE_STEPS else self.state_step)(step, index, last, other)

    def layer_step(self, step: str, index: int, last: torch.Tensor, pick: int) -> torch.Tensor:
        if step == "linear":
            return self.layers[index](last)
        if step == "shared":
            return self.layers[pick % len(self.layers)](last)
        if step == "relu_":
            return last.clone().relu_()
        if step == "norm":
            return self.norms[index](last)
        left, right = last.chunk(2, -1)
        return torch.cat([right, left], -1)

    def value_step(self, step: str, index: int, last: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if step == "add":
            return last + other
        if step == "iadd":
            last += other.detach().mean()
            return last * 1
        if step == "view":
            return last.reshape(-1).view_as(last)
        if step == "transpose":
            return last.t().contiguous().t()
        if step == "write":
            other[0].mul_(0.5)
            return last + other.sum() * 0.01
        if step == "mask":
            return last.masked_fill(other > 0.5, 0.25)
        if step == "arange":
            return last + torch.arange(last.shape[-1], device=last.device) * 0.01
        return torch.tanh(other)

    def state_step(self, step: str, index: int, last: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if step == "buffer":
            self.count.add_(1)
            return last + self.count * 0.01
        if step == "cached":
            self.cache[index % 2].copy_(last[0].detach() * 0.5)
            return last + self.cache.sum(0)
        if step == "fill":
            filled = last.new_zeros(last.shape)
            filled[:, ::2] = other[:, ::2]
            return filled
        if step == "mode":
            return last * 0.5 if self.training else last + 0.5
        return self.norms[index](last)


@dataclass
class Checked:
    """What came of one module.

    Attributes:
        placed: whether it was placed; the budgets may be too small.
        calls: that were compared with eager.
        measured: of those, calls of a known structure, whose peaks and copies were compared with the plan.
        exact: of those, how many took to the byte what their plan says, on each device.
        difference: the largest from eager.
        violations: what must not be.
    """

    placed: bool = False
    calls: int = 0
    measured: int = 0
    exact: int = 0
    difference: float = 0.0
    violations: list[str] = field(default_factory=list)


def check_module(seed: int) -> Checked:
    """Place the module of a seed, and compare its calls with eager."""
    draw, found = random.Random(seed), Checked()
    steps = [(draw.choice(STEPS), draw.randrange(20)) for _ in range(draw.randint(1, 10))]
    torch.manual_seed(seed)
    model = RandomModule(steps, writes_input=draw.random() < 0.2).train(draw.random() < 0.3)
    share, slack = draw.choice(SHARES), draw.randrange(6_000, 26_000)
    budgets = {key: int(share * bytes_of(model)) + slack for key, share in share.items()}
    options = {"cpu_compute": draw.random() < 0.5} if "cpu" in budgets else {}
    eager, x = copy.deepcopy(model), torch.randn(draw.randint(2, 4), WIDTH)
    try:
        with (
            short_search(),
            torch.no_grad(),
            warnings.catch_warnings(),
            graphplan.simulate(budgets) as machine,
        ):
            warnings.simplefilter("ignore")
            placed = _place(found, model, budgets, options, x)
            if placed is not None:
                _check_calls(found, machine, placed, eager, x, other_mode=draw.random() < 0.5)
                del placed
            gc.collect()
            if left := {
                key: machine.live_bytes(key) for key in machine.capacities if machine.live_bytes(key)
            }:
                found.violations.append(f"{left} bytes are left")
    except Exception as error:  # any is a finding
        found.violations.append(f"{type(error).__name__}: {error}")
    found.violations[:] = [f"seed {seed}: {text}" for text in found.violations]
    return found


def _place(
    found: Checked, model: RandomModule, budgets: dict[Any, int], options: dict[str, Any], x: torch.Tensor
) -> Any:
    try:
        placed = graphplan.partition(model, budgets, args=(x.clone(),), **options)
    except graphplan.InfeasibleError as error:
        if error.needed and not any(error.needed[key] > budgets[key] for key in budgets):
            found.violations.append(f"said to need {error.needed}, has {budgets}")
        return None
    found.placed = True
    placed.plan.verify()
    return placed


def _check_calls(
    found: Checked, machine: Any, placed: Any, eager: RandomModule, x: torch.Tensor, *, other_mode: bool
) -> None:
    first = placed.training
    others = [(not first, True), (first, False)] if other_mode else []
    for training, double in [(first, False), (first, False), *others]:
        placed.train(training)
        eager.train(training)
        theirs, ours = x.clone(), x.clone()
        gc.collect()
        machine.reset_peaks()
        known = [*map(id, placed.plans)]
        try:
            result = placed(ours, double)
        except (
            graphplan.InfeasibleError,
            graphplan.PlanError,
        ):  # for want of room, or of homes that suit both
            if len(placed.plans) != len(known) or training == first:
                found.violations.append("a call that was planned for is refused")
            continue
        if [*map(id, placed.plans)] == known:  # placing is not part of the call
            _check_plan(found, machine, placed.plans[0 if training == first else 1])
        expected = eager(theirs, double)
        states = dict(placed.named_buffers()), dict(eager.named_buffers())
        apart = largest_difference((result, ours, states[0]), (expected, theirs, states[1]))
        found.calls, found.difference = found.calls + 1, max(found.difference, apart)
        if not apart <= TOLERANCE:
            found.violations.append(f"differs by {apart} from eager, training {training}")
        del result, states  # they would hold the devices' memory when weights are moved


def _check_plan(found: Checked, machine: Any, plan: graphplan.Plan) -> None:
    exact = True
    for spec in plan.topology.devices:
        if isinstance(spec.key, int):
            measured, planned = machine.peak_bytes(spec.key), plan.peak_bytes[spec.key]
            exact &= measured == planned
            if not measured <= planned <= spec.memory:
                found.violations.append(f"{spec.key} takes {measured}, planned {planned} of {spec.memory}")
    found.measured += 1
    found.exact += exact
    if moves_of(machine) != planned_moves(plan):
        found.violations.append("other copies than planned")
