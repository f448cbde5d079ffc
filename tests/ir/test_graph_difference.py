"""Whether two plans are of one call of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shortcuts import short_search
from torch import nn

import graphplan
from graphplan.ir.graph_difference import graph_difference

CPU = {"cpu": "1GiB"}


def stack(width: int = 64, blocks: int = 2) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks)]
    return nn.Sequential(*layers, nn.Linear(width, 512)).eval()


def planned(model: nn.Module, budgets: dict[Any, Any], batch: int = 2, **options: Any) -> graphplan.Plan:
    with short_search():
        return graphplan.plan(model, budgets, (torch.ones(batch, 64),), **options)


def difference(one: graphplan.Plan, other: graphplan.Plan) -> str:
    return graph_difference(one.graph, other.graph)


def test_budgets_devices_and_constraints_may_differ() -> None:
    plan = planned(stack(), {0: "1MiB", **CPU})
    assert difference(plan, planned(stack(), CPU)) == ""
    assert difference(plan, planned(stack(), {0: "1MiB", 1: "1MiB"}, pin={"0": 1})) == ""
    assert difference(plan, graphplan.Plan.from_json(plan.to_json())) == ""


def test_sliced_weights_equal_whole_weights() -> None:
    plan = planned(stack(), CPU)
    sliced = planned(stack(), {0: "60KiB", **CPU}, cpu_compute=False)
    assert sliced.parts
    assert difference(plan, sliced) == difference(sliced, plan) == ""


@pytest.mark.slow
def test_recomputation_is_not_a_difference() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    step: dict[str, Any] = {"batch": 512, "train": True}
    plan = planned(Loss(), {0: "1GiB", **CPU}, **step)
    for forbidden in ("recompute", "offload_activations"):
        tight = {0: int(0.8 * plan.peak_bytes[0]), **CPU}
        less = planned(Loss(), tight, **step, **{forbidden: False})
        assert any(op.repeats or op.offloads for op in less.graph.operations.values())
        assert difference(plan, less) == difference(less, plan) == ""
    assert "training step" in difference(planned(Loss(), CPU), planned(Loss(), CPU, train=True))


def test_another_model_or_call_is_named() -> None:
    plan = planned(stack(), CPU)
    assert difference(plan, planned(stack(blocks=3), CPU)) == "only the other has the weight '2.0.bias'"
    double = graphplan.plan(stack().double(), CPU, (torch.ones(2, 64, dtype=torch.float64),))
    assert (
        difference(plan, double)
        == "'0.0.weight' is float64[64, 64] in the other, and float32[64, 64] in this plan"
    )
    assert "float32[3, 64], not float32[2, 64]" in difference(plan, planned(stack(), CPU, batch=3))
    gelu = stack()
    gelu[0][1] = nn.GELU()  # type: ignore[index]
    assert difference(plan, planned(gelu, CPU)).startswith("only this plan has relu")


def test_page_of_two_plans_requires_one_graph(tmp_path: Path) -> None:
    """Regression: another model's plan was accepted if a single name was the same."""
    plan, page = planned(stack(), {0: "1MiB", **CPU}), tmp_path / "page.html"
    with pytest.raises(graphplan.PlanError, match=r"another model or call: only the other has the weight"):
        plan.save_html(page, other=planned(stack(blocks=3), CPU))
    assert not page.exists()
    plan.save_html(page, other=planned(stack(), CPU))
    assert page.exists()
