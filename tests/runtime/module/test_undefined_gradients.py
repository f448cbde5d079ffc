"""Losses of some of the results: gradients are None where they are None in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from torch import nn
from training_steps import gap, gradients_of

import graphplan
from graphplan.runtime.module.training.undefined_gradients import without_gradients

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
BUDGETS = [{0: "1MiB"}, {0: "24KiB", 1: "24KiB", "cpu": "1MiB"}, {"cpu": "1MiB"}]


class Heads(nn.Module):
    """Results of shared and separate weights, of parts of one value, and one with a NaN gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
        self.left, self.right, self.both = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.trunk(x)
        mean, scale = y.chunk(2, -1)
        left = self.left(y)
        masked = (left - 200 * torch.eye(16)[0]).softmax(-1)
        return {
            "left": left,
            "right": self.right(y) + self.both(mean),
            "log": masked.log(),
            "mean": mean * 2,
            "scale": scale.exp(),
        }


NAMES = ("left", "right", "log", "mean", "scale")
SUBSETS = [subset for size in (1, 2, 5) for subset in combinations(NAMES, size)]


def stepped(model: nn.Module, x: torch.Tensor, subsets: Sequence[Sequence[str]]) -> None:
    """A step for each of the losses; gradients add up."""
    for subset in subsets:
        results = model(x)
        sum(results[name].square().mean() for name in subset).backward()


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_gradients_equal_eager_mode(budgets: dict[int | str, str]) -> None:
    model, x = Heads(), X.clone().requires_grad_()
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(copy.deepcopy(model), machine.max_memory, (x,), train=True)
        for subset in SUBSETS:
            for each in (model, placed):
                each.zero_grad(set_to_none=True)
            theirs, ours = (X.clone().requires_grad_() for _ in range(2))
            stepped(model, theirs, [subset])
            stepped(placed, ours, [subset])
            if "log" in subset:  # no number in eager mode either
                continue
            assert gap(gradients_of(placed), gradients_of(model)) < 1e-5, subset
            assert gap({"x": ours.grad}, {"x": theirs.grad}) < 1e-5, subset
        assert all(machine.peak_bytes(key) <= placed.plan.peak_bytes[key] for key in budgets if key != "cpu")


def test_gradients_of_several_losses_add_up() -> None:
    """A value that replaces a sum has separate memory: it may become a gradient."""
    model = Heads()
    placed = graphplan.partition(copy.deepcopy(model), {"cpu": "1MiB"}, (X,), train=True)
    losses = [["left"], ["left", "mean"], ["right"], ["left"]]
    stepped(model, X, losses)
    stepped(placed, X, losses)
    assert gap(gradients_of(placed), gradients_of(model)) < 1e-5


def test_unused_inputs_get_no_gradient() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.weight, y * self.weight

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    x, y = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    placed = graphplan.partition(Two(), {"cpu": "1MiB"}, (x, y), train=True)
    placed(x, y)[1].sum().backward()
    assert x.grad is None
    assert y.grad is not None


def test_graph_without_absent_gradients() -> None:
    graph = torch.fx.Graph()
    _saved, a, b = (graph.placeholder(name) for name in ("saved", "a", "b"))
    made = [graph.call_function(torch.exp, (a,)), graph.call_function(torch.log, (b,))]
    made[1].meta["val"] = torch.empty(2, 3)
    added = graph.call_function(torch.add, tuple(made))
    joined = graph.call_function(torch.cat, ([added, made[1]],))
    graph.output((joined, made[1]))
    names = [
        f"{node.name}({', '.join(map(str, node.args))})" for node in without_gradients(graph, {"b"}, {}).nodes
    ]
    assert names == [
        "saved()",
        "a()",
        "b()",
        "exp(a)",
        "clone(exp)",
        "new_zeros(clone, (2, 3))",
        "cat([clone, new_zeros])",
        "output((cat, None))",
    ]
