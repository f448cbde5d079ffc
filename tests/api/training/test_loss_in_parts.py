"""A cross-entropy loss whose logits are too large is computed in parts of their rows, and equals eager."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from training_steps import ROOMY, check_training, gap, gradients_of, needed, step_of

import graphplan
from graphplan.passes.training.loss_parts import planned_parts

SLOW_CPU = {"cpu": graphplan.Speed(1e9, 1e9)}
COUNT = "graphplan.compiler.activation_choice.count_parts"


class Text(nn.Module):
    """Tokens with many classes, and their loss."""

    def __init__(self, bias: bool = True, returns: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 2000, bias=bias)
        self.layer, self.returns, self.options = nn.Linear(16, 16), returns, options

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(ids)).relu())  # type: ignore[no-any-return]

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.logits(ids)
        flat = logits.flatten(0, 1).float()
        loss = nn.functional.cross_entropy(flat, labels.flatten(), **self.options)
        return {"loss": loss, "logits": logits, "best": logits.argmax(-1)} if self.returns else {"loss": loss}


class Capped(Text):
    """Logits that are bounded, as in Gemma 2."""

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().logits(ids) / 3) * 3


class Scaled(Text):
    """The factor of the logits has as many dimensions as they have."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Buffer(torch.full((1, 1, 1), 0.5))

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return super().logits(ids) * self.factor


class Text3D(Text):
    """The classes are not the last dimension of the loss."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.logits(ids).mT, labels)}


class Prior(Text):
    """Logits are adjusted by a buffer that the step writes to once the loss is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prior", torch.linspace(-1, 1, 2000))

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return super().logits(ids) + self.prior

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        result = super().forward(ids, labels)
        with torch.no_grad():
            self.prior.mul_(0.5).add_(1)
        return result


class Residual(Text):
    """What is added to the product has rows as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("residual", torch.ones(4 * 32, 1))

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embed(ids)).flatten(0, 1)
        return torch.addmm(self.residual, x, self.head.weight.T).unflatten(0, (4, 32))


class PerRow(Text):
    """The same logarithms are read by a mean and by losses of each row."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logp, labels = self.logits(ids).flatten(0, 1).log_softmax(-1), labels.flatten()
        mean = nn.functional.nll_loss(logp, labels)
        each = nn.functional.nll_loss(logp, labels, reduction="none")
        return {"loss": mean + (each * torch.linspace(0, 1, len(each))).mean()}


class Tied(Text):
    """The weight of the head is that of the embedding."""

    def __init__(self) -> None:
        super().__init__(bias=False)
        self.embed = nn.Embedding(2000, 16)
        self.head.weight = self.embed.weight


def example() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids, labels = torch.randint(50, (4, 32)), torch.randint(2000, (4, 32))
    labels[:, :3] = -100
    return {"ids": ids, "labels": labels}


MODELS = {
    "plain": Text,
    "no bias": lambda: Text(bias=False),
    "results": lambda: Text(returns=True),
    "sum": lambda: Text(reduction="sum"),
    "weights": lambda: Text(weight=torch.linspace(0.1, 1, 2000)),
    "capped": Capped,
    "tied": Tied,
}


@pytest.mark.parametrize("name", MODELS)
def test_loss_in_parts_equals_eager(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name](), example()
    budget = int(0.4 * needed(model, inputs, optimizer=torch.optim.AdamW))
    plan = check_training(model, inputs, {0: budget, "cpu": ROOMY}, devices=SLOW_CPU)
    assert planned_parts(plan.graph).count > 2


@pytest.mark.parametrize("make", [Prior, Residual, PerRow])
def test_loss_that_cannot_be_parted_equals_eager(make: Any) -> None:
    torch.manual_seed(0)
    model, inputs = make(), example()
    budget = int(0.4 * needed(model, inputs, optimizer=torch.optim.AdamW))
    plan = check_training(model, inputs, {0: budget, "cpu": ROOMY}, devices=SLOW_CPU)
    assert planned_parts(plan.graph).count == 1


def plan_of(model: nn.Module, share: float = 0.4, **options: Any) -> graphplan.Plan:
    """The plan on an accelerator with this share of the bytes of a step, and the CPU."""
    inputs = example()
    size = needed(model, inputs)
    with graphplan.simulate({0: int(share * size), "cpu": ROOMY}) as machine:
        options = {"devices": SLOW_CPU, **options}
        return graphplan.plan(model, machine.max_memory, kwargs=inputs, train=True, **options)


def test_loss_in_parts_is_faster_than_whole() -> None:
    parts = plan_of(Text())
    with patch(COUNT, return_value=1):
        whole = plan_of(Text())
    assert parts.makespan < whole.makespan
    assert planned_parts(whole.graph).count == 1


def test_loss_stays_whole_where_it_fits() -> None:
    assert planned_parts(plan_of(Text(), share=1).graph).count == 1


def test_loss_stays_whole_without_recomputation() -> None:
    assert planned_parts(plan_of(Text(), recompute=False).graph).count == 1


def test_loss_with_a_pinned_operation_stays_whole() -> None:
    with patch(COUNT, return_value=1):
        name = next(n for n, one in plan_of(Text()).graph.operations.items() if one.target == "_log_softmax")
    assert planned_parts(plan_of(Text(), pin={name: "cpu"}).graph).count == 1


@pytest.mark.parametrize("make", [lambda: Text(label_smoothing=0.1), Scaled, Text3D])
def test_other_losses_stay_whole(make: Any) -> None:
    assert planned_parts(plan_of(make()).graph).count == 1


def test_plan_with_loss_in_parts_is_carried_out_again() -> None:
    model, inputs = Text(returns=True), example()
    plan = graphplan.Plan.from_json(plan_of(model).to_json())
    with graphplan.simulate({0: plan.topology[0].memory, "cpu": ROOMY}) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs, train=True, plan=plan)
    assert placed.plan.graph == plan.graph
    assert planned_parts(plan.graph).on_cpu
    assert not plan.offloaded_activations


def test_other_sizes_follow_a_loss_in_parts() -> None:
    torch.manual_seed(0)
    model, inputs = Text(), example()
    eager, budget = copy.deepcopy(model), int(0.4 * needed(model, inputs))
    with graphplan.simulate({0: budget, "cpu": ROOMY}) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs, train=True, devices=SLOW_CPU)
        for rows, length in ((3, 32), (3, 20), (2, 5)):
            batch = {name: tensor[:rows, :length].contiguous() for name, tensor in inputs.items()}
            placed.zero_grad()
            eager.zero_grad()
            assert torch.allclose(step_of(placed, batch), step_of(eager, batch))
            assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5
            assert all(machine.peak_bytes(0) <= plan.topology[0].memory for plan in placed.plans)
        assert [planned_parts(plan.graph).count > 2 for plan in placed.plans[:2]] == [True, True]


class Wide(nn.Module):
    """A wide residual layer before the head, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 64), nn.Linear(64, 1500, bias=False)
        self.inner = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.bfloat16()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.embed(ids)
        found = self.head(found + self.inner(found)).flatten(0, 1).float()
        return {"loss": nn.functional.cross_entropy(found, labels.flatten())}


@pytest.mark.slow
@pytest.mark.full_search
def test_whole_loss_is_searched_in_full_too() -> None:
    """Regression: the quick search of the whole loss was so poor that only parts had a full one."""
    torch.manual_seed(0)
    model = Wide()
    inputs = {"ids": torch.randint(50, (4, 17)), "labels": torch.randint(1500, (4, 17))}
    budget = int(0.8 * needed(model, inputs))
    options: dict[str, Any] = {"kwargs": inputs, "train": True, "devices": SLOW_CPU}
    with graphplan.simulate({0: budget, "cpu": ROOMY}) as machine:
        plan = graphplan.plan(model, machine.max_memory, **options)
        with patch(COUNT, return_value=1):
            whole = graphplan.plan(model, machine.max_memory, **options)
    assert plan.makespan <= whole.makespan
