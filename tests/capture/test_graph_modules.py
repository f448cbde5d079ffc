"""``torch.fx.GraphModule`` as the model, as feature extractors and graph transforms return."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn

import graphplan

X = torch.randn(2, 8)
SHIFT = torch.full((8,), 3.0)


class Switching(fx.GraphModule):
    """Has a graph for each mode, and that of train mode where it is copied, as torchvision's extractors."""

    def __init__(self, root: Any, graphs: dict[bool, fx.Graph]) -> None:
        super().__init__(root, graphs[True])
        self.graphs = graphs

    def train(self, mode: bool = True) -> Switching:
        if mode != self.training:
            self.graph = self.graphs[mode]
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> Switching:
        made = memo[id(self)] = Switching.__new__(type(self))
        inside = nn.Module()
        inside.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made.__init__(inside, inside.graphs)  # type: ignore[misc]
        return made


def switching() -> Switching:
    """In eval mode, in which it adds something."""
    root = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    graphs = {mode: fx.symbolic_trace(root).graph for mode in (True, False)}
    output = graphs[False].output_node()
    with graphs[False].inserting_before(output):
        output.args = (graphs[False].call_function(torch.add, (output.args[0], 1.0)),)
    return Switching(root, graphs).eval()


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = switching(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


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


def test_hooks_and_attributes_of_graph_module_are_kept(budgets: dict[Any, Any]) -> None:
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


@pytest.mark.filterwarnings("ignore:.*traced again:graphplan.GraphplanWarning")
@pytest.mark.parametrize("build", [switching, Inside])
def test_a_graph_that_changes_with_the_mode(budgets: dict[Any, Any], build: Any) -> None:
    model = build()
    with torch.no_grad():
        placed = graphplan.partition(model, budgets, (X,))
        copied = copy.deepcopy(placed)
        for mode in (False, True, False):
            expected = model.train(mode)(X)
            assert torch.allclose(placed.train(mode)(X), expected, atol=1e-6)
            assert torch.allclose(graphplan.unplace(placed)(X), expected, atol=1e-6)
        assert torch.allclose(copied(X), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:hooks were added:graphplan.GraphplanWarning")
def test_inner_graph_module_runs_module_by_module(budgets: dict[Any, Any]) -> None:
    model = Inside().eval()
    with torch.no_grad():
        placed = graphplan.partition(model, budgets, (X,))
        seen: list[torch.Tensor] = []
        placed.head.register_forward_hook(lambda _module, args, _result: seen.append(args[0]))
        assert torch.allclose(placed(X), model(X), atol=1e-6)
    assert seen


@pytest.mark.filterwarnings("ignore:.*traced again:graphplan.GraphplanWarning")
def test_edited_graph_affects_only_its_module(budgets: dict[Any, Any]) -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval())
    with torch.no_grad():
        expected = model(X)
        placed = graphplan.partition(model, budgets, (X,))
        copied, output = copy.deepcopy(placed), placed.graph.output_node()
        with placed.graph.inserting_before(output):
            output.args = (placed.graph.call_function(torch.relu, output.args),)
        placed.recompile()
        assert torch.allclose(placed(X), expected.relu(), atol=1e-6)
        assert torch.allclose(graphplan.unplace(placed)(X), expected.relu(), atol=1e-6)
        for other in (model, copied):
            assert torch.allclose(other(X), expected, atol=1e-6)
