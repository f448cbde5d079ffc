"""Tensors in attributes: graphs take the values that they have at each call."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphplan
from graphplan.errors import GraphplanWarning

X = torch.randn(2, 8)


class Net(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), nn.Module()
        self.scale, self.inner.offset = torch.rand(8), torch.rand(2, 8)
        self.unread, self.factor = torch.rand(3), torch.tensor(2.0)
        self.read = read

    def forward(self, x: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * self.scale + self.inner.offset.sum(0)
        y = y if self.read is None else y * self.read(self.factor)
        return y if times is None else y * times


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad(), graphplan.simulate({0: "1MiB"}):
        yield


def both(net: nn.Module) -> tuple[Any, Any]:
    return graphplan.partition(copy.deepcopy(net), {0: "1MiB", "cpu": "1MiB"}, (X,)), net


def assert_equal(placed: nn.Module, net: nn.Module, *args: torch.Tensor) -> None:
    given = args or (X,)
    assert torch.allclose(placed(*given), net(*given), atol=1e-5)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another tensor": lambda net: setattr(net, "scale", torch.arange(8.0)),
    "a write": lambda net: net.scale.mul_(2),
    "of a submodule": lambda net: net.inner.offset[0].zero_(),
    "other strides": lambda net: setattr(net.inner, "offset", torch.arange(16.0).view(8, 2).t()),
    "one that no graph reads": lambda net: setattr(net, "unread", torch.ones(3)),
    "made in inference mode": lambda net: setattr(net, "scale", in_inference_mode()),
}


def in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(8) / 3


def test_other_values_need_no_other_graph() -> None:
    placed, net = both(Net())
    first = net.scale
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphplanWarning)
        for change in CHANGES.values():
            for one in (placed, net):
                change(one)
            assert_equal(placed, net)
        placed.scale = net.scale = first
        assert_equal(placed, net)


def test_further_graphs_are_of_the_values_now() -> None:
    placed, net = both(Net())
    for one in (placed, net):
        one.scale = torch.arange(8.0)
    assert_equal(placed, net)
    assert_equal(placed, net, X, torch.full((8,), 3.0))
    for one in (placed, net):
        one.scale = torch.arange(8.0) + 1
    assert_equal(placed, net, X, torch.full((8,), 3.0))
    assert_equal(placed, net)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda factor: factor.item(),
    "int": int,
    "of what is computed": lambda factor: (factor + 1).item(),
    "tolist": lambda factor: factor.tolist(),
    "torch.tensor": lambda factor: torch.tensor(factor),
    "new_tensor": lambda factor: torch.ones(1).new_tensor(factor),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_trace_that_went_by_values_is_made_again(read: Callable[[torch.Tensor], Any]) -> None:
    placed, net = both(Net(read))
    for one in (placed, net):
        one.factor = torch.tensor(5.0)
    with pytest.warns(GraphplanWarning, match="captured again"):
        assert_equal(placed, net)


def test_so_is_one_whose_tensor_lies_in_two_attributes() -> None:
    net = Net()
    net.twin = net.scale
    placed, net = both(net)
    for one in (placed, net):
        one.scale = torch.ones(8)
    with pytest.warns(GraphplanWarning, match="captured again"):
        assert_equal(placed, net)


def test_other_forms_need_another_graph() -> None:
    placed, net = both(Net())
    for value in (torch.ones(1), torch.ones(8, dtype=torch.float64), None):
        for one in (placed, net):
            one.unread = value
        with pytest.warns(GraphplanWarning, match="captured again"):
            assert_equal(placed, net)


@pytest.mark.filterwarnings("ignore:.*captured again:graphplan.GraphplanWarning")
def test_copies_have_values_of_their_own() -> None:
    placed, net = both(Net())
    for one in (placed, net):
        one.scale = torch.ones(8)
    assert_equal(placed, net)
    other, apart = copy.deepcopy(placed), copy.deepcopy(net)
    loaded = pickle.loads(pickle.dumps(placed))
    for one in (other, apart):
        one.scale.add_(1)
    assert_equal(other, apart)
    for one in (placed, net):
        one.scale = torch.zeros(8)
    times = torch.full((8,), 3.0)
    for call in ((X,), (X, times)):
        assert_equal(placed, net, *call)
        assert_equal(other, apart, *call)
    assert torch.equal(loaded.scale, torch.ones(8))


def test_a_training_step_follows() -> None:
    net = Net()
    placed = graphplan.partition(copy.deepcopy(net), {0: "1MiB", "cpu": "1MiB"}, (X,), train=True)
    for value in (1.0, 2.0, 3.0):
        for one in (placed, net):
            one.scale = torch.full((8,), value)
            with torch.enable_grad():
                one(X).sum().backward()
        assert torch.allclose(placed.linear.weight.grad.cpu(), net.linear.weight.grad, atol=1e-4)
