"""Tensors in attributes: graphs read their current values in each call."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
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
def machine() -> Iterator[Any]:
    torch.manual_seed(0)
    with torch.no_grad(), graphplan.simulate({0: "1MiB"}) as machine:
        yield machine


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


def test_changed_values_reuse_the_graph() -> None:
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


def test_only_changed_values_are_copied(machine: Any) -> None:
    placed, net = both(Net())
    times = torch.full((8,), 3.0)

    def moved_beside_the_plan(*args: torch.Tensor) -> int:
        machine.reset_peaks()
        assert_equal(placed, net, *args)
        return len(machine.transfers) - len(list(placed.plans[-1].schedule.copies()))

    assert moved_beside_the_plan(X) == 0
    placed(X, times)
    assert moved_beside_the_plan(X, times) == 0
    placed.scale = net.scale = torch.ones(8)
    assert moved_beside_the_plan(X, times) > 0
    assert moved_beside_the_plan(X, times) == 0


def test_later_graphs_use_current_values() -> None:
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
def test_trace_that_branched_on_values_is_retraced(read: Callable[[torch.Tensor], Any]) -> None:
    placed, net = both(Net(read))
    for one in (placed, net):
        one.factor = torch.tensor(5.0)
    with pytest.warns(GraphplanWarning, match="traced again"):
        assert_equal(placed, net)


class Sharing(nn.Module):
    """A tensor in an attribute, and others that may share it or its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), nn.Module()
        self.register_buffer("table", torch.ones(8))
        self.scale, self.other = torch.ones(8), torch.zeros(8)
        self.named: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * self.scale + self.other + getattr(self.scale, "more", 0)
        y = y + 2 if self.scale is self.other else y
        return y + self.table + sum(self.named.values())


SHARES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda net: setattr(net, "other", net.scale),
    "a buffer": lambda net: setattr(net, "scale", net.table),
    "a dictionary": lambda net: net.named.update(scale=net.scale),
    "a view": lambda net: setattr(net, "other", net.scale.data[:1]),
    "an object noted on it": lambda net: setattr(net.scale, "more", 3),
    "an expanded one": lambda net: setattr(net, "scale", torch.ones(1).expand(8)),
}


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.filterwarnings("ignore:.*traced again:graphplan.GraphplanWarning")
def test_tensor_with_custom_attributes_or_views_is_retraced(share: Callable[[Any], Any], later: bool) -> None:
    net = Sharing()
    if not later:
        share(net)
    placed, net = both(net)
    assert_equal(placed, net)
    for one in (placed, net):
        one.scale = torch.full((8,), 2.0)
        if later:
            share(one)
    assert_equal(placed, net)
    for one in (placed, net):
        one.scale = one.scale * 3
    assert_equal(placed, net)
    for one in (placed, net):
        one.scale.mul_(2)
    assert_equal(placed, net)


@pytest.mark.filterwarnings("ignore:.*traced again:graphplan.GraphplanWarning")
def test_attribute_that_is_a_buffer_stays_one_after_retrace() -> None:
    net = Sharing()
    net.inner.table = net.table
    net.named["table"] = net.table
    placed, net = both(net)
    for one in (placed, net):
        one.named["more"] = torch.ones(8)
    assert_equal(placed, net)
    for one in (placed, net):
        one.table.add_(1)
    assert_equal(placed, net)


@pytest.mark.filterwarnings("ignore:.*traced again:graphplan.GraphplanWarning")
def test_values_changed_back_to_the_traced_ones() -> None:
    """Also if values may no longer change: a later graph branches on them, or there is a copy."""

    class Late(Net):
        def forward(self, x: torch.Tensor, times: Any = None) -> torch.Tensor:
            return super().forward(x) * (1 if times is None else float(self.factor))

    placed, net = both(Late())
    first = placed.scale, net.scale
    for change in (lambda: assert_equal(placed, net, X, torch.ones(8)), lambda: copy.deepcopy(placed)):
        for one in (placed, net):
            one.scale = torch.full((8,), 3.0)
        assert_equal(placed, net)
        change()
        placed.scale, net.scale = first
        assert_equal(placed, net)


@pytest.mark.filterwarnings("ignore:.*traced again:graphplan.GraphplanWarning")
def test_copy_has_values_changed_since_the_last_call() -> None:
    placed, net = both(Net())
    for one in (placed, net):
        one.scale = torch.ones(8)
    pickle.dumps(placed)
    assert_equal(copy.deepcopy(placed), net)
    assert_equal(placed, net)


def test_attribute_of_a_module_with_two_names() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    class Coder(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.linear, self.shared, self.scale = nn.Linear(8, 8), shared, torch.ones(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.shared(self.linear(x)) * self.scale  # type: ignore[no-any-return]  # of torch

    shared = Scaled()
    net: Any = Coder(nn.Sequential(Coder(shared), Coder(shared)))
    placed = graphplan.partition(copy.deepcopy(net), {0: "1MiB", "cpu": "1MiB"}, calls=lambda one: one(X))
    for number in range(4):
        for one in (placed, net) if number else ():
            one.scale = torch.full((8,), 3.0 * number)
            one.shared[1].scale = torch.full((8,), 5.0 * number)
            one.shared[1].shared.scale = torch.full((8,), 7.0 * number)
        assert_equal(placed.shared[1], net.shared[1])
        assert_equal(placed, net)


def test_attribute_names_that_differ_only_in_a_dot() -> None:
    class Named(Net):
        def forward(self, x: torch.Tensor, times: Any = None) -> torch.Tensor:
            return super().forward(x) + self.inner_offset

    net = Named()
    net.inner_offset = torch.rand(2, 8)
    assert_equal(*both(net))


def test_hooks_see_current_values() -> None:
    placed, net = both(Net())
    for one in (placed, net):
        one.linear.register_forward_hook(lambda _module, _args, result: 2 * result)
    with pytest.warns(GraphplanWarning, match="hooks were added"):
        assert_equal(placed, net)
    for one in (placed, net):
        one.scale = torch.ones(8)
    assert_equal(placed, net)


def test_threads_see_values_set_before_their_calls() -> None:
    class Constant(Net):
        def forward(self, x: torch.Tensor, times: Any = None) -> torch.Tensor:
            return 0 * self.linear(x) + self.scale

    placed, _ = both(Constant())
    wrong: list[Any] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(50):
            placed.scale = torch.full((8,), float(number))
            start = threading.Barrier(3)

            def call(start: Any = start, number: int = number) -> None:
                start.wait()
                with torch.no_grad():
                    if placed(X)[0, 0] != number:
                        wrong.append(number)

            threads = [threading.Thread(target=call) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_saved_capture_accepts_changed_values(tmp_path: Any) -> None:
    for _ in range(2):
        torch.manual_seed(0)
        net = Net()
        placed = graphplan.partition(
            copy.deepcopy(net), {0: "1MiB", "cpu": "1MiB"}, (X,), capture_cache=tmp_path
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error", GraphplanWarning)
            for one in (placed, net):
                one.scale = torch.ones(8)
            assert_equal(placed, net)


def test_changed_shape_or_dtype_is_retraced() -> None:
    placed, net = both(Net())
    for value in (torch.ones(1), torch.ones(8, dtype=torch.float64), None):
        for one in (placed, net):
            one.unread = value
        with pytest.warns(GraphplanWarning, match="traced again"):
            assert_equal(placed, net)


@pytest.mark.filterwarnings("ignore:.*traced again:graphplan.GraphplanWarning")
def test_copies_have_separate_values() -> None:
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


def test_training_step_uses_changed_values() -> None:
    net = Net()
    placed = graphplan.partition(copy.deepcopy(net), {0: "1MiB", "cpu": "1MiB"}, (X,), train=True)
    for value in (1.0, 2.0, 3.0):
        for one in (placed, net):
            one.scale = torch.full((8,), value)
            with torch.enable_grad():
                one(X).sum().backward()
        assert torch.allclose(placed.linear.weight.grad.cpu(), net.linear.weight.grad, atol=1e-4)
    with torch.enable_grad():
        first = placed(X).sum()
        placed.scale = torch.ones(8)
        placed(X).sum().backward()
        with pytest.raises(RuntimeError, match="'scale' has had other values in a later forward pass"):
            first.backward()
