"""Changes of what a trace may have read: objects, containers, classes, hooks, weights, order of modules."""

from __future__ import annotations

import copy
import functools
import warnings
from array import array
from collections import UserList, deque
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from builders import bytes_of
from torch import nn

import graphplan
from graphplan import GraphplanWarning

ROOMY = {"cpu": "1GiB"}
X = torch.randn(3, 8)


class Settings:
    def __init__(self) -> None:
        self.table = {"a": [1.0, {"b": 2.0}]}
        self.inner = SimpleNamespace(k=1.0)
        self.folder, self.sizes = Path("a"), range(3)  # stay as they are
        self.recent = deque([1.0, torch.ones(1)])
        self.more, self.few = UserList([1.0]), {Factor(1.0)}
        self.times, self.codes = functools.partial(Factor(1.0).times), array("d", [1.0])
        self.itself: dict[str, Any] = {}
        self.itself["around"] = self.itself

    def factors(self) -> Any:
        (few,) = self.few
        numbers = self.recent[0] * self.more[0] * few.k * self.codes[0]  # type: ignore[operator]  # of two types
        return self.times(numbers) * self.recent[1]


class Factor:
    def __init__(self, k: float) -> None:
        self.k = k

    def times(self, x: Any) -> Any:
        return x * self.k


class Hook:
    """An object with an attribute."""

    def __init__(self) -> None:
        self.k = 2.0

    def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        return result * self.k


class Net(nn.Module):
    """Reads objects that no module registers."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.act = nn.Tanh()
        self.act.register_forward_hook(Hook())
        self.settings, self.names, self.nested = Settings(), {"x"}, {"l": [1.0, 2.0], "s": {3}}
        self.slope = functools.partial(nn.functional.leaky_relu, negative_slope=0.5)
        self.scale, self.hidden = torch.ones(8), [nn.Linear(8, 8)]
        self.width = nn.Parameter(torch.randn(8, 4))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor * self.scale * self.settings.factors()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for head in self.heads.values():
            x = head(x)
        x = self.slope(self.hidden[0](self.act(x))) * self.settings.table["a"][1]["b"]  # type: ignore[index]
        x = x * self.settings.inner.k * len(self.names) * self.nested["l"][1] * len(self.nested["s"])  # type: ignore
        return self.scaled(x) + (x @ self.width).sum() / self.width.shape[1]


def _in_another_order(net: Any) -> None:
    head = net.heads.pop("a")
    net.heads["a"] = head


def _another_hook(net: Any) -> None:
    net.act._forward_hooks.clear()
    net.act.register_forward_hook(lambda module, args, result: 3 * result)


def _new_head(net: Any) -> None:
    torch.manual_seed(1)
    net.heads["b"] = nn.Linear(8, 8)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "the order of modules": _in_another_order,
    "a module of the same class": _new_head,
    "an object": lambda net: setattr(net.settings.inner, "k", 3.0),
    "a dict in an object": lambda net: net.settings.table["a"][1].update(b=5.0),
    "a deque": lambda net: net.settings.recent.__setitem__(0, 3.0),
    "a tensor in a deque": lambda net: net.settings.recent[1].mul_(2),
    "a list of a class": lambda net: net.settings.more.__setitem__(0, 0.5),
    "an object in a set": lambda net: setattr(next(iter(net.settings.few)), "k", 3.0),
    "the object of a partial": lambda net: setattr(net.settings.times.func.__self__, "k", 0.5),
    "an array": lambda net: net.settings.codes.__setitem__(0, 2.0),
    "a set": lambda net: net.names.add("y"),
    "a list next to a set": lambda net: net.nested["l"].__setitem__(1, 4.0),
    "a set in a dict": lambda net: net.nested["s"].add(7),
    "a partial": lambda net: net.slope.keywords.update(negative_slope=0.25),
    "a weight of a hidden module": lambda net: net.hidden[0].bias.add_(1),
    "a hidden module": lambda net: net.hidden.__setitem__(0, nn.Sigmoid()),
    "the state of a hook": lambda net: setattr(next(iter(net.act._forward_hooks.values())), "k", 5.0),
    "another hook": _another_hook,
    "an attribute in place of the class's": lambda net: setattr(net, "factor", 6.0),
    "a weight of another shape": lambda net: setattr(net, "width", nn.Parameter(torch.ones(8, 2))),
    "data of another shape": lambda net: setattr(
        net.width, "data", torch.full((8, 5), 0.25, device=net.width.device)
    ),
}


@pytest.mark.slow
@torch.no_grad()
def test_each_change_is_retraced_once() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        net = Net()
        placed = graphplan.partition(net, machine.max_memory, (X,))
        net = copy.deepcopy(net)
        for name, change in CHANGES.items():
            before = net(X)
            change(net)
            change(placed)
            assert not torch.equal(before, net(X)), name
            with pytest.warns(GraphplanWarning, match="traced again") as found:
                assert torch.allclose(placed(X), net(X), rtol=1e-4), name
            assert len(found) == 1, name
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert torch.allclose(placed(X + 1), net(X + 1), rtol=1e-4), name


@torch.no_grad()
def test_changed_classes_are_retraced() -> None:
    class Mine(Net):
        pass

    net = Mine()
    placed = graphplan.partition(net, ROOMY, (X,))
    placed.scaled(X)
    for name, value in {"factor": 4.0, "scaled": lambda self, x: x - 1}.items():
        setattr(Mine, name, value)
        with pytest.warns(GraphplanWarning, match=f"'Mine.{name}' is new"):
            assert torch.allclose(placed(X), net(X), rtol=1e-4)
        assert torch.allclose(placed.scaled(X), net.scaled(X), rtol=1e-4)


@torch.no_grad()
def test_replaced_modules_free_their_memory_before_retrace() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with graphplan.simulate({0: bytes_of(net) + 4096}) as machine:
        placed = graphplan.partition(net, machine.max_memory, (torch.ones(2, 64),))
        net = copy.deepcopy(net)
        net[0] = nn.Linear(64, 64)
        placed[0] = copy.deepcopy(net[0])
        with pytest.warns(GraphplanWarning, match="traced again"):
            assert torch.allclose(placed(torch.ones(2, 64)), net(torch.ones(2, 64)), atol=1e-5)
        assert machine.peak_bytes(0) <= machine.max_memory[0]


def test_references_to_caller_objects_do_not_cause_a_retrace() -> None:
    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.models, self.step = [model], 0

    net = Net()
    net.trainer = trainer = Trainer(net.act)
    placed = graphplan.partition(net, ROOMY, (X,))
    placed.trainer.step = trainer.step = 1  # type: ignore[union-attr]
    placed.note = Settings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(placed(X), net(X), rtol=1e-4)


def test_method_assigned_to_a_placed_model_is_retraced() -> None:
    net = Net()
    placed = graphplan.partition(net, ROOMY, (X,))
    for one in (net, placed):
        one.scaled = MethodType(lambda self, x: x * self.factor * 3, one)
    with pytest.warns(GraphplanWarning, match="traced again"):
        assert torch.allclose(placed(X), net(X), rtol=1e-4)


def test_hooks_and_parameter_attributes_together() -> None:
    net = Net()
    placed = graphplan.partition(net, ROOMY, (X,))
    for one in (net, placed):
        one.heads["a"].register_forward_hook(lambda module, args, result: 2 * result)
    placed.note = "mine"
    with pytest.warns(GraphplanWarning, match="hooks"):
        assert torch.allclose(placed(X), net(X), rtol=1e-4)
    placed.note = "another"
    assert torch.allclose(placed(X), net(X), rtol=1e-4)


def test_global_module_hooks_are_called() -> None:
    class Doubling(nn.Sequential):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().__call__(x)

    net = Doubling(nn.Linear(8, 8), nn.Linear(8, 8))
    placed, seen = graphplan.partition(net, ROOMY, (X,)), list[str]()

    def hook(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        seen.append(type(module).__name__)
        return result + 1

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        expected = net(X)
        with pytest.warns(GraphplanWarning, match="hooks"):
            assert torch.allclose(placed(X), expected, atol=1e-5)
        seen.clear()
        placed(X)
        assert seen == ["Linear", "Linear", "Doubling"]
        with pytest.raises(graphplan.CaptureError, match="remove them first"):
            graphplan.partition(net, ROOMY, (X,))
    finally:
        handle.remove()
    assert torch.allclose(placed(X), net(X), atol=1e-5)


def test_missing_gradients_raise_or_warn() -> None:
    placed = graphplan.partition(Net(), ROOMY, (X,))
    with pytest.raises(graphplan.PlanError, match="grad=True"):
        torch.func.grad(lambda x: placed(x).sum())(X)
    with pytest.warns(GraphplanWarning, match="grad=True"):
        assert not placed(X.clone().requires_grad_()).requires_grad


def test_torch_func_transforms_equal_eager_mode() -> None:
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}):
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        placed = graphplan.partition(net, {0: "1MiB", 1: "1MiB"}, (X,), grad=True)

        def loss(model: nn.Module) -> Callable[..., torch.Tensor]:
            return lambda weights: torch.func.functional_call(model, weights, (X,)).cpu().sum()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = torch.func.grad(loss(placed))({k: v.detach() for k, v in placed.named_parameters()})
            expected = torch.func.grad(loss(net))({k: v.detach() for k, v in net.named_parameters()})
            assert all(torch.allclose(found[k].cpu(), expected[k], atol=1e-5) for k in expected)
            batches = torch.stack([X, X + 1])
            assert torch.allclose(torch.vmap(placed)(batches), torch.vmap(net)(batches), atol=1e-5)
        with pytest.raises(graphplan.CaptureError, match=r"torch\.func"):
            torch.vmap(placed)(torch.randn(2, 3, 5, 8))


@torch.no_grad()
def test_writes_to_weights_in_attributes_do_not_retrace() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("shift", torch.full((8,), 3.0))
            self.listed, self.alias = [self.layer.weight], self.shift

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.layer(x), self.listed[0]) * self.alias

    net = Listed()
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(copy.deepcopy(net), machine.max_memory, (X,))
        for _ in range(2):
            for one in (net, placed):
                one.layer.weight.mul_(2)
                one.shift.add_(1)  # type: ignore[operator]  # a tensor
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert torch.allclose(placed(X), net(X), rtol=1e-4, atol=1e-5)
