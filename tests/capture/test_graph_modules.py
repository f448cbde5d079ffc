"""``torch.fx.GraphModule`` as the model, as feature extractors and other graph transforms make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphplan

X = torch.randn(2, 8)
SHIFT = torch.full((8,), 3.0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0, shift: float = 0.0) -> dict[str, Any]:
        y = self.fc(x)
        return {"y": y * scale + shift, "all": [y, {"x": x}]}


@pytest.fixture
def budgets() -> Iterator[dict[Any, Any]]:
    with graphplan.simulate({0: "1MiB", "cpu": "1GiB"}) as machine:
        yield machine.max_memory


@pytest.mark.parametrize("options", [{}, {"grad": True}, {"train": True}])
def test_arguments_have_their_names_and_results_their_classes(
    budgets: dict[Any, Any], options: dict[str, Any]
) -> None:
    model = fx.symbolic_trace(Scaled().eval())
    placed = graphplan.partition(model, budgets, (X,), {"shift": SHIFT}, **options)
    assert placed.graphplan.plan.method != "hooks"
    result, expected = placed(X, shift=SHIFT), model(X, shift=SHIFT)
    assert torch.allclose(result["y"], expected["y"], atol=1e-6)
    assert (type(result), type(result["all"]), type(result["all"][1])) == (dict, list, dict)


def test_what_was_attached_is_in_the_placed_model(budgets: dict[Any, Any]) -> None:
    model = fx.symbolic_trace(Scaled().eval())
    model.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    model.register_forward_hook(lambda _module, _args, result: result["y"] * 2)
    model.width = 8
    own = model.forward
    model.forward = lambda x: own(x, shift=SHIFT)
    with torch.no_grad():
        placed = graphplan.partition(model, budgets, (X,))
        assert placed.graphplan.plan.method != "hooks"
        assert torch.allclose(placed(X), model(X), atol=1e-6)
    assert placed.width == 8


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec:FutureWarning")  # of torch, where it copies one
def test_the_module_of_an_exported_program(budgets: dict[Any, Any]) -> None:
    model = torch.export.export(Scaled().eval(), (X,), {"shift": SHIFT}).module()
    with torch.no_grad():
        placed = graphplan.partition(model, budgets, (X,), {"shift": SHIFT})
        assert torch.allclose(placed(X, shift=SHIFT)["y"], model(X, shift=SHIFT)["y"], atol=1e-6)
