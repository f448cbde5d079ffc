"""Small models: copies cost their latency, and there are few placements to choose from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphplan
from graphplan.analysis.plan_problem import constrained_problem
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.evaluate import evaluate


class Branches(nn.Module):
    """Ten branches of two small layers between two others: each copy of a weight takes its latency."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(10)
        )
        self.last = nn.Linear(10 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(torch.cat([branch(x) for branch in self.branches], -1))


@pytest.mark.slow
@pytest.mark.full_search
def test_adjacent_small_weights_share_a_copy() -> None:
    """Neighbours share a copy, so that streaming the later weights takes as long as keeping all."""
    memory = {0: 536_265, "cpu": 1 << 30}
    plan = graphplan.plan(Branches(), memory, (torch.randn(32, 64),))
    names = [name for name in plan.graph.weights if name in plan.graph.consumers]
    homes = {name: 0 if index < 4 else "cpu" for index, name in enumerate(names)}
    simple = evaluate(constrained_problem(plan), Assignment(dict.fromkeys(plan.graph.operations, 0), homes))
    assert simple.feasible
    assert plan.makespan <= 1.01 * simple.seconds


@pytest.mark.full_search
@pytest.mark.parametrize("memory", [{0: 1 << 30}, {"cpu": 1 << 30}, {0: 1 << 30, "cpu": 1 << 30}])
def test_the_only_placement_is_the_best(memory: dict[int | str, int]) -> None:
    assert graphplan.plan(Branches(), memory, (torch.randn(32, 64),)).gap < 1e-3
