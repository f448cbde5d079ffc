"""Training steps with data-dependent sizes: planned for their bounds, equal to eager mode."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from training_steps import budgets_of, gap, gradients_of, measured, needed, step_of

import graphplan

ADAMW = torch.optim.AdamW


class Experts(nn.Module):
    """Two experts, which are given the tokens that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(1, -1)
        result = x.clone()
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            result.index_add_(0, token, expert(x[token]) * shares[token, choice, None])
        return result


class Routed(nn.Module):
    """Experts; the loss of the tokens that have a label."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.layers = nn.Sequential(Experts(), nn.Linear(16, 16))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(ids).flatten(0, 1))
        kept = labels.flatten() != -100
        return nn.functional.cross_entropy(self.head(hidden[kept]), labels.flatten()[kept])


class Unpadded(nn.Module):
    """Computes with the tokens that are not padding, and pads the result."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)),) * 3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = (labels != -100).flatten().nonzero().flatten()
        padded = torch.zeros(labels.numel(), 16)
        padded[places] = self.layers(self.embedding(ids).flatten(0, 1)[places])
        return padded.square().mean()


def batch(rows: int, length: int, labelled: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens, of which this share has a label; the first has one."""
    torch.manual_seed(seed)
    ids, drawn = torch.randint(0, 40, (rows, length)), torch.rand(rows, length)
    drawn[0, 0] = 0.0
    return {"ids": ids, "labels": torch.where(drawn <= labelled, ids, -100)}


CALLS = ((4, 12, 0.5), (4, 12, 1.0), (4, 12, 0.0), (3, 10, 0.3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "configuration"),
    [(Routed, 0), (Routed, 2), (Unpadded, 1)],
    ids=["half", "two accelerators", "unpadded"],
)
def test_data_dependent_sizes_are_traced_in_training(make: Any, configuration: int) -> None:
    torch.manual_seed(0)
    eager, example = make(), batch(*CALLS[0])
    budgets = budgets_of(needed(eager, example, optimizer=ADAMW), configuration)
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(
            copy.deepcopy(eager), machine.max_memory, kwargs=example, train=True, optimizer=ADAMW, strict=True
        )
        steps = ADAMW(placed.parameters()), ADAMW(eager.parameters())
        for turn, sizes in enumerate(CALLS):
            inputs = batch(*sizes, turn)
            machine.reset_peaks()
            assert abs(float(step_of(placed, inputs)) - float(step_of(eager, inputs))) < 1e-5
            assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5
            for one in steps:
                one.step()
                one.zero_grad(set_to_none=False)
            measured(machine, placed.plans[-1] if len(placed.plans) > 1 else placed.plan)


class Met(nn.Module):
    """Multiplies chosen numbers with others, chosen in another way: eager mode may broadcast one."""

    def __init__(self, others: str) -> None:
        super().__init__()
        self.others, self.first, self.second = others, nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        first, second = self.first(x).flatten(), self.second(x).flatten()
        other = {
            "rest": lambda: second[~marks],
            "same": lambda: second[marks],
            "four": lambda: second[:4],
            "filled": lambda: first[marks].masked_fill(x[:, 0][~marks] > 0, x.new_tensor(2.0)),
        }[self.others]()
        return (first[marks] * other).square().sum()


@pytest.mark.parametrize("others", ["rest", "same", "four", "filled"])
def test_gradients_through_unknown_broadcasts_use_autograd(others: str) -> None:
    torch.manual_seed(0)
    eager, x = Met(others), torch.randn(8, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = graphplan.partition(
            copy.deepcopy(eager), {"cpu": "1GiB"}, args=(x, torch.arange(8) < 4), train=True
        )
    assert any("cannot be traced" in str(each.message) for each in caught) == (others != "same")
    for count in (4, 1):
        for model in (placed, eager):
            model.zero_grad()
            model(x, torch.arange(8) < count).backward()
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5


class Chosen(nn.Module):
    """Returns the chosen rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 4), nn.Dropout(0.3), nn.ReLU(), nn.Linear(4, 4), nn.Dropout(1.0)
        )

    def forward(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        return x[marks] + self.layers(x[marks]) + self.layers[:-1](x[marks])


def test_results_with_data_dependent_sizes_and_dropout() -> None:
    torch.manual_seed(0)
    eager, x = Chosen(), torch.randn(8, 4)
    with graphplan.simulate({0: "1GiB"}) as machine:
        placed = graphplan.partition(
            copy.deepcopy(eager), machine.max_memory, args=(x, torch.arange(8) < 3), train=True, strict=True
        )
        for count in (3, 0, 1, 8):
            machine.reset_peaks()
            inputs = {"x": x, "marks": torch.arange(8) < count}
            for model in (placed, eager):
                model.zero_grad(set_to_none=False)
            for turn in range(2):
                losses = [float(step_of_rows(model, inputs, turn)) for model in (placed, eager)]
                assert losses[0] == pytest.approx(losses[1], abs=1e-5)
            assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5
            measured(machine, placed.plan)


def step_of_rows(model: nn.Module, inputs: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
    """A step by the sum of a result's squares; of no rows, that is 0."""
    torch.manual_seed(seed)
    loss: torch.Tensor = model(**inputs).square().sum()
    loss.backward()
    return loss.detach()


class Selected(nn.Module):
    """Selects the rows of which a mask has one element each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        return self.linear(x).masked_select(marks[:, None]).exp().sum()


def test_repeated_masks_are_planned_at_their_bound() -> None:
    example = {"x": torch.randn(64, 16), "marks": torch.arange(64) < 3}
    with graphplan.simulate({0: "1GiB"}) as machine:
        placed = graphplan.partition(Selected(), machine.max_memory, kwargs=example, train=True, strict=True)
        for count in (3, 64):
            machine.reset_peaks()
            step_of_rows(placed, {**example, "marks": torch.arange(64) < count}, 0)
            measured(machine, placed.plan)


class Repeated(nn.Module):
    """Repeats rows that it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).repeat_interleave(counts, 0))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:the plan counts data-dependent sizes:graphplan.GraphplanWarning")
@pytest.mark.parametrize("train", [False, True])
def test_repeat_interleave_counts_as_in_the_example(train: bool) -> None:
    call = torch.randn(4, 16), torch.tensor([5, 9, 3, 7])
    with graphplan.simulate({0: "1MB"}) as machine, torch.set_grad_enabled(train):
        placed = graphplan.partition(Repeated(), machine.max_memory, args=call, train=train, strict=True)
        machine.reset_peaks()
        result = placed(*call)
        if train:
            result.square().sum().backward()
        assert measured(machine, placed.plan) or train


class Masked(nn.Module):
    """Masks what is padding, as speech models do, and weighs each place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 32), nn.Linear(32, 4)
        self.places = nn.Parameter(torch.randn(16, 4))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        longest = int(lengths.max())
        padding = torch.arange(longest) >= lengths[:, None]
        return self.second(self.first(x).relu()).masked_fill(padding[..., None], 0.0) * self.places[:longest]


@pytest.mark.slow
def test_maximum_of_lengths_is_traced_in_training() -> None:
    torch.manual_seed(0)
    eager, x = Masked(), torch.randn(3, 8, 4)
    with graphplan.simulate({0: "1GiB"}) as machine, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sizes cannot vary")
        placed = graphplan.partition(
            copy.deepcopy(eager), machine.max_memory, (x, torch.tensor([8, 5, 3])), train=True, strict=True
        )
        for lengths, size, plans in (([2, 8, 8], 8, 1), ([6, 1, 2], 6, 2), ([1, 1, 1], 8, 3)):
            inputs = {"x": x[:, :size], "lengths": torch.tensor(lengths)}
            machine.reset_peaks()
            for model in (placed, eager):
                model.zero_grad()
                step_of_rows(model, inputs, 0)
            assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5
            assert len(placed.plans) == plans
            measured(machine, placed.plans[-1])
