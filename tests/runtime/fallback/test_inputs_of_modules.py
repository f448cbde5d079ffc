"""Module by module, writes to inputs and results equal eager mode."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import largest_difference
from torch import nn
from torch.utils._pytree import register_pytree_node

import graphplan

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
BUDGETS = [{"cpu": "1MiB"}, {0: "4KiB", 1: "4KiB", "cpu": "1MiB"}, {0: "1MiB", "cpu": "1MiB"}]


class Layer(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.fc, self.run = nn.Linear(16, 16), run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.fc, *args, **kwargs)


class Stack(nn.Module):
    """Layers whose outer code cannot be traced."""

    def __init__(self, outer: Callable[..., Any], layer: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.outer = nn.ModuleList(Layer(layer) for _ in range(4)), outer

    def forward(self, *args: Any) -> Any:
        found = self.outer(self.layers, *args)
        return found if float(torch.rand(())) < 2 else None


def compare(
    outer: Callable[..., Any], layer: Callable[..., Any], budgets: Any, *args: Any, inference: bool = False
) -> None:
    """Results and inputs after two calls equal eager mode's, on the inputs' device."""
    model = Stack(outer, layer).eval()
    with graphplan.simulate(budgets if 0 in budgets else {0: "1MiB"}):
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(copy.deepcopy(model), budgets, copy.deepcopy(args))
        for _ in range(2):
            with torch.inference_mode(inference), torch.no_grad():
                given, expected = copy.deepcopy(args), copy.deepcopy(args)
                found, eager = placed(*given), model(*expected)
            assert plain(found) == plain(eager)
            assert plain(given) == plain(expected)
            assert largest_difference(tensors(found), tensors(eager)) < 1e-5
            assert largest_difference(tensors(given), tensors(expected)) < 1e-5
            assert {tensor.device.type for tensor in tensors((found, given))} == {"cpu"}


def parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict | UserDict):
        return dict(value)
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    return dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor) else None


def plain(value: Any) -> Any:
    found = parts(value)
    if found is None:
        return tuple(value.shape) if isinstance(value, torch.Tensor) else value
    return type(value), {key: plain(part) for key, part in found.items()}


def tensors(value: Any) -> list[torch.Tensor]:
    found = parts(value)
    if found is None:
        return [value] if isinstance(value, torch.Tensor) else []
    return [tensor for part in found.values() for tensor in tensors(part)]


@dataclass
class State:
    h: torch.Tensor
    steps: int = 0
    note: Any = None


class Named(UserDict[str, Any]):
    def __init__(self, values: Any = None, names: tuple[str, ...] = ()) -> None:
        super().__init__(values)
        self.names = names


class Bag:
    """Not a dataclass: its tensors are in an object that refers back to it."""

    def __init__(self, h: torch.Tensor) -> None:
        self.store = SimpleNamespace(h=h, owner=self, bag=weakref.ref(self))

    def __copy__(self) -> Bag:
        raise AssertionError("an object with others that refer to it is not copied")


class Keyed(dict[str, Any]):
    """A class that torch's pytrees do not flatten."""


def each(layers: Any, x: torch.Tensor, context: Any) -> Any:
    for layer in layers:
        x = layer(x, context)
    return x, context


def sets_fields(fc: Any, x: torch.Tensor, state: State) -> torch.Tensor:
    state.h = state.h + fc(x)
    state.steps += 1
    state.note = [state.h]
    return torch.relu(state.h)


def sets_items(fc: Any, x: torch.Tensor, context: Any) -> torch.Tensor:
    context["h"] = context["h"] + fc(x)
    context["all"] = (*context.get("all", ()), context["h"])
    return torch.relu(context["h"])


def sets_attributes(fc: Any, x: torch.Tensor, bag: Any) -> torch.Tensor:
    store = bag.store
    store.h = store.h + fc(x)
    store.all = [*getattr(store, "all", ()), store.h]
    same = store.owner is bag and store.bag() is bag
    return torch.relu(store.h) * (1.0 if same else 2.0)


def appends(fc: Any, x: torch.Tensor, history: Any) -> torch.Tensor:
    history.append(x)
    return fc(x) + history[0]


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize(
    ("layer", "context"),
    [
        (sets_fields, State(torch.zeros(4, 16))),
        (sets_items, {"h": torch.zeros(4, 16)}),
        (sets_items, OrderedDict(h=torch.zeros(4, 16))),
        (sets_items, Keyed(h=torch.zeros(4, 16))),
        (sets_items, UserDict(h=torch.zeros(4, 16))),
        (sets_items, Named({"h": torch.zeros(4, 16)}, ("h",))),
        (appends, []),
        (appends, deque(maxlen=2)),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_items_added_to_inputs_are_kept(layer: Any, context: Any, budgets: Any) -> None:
    compare(each, layer, budgets, X, context)


@pytest.mark.parametrize("budgets", BUDGETS)
def test_tensors_in_objects_of_any_class_are_moved(budgets: Any) -> None:
    model = Stack(each, sets_attributes).eval()
    with graphplan.simulate(budgets if 0 in budgets else {0: "1MiB"}), torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(copy.deepcopy(model), budgets, (X, Bag(torch.zeros(4, 16))))
        for _ in range(2):
            mine, theirs = Bag(torch.zeros(4, 16)), Bag(torch.zeros(4, 16))
            (found, bag), (expected, _) = placed(X, mine), model(X, theirs)
            assert bag is mine is bag.store.owner is bag.store.bag()
            found_in, expected_in = [bag.store.h, *bag.store.all], [theirs.store.h, *theirs.store.all]
            assert largest_difference([found, *found_in], [expected, *expected_in]) < 1e-5
            assert {tensor.device.type for tensor in (found, *found_in)} == {"cpu"}


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("kind", [Bag, lambda h: torch.distributions.Normal(h, h.abs() + 1)])
def test_results_of_any_class_are_on_the_inputs_device(kind: Callable[..., Any], budgets: Any) -> None:
    def outer(layers: Any, x: torch.Tensor) -> Any:
        return [layer(x) for layer in layers]

    def layer(fc: Any, x: torch.Tensor) -> Any:
        return kind(fc(x))

    model = Stack(outer, layer).eval()
    with graphplan.simulate(budgets if 0 in budgets else {0: "1MiB"}), torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(copy.deepcopy(model), budgets, (X,))
        for mine, theirs in zip(placed(X), model(X), strict=True):
            found, expected = (
                [one.store.h] if kind is Bag else [one.loc, one.scale] for one in (mine, theirs)
            )
            assert largest_difference(found, expected) < 1e-5
            assert {tensor.device.type for tensor in found} == {"cpu"}
            assert kind is not Bag or mine.store.owner is mine.store.bag() is mine


@pytest.mark.parametrize("budgets", BUDGETS)
def test_containers_keep_their_identity(budgets: Any) -> None:
    def outer(layers: Any, x: torch.Tensor) -> Any:
        context: dict[str, Any] = {"x": x, "seen": []}
        context["itself"] = context
        for layer in layers:
            x = layer(x, ([x], context))
        return x, len(context["seen"])

    def layer(fc: Any, x: torch.Tensor, given: Any) -> torch.Tensor:
        (first,), context = given
        context["seen"].append(context["itself"] is context)
        return fc(x) * (2.0 if first is x and all(context["seen"]) else 1.0)

    compare(outer, layer, budgets, X)


def accumulates(fc: Any, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_(fc(x))
    return torch.relu(total * 1)


def whole(layers: Any, x: torch.Tensor) -> Any:
    total = torch.zeros_like(x)
    for layer in layers:
        x = layer(x, total)
    return x, total


def by_rows(layers: Any, x: torch.Tensor) -> Any:
    total = torch.zeros(4, *x.shape)
    for index, layer in enumerate(layers):
        x = layer(x, total[index])
    return x, total


def doubles(fc: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return fc(x)


def in_turn(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def unused(layers: Any, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    found = [layer(x) for layer in layers]
    for result in found:
        result.add_(1)
    return x, all(result is x for result in found)


def returned(fc: Any, x: torch.Tensor) -> torch.Tensor:
    fc(x)
    return x


def both(outer: Any, layer: Any) -> Any:
    return pytest.param(outer, layer, id=f"{outer.__name__}-{layer.__name__}")


WRITING = [
    both(whole, accumulates),
    both(by_rows, accumulates),
    both(in_turn, doubles),
    both(unused, returned),
]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize(("outer", "layer"), WRITING)
def test_writes_to_inputs_are_kept(outer: Any, layer: Any, budgets: Any, inference: bool) -> None:
    compare(outer, layer, budgets, X, inference=inference)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("budgets", BUDGETS)
def test_gradients_flow_through_writes_to_inputs(budgets: Any, frozen: bool) -> None:
    def layer(fc: Any, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.clamp_(max=1.0)
        total.add_(fc(x))
        return total * 1

    model = Stack(whole, layer)
    model.layers[1].requires_grad_(not frozen)
    eager, results = copy.deepcopy(model), []
    with graphplan.simulate(budgets if 0 in budgets else {0: "1MiB"}):
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(model, budgets, (X,), grad=True)
        for one in (placed, eager):
            x = X.clone().requires_grad_()
            results.append((x, one(x)))
            sum(part.square().sum() for part in results[-1][1]).backward()
        (x, found), (y, expected) = results
        assert largest_difference([x, x.grad, *found], [y, y.grad, *expected]) < 1e-4
        for mine, theirs in zip(placed.parameters(), eager.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.allclose(mine.grad.cpu(), theirs.grad, atol=1e-4)


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize(
    ("made", "message"),
    [(lambda: X.clone().requires_grad_(), "a leaf Variable"), (lambda: X[:1].expand(4, 16), "single memory")],
)
def test_invalid_writes_raise_as_in_eager_mode(made: Any, message: str, budgets: Any) -> None:
    def layer(fc: Any, x: torch.Tensor) -> torch.Tensor:
        return doubles(fc, x) if float(x.detach().sum()) != 0 else fc(x)

    with graphplan.simulate(budgets if 0 in budgets else {0: "1MiB"}):
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(Stack(in_turn, layer), budgets, (0 * X,), grad=True)
        with pytest.raises(RuntimeError, match=message):
            placed(made())


class Required(OrderedDict[str, Any]):
    """``copy`` cannot copy it."""

    def __init__(self, h: torch.Tensor) -> None:
        super().__init__(h=h)


@pytest.mark.parametrize("kind", [Keyed, Required, Named, State, list, deque, lambda h: (h, [h])])
def test_results_are_on_the_inputs_device(kind: Callable[..., Any]) -> None:
    def outer(layers: Any, x: torch.Tensor) -> Any:
        return [layer(x) for layer in layers]

    def layer(fc: Any, x: torch.Tensor) -> Any:
        h = fc(x)
        return kind([h]) if kind in (list, deque) else kind({"h": h}) if kind is Named else kind(h=h)

    for budgets in BUDGETS:
        compare(outer, layer, budgets, X)


def test_interrupt_restores_the_callers_containers() -> None:
    # torch calls no hook after one: the batch was left on the accelerator
    def stops(fc: Any, x: torch.Tensor, context: Any) -> torch.Tensor:
        context["new"] = x = fc(x) + context["h"]
        if stop:
            raise KeyboardInterrupt
        return x

    model, x, stop = Stack(each, stops).eval(), X.clone(), list[bool]()
    with graphplan.simulate({0: "1MiB"}), torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(model, BUDGETS[2], (x, {"h": x}))
        batch = {"h": x}
        stop.append(True)
        with pytest.raises(KeyboardInterrupt):
            placed(x, batch)
        assert batch["h"] is x
        assert batch["new"].device.type == "cpu"
        stop.clear()
        assert largest_difference(placed(x, {"h": x}), model(x, {"h": x})) < 1e-5


class Flattened:
    """torch's pytrees flatten it to a new dict."""

    def __init__(self, h: Any) -> None:
        self.h = h


def test_class_flattened_to_a_new_dict_is_moved() -> None:
    register_pytree_node(
        Flattened, lambda one: ([dict(vars(one))], None), lambda own, _: Flattened(**next(iter(own)))
    )

    def reads(fc: Any, x: torch.Tensor, context: Any) -> torch.Tensor:
        return fc(x) + context.h

    model = Stack(each, reads).eval()
    with graphplan.simulate({0: "1MiB"}), torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(model, BUDGETS[2], (X, Flattened(X)))
        assert {parameter.device.type for parameter in placed.parameters()} == {"sim"}
        found, expected = placed(X, Flattened(X)), model(X, Flattened(X))
        assert largest_difference([found[0]], [expected[0]]) < 1e-5


def test_results_are_moved_to_device_of_nested_tensors() -> None:
    def outer(layers: Any, bag: Any) -> torch.Tensor:
        return in_turn(layers, bag.store.h)

    model = Stack(outer, lambda fc, x: fc(x)).eval()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine, torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(model, {0: "1MiB", "cpu": "1MiB"}, (Bag(X),))
        machine.reset_peaks()
        assert placed(Bag(X)).device.type == "cpu"
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0]
        assert placed(Bag(X.to("sim:1"))).device == torch.device("sim:1")


class Remembers(nn.Module):
    """Keeps an object and returns it, also inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.memory = nn.Linear(16, 16), SimpleNamespace(h=None)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.fc(x)
        assert h.sum().item() < 1e9  # which no trace can tell
        self.memory.h = h if self.memory.h is None else h + self.memory.h
        return h, self.memory, SimpleNamespace(h=h, memory=self.memory)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Remembers(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        h, memory, both = self.first(x)
        return self.second(h), memory, both


def test_objects_kept_and_returned_stay_on_module_device() -> None:
    # the second call was an error: the object that the module computes with had come to the caller's device
    model = Remembering().eval()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,))
        placed.first.memory.h = None  # what trials have left
        for _ in range(3):
            (found, memory, both), (expected, theirs, fresh) = placed(X), model(X)
            assert largest_difference([found, memory.h.cpu(), both.h], [expected, theirs.h, fresh.h]) < 1e-5
            assert memory is placed.first.memory is both.memory
            assert [one.device.type for one in (memory.h, found, both.h)] == ["sim", "cpu", "cpu"]
