"""A call reads the current weights of the modules, however they were set."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from builders import largest_difference
from torch import nn
from torch.nn.utils import parametrizations

import graphplan

X = torch.randn(4, 16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.bias


def placed_net() -> Any:
    placed = graphplan.partition(Net(), {"cpu": "1GiB"}, (X,))
    placed(X)  # binds
    return placed


def eager(placed: Any) -> torch.Tensor:
    """The result of the original's forward with the weights of the placed module."""
    with torch.no_grad():
        return Net.forward(placed, X)


def replace_parameter(net: Any) -> None:
    net.blocks[1].up.weight = nn.Parameter(torch.randn(32, 16))


def replace_data(net: Any) -> None:
    net.blocks[0].down.weight.data = torch.randn(16, 32)


def write_in_place(net: Any) -> None:
    with torch.no_grad():
        net.blocks[0].down.bias.add_(1)


def load(net: Any) -> None:
    net.load_state_dict(Net().state_dict())


def load_by_assignment(net: Any) -> None:
    net.load_state_dict(Net().state_dict(), assign=True)


def replace_module(net: Any) -> None:
    net.blocks[0].up = nn.Linear(16, 32)


def replace_outer_module(net: Any) -> None:
    net.blocks[1] = Block()


def replace_root_parameter(net: Any) -> None:
    net.bias = nn.Parameter(torch.zeros(16))


def replace_buffer(net: Any) -> None:
    net.blocks[0].scale = torch.tensor(5.0)


def parametrize(net: Any) -> None:
    parametrizations.weight_norm(net.blocks[0].up)
    with torch.no_grad():
        net.blocks[0].up.parametrizations.weight.original0.mul_(2)


def parametrized(change: Any) -> Any:
    """If another class reads the replaced weight, the model is retraced."""
    return pytest.warns(graphplan.GraphplanWarning, match="again") if change is parametrize else nullcontext()


CHANGES = [
    replace_parameter,
    replace_data,
    write_in_place,
    load,
    load_by_assignment,
    replace_module,
    replace_outer_module,
    replace_root_parameter,
    replace_buffer,
    parametrize,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_seen_by_the_next_call(change: Any) -> None:
    placed = placed_net()
    before = placed(X)
    for _ in range(2):
        change(placed)
        with parametrized(change):
            assert largest_difference(placed(X), eager(placed)) < 1e-5
        assert largest_difference(placed(X), before) > 1e-3
        if change is parametrize:
            break


def test_successive_changes_are_seen() -> None:
    placed = placed_net()
    for change in CHANGES:
        change(placed)
        with parametrized(change):
            assert largest_difference(placed(X), eager(placed)) < 1e-5


def test_functional_call_uses_its_weights() -> None:
    placed = placed_net()
    other = Net()
    with torch.no_grad():
        found = torch.func.functional_call(placed, dict(other.state_dict()), (X,))
        assert largest_difference(found, other(X)) < 1e-5
    assert largest_difference(placed(X), eager(placed)) < 1e-5


def test_functional_call_with_weights_elsewhere_names_the_remedy() -> None:
    net = Net()
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(net, {0: machine.max_memory[0]}, (X,))
        with pytest.raises(graphplan.PlanError, match="functional_call takes weights on their planned"):
            torch.func.functional_call(placed, {n: p.detach() for n, p in net.named_parameters()}, (X,))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_read_their_own_weights(copied: Any) -> None:
    placed = placed_net()
    model_copy = copied(placed)
    before = placed(X)
    write_in_place(model_copy)
    assert largest_difference(model_copy(X), eager(model_copy)) < 1e-5
    assert torch.equal(placed(X), before)


def test_missing_weight_raises_as_in_eager_mode() -> None:
    placed = placed_net()
    del placed.blocks[0].up.weight
    refused = pytest.raises(AttributeError, match="'Linear' object has no attribute 'weight'")
    with pytest.warns(graphplan.GraphplanWarning, match="is gone"), refused:
        placed(X)


def test_edited_code_runs() -> None:
    placed = placed_net()
    code = placed.graph_module
    for node in code.graph.nodes:
        if node.target is torch.relu:
            node.target = torch.tanh
    placed(X)
    code.recompile()
    with torch.no_grad():
        expected = X
        for block in placed.blocks:
            expected = expected + block.down(torch.tanh(block.up(expected))) * block.scale
        assert largest_difference(placed(X), expected + placed.bias) < 1e-5


def test_hooks_of_the_graph_module_are_called() -> None:
    placed = placed_net()
    seen = []
    placed.graph_module.register_forward_hook(lambda *_: seen.append(True))
    placed(X)
    assert seen == [True]
