"""Changes that a call makes to the caller's lists and dicts equal eager mode."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from builders import largest_difference
from torch import nn

import graphplan
from graphplan.capture.structure import leaves_of

X = torch.linspace(-1, 1, 32).reshape(2, 16)
ROOM = {0: "8KiB", 1: "8KiB"}


class Changes(nn.Module):
    """Two layers, and what ``change`` does with what they compute."""

    def __init__(self, change: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.change = nn.Linear(16, 16), nn.Linear(16, 16), change

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h = self.first(x)
        result = self.change(state, h)
        return self.last(h) if result is None else (self.last(h), result)


@dataclass
class Holds:
    h: torch.Tensor


class Named(NamedTuple):
    keys: list[torch.Tensor]
    number: int


def append(state: Any, h: torch.Tensor) -> None:
    state.append(h)


def insert(state: Any, h: torch.Tensor) -> None:
    state.insert(0, {"h": h})


def extend_inner(state: Any, h: torch.Tensor) -> None:
    for inner in state:
        inner.append(h)


def replace(state: Any, h: torch.Tensor) -> None:
    state["h"] = torch.cat([state["h"], h])


def rename(state: Any, h: torch.Tensor) -> None:
    state["new"] = state.pop("old") + h


def count(state: Any, h: torch.Tensor) -> Any:
    state["seen"] += h.shape[0]
    state["text"] = "seen"
    return state


def pop_and_change(state: Any, h: torch.Tensor) -> Any:
    inner = state.pop("inner")
    inner.append(h)
    return inner


def named(state: Any, h: torch.Tensor) -> None:
    state.keys.append(h * state.number)


def beside(state: Any, h: torch.Tensor) -> Any:
    state["h"] = h
    return state["x"], state["kept"]


def move(state: Any, h: torch.Tensor) -> None:
    state["b"], state["a"] = state["a"], [h]


CASES: list[tuple[Callable[[Any, torch.Tensor], Any], Callable[[], Any]]] = [
    (append, list),
    (append, lambda: [X, X + 1]),
    (insert, lambda: [{"a": X}, X]),
    (extend_inner, lambda: ([], [X])),
    (replace, lambda: {"h": X, "other": X + 1}),
    (replace, lambda: OrderedDict(h=X)),
    (replace, lambda: UserDict(h=X)),
    (rename, lambda: {"old": X, "other": X + 1}),
    (rename, lambda: defaultdict(list, old=X)),
    (count, lambda: {"seen": 3, "h": X}),
    (pop_and_change, lambda: {"inner": [X], "h": X}),
    (named, lambda: Named([], 2)),
    (beside, lambda: {"x": X, "kept": X + 1, "none": None}),
    (move, lambda: {"a": [X], "b": [X + 1]}),
]


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", graphplan.GraphplanWarning)
        yield


def containers(value: Any) -> list[Any]:
    """A container and all in it, in order."""
    if isinstance(value, dict | UserDict):
        return [value, *(one for part in value.values() for one in containers(part))]
    return (
        [value, *(one for part in value for one in containers(part))]
        if isinstance(value, list | tuple)
        else []
    )


def positions(before: list[Any], after: Any) -> list[int | None]:
    """Where each container is now."""
    places = {id(one): index for index, one in enumerate(containers(after))}
    return [places.get(id(one)) for one in before]


def alike(a: Any, b: Any) -> None:
    """Assert that two states have the same structure, keys in the same order, and values."""
    assert type(a) is type(b)
    if isinstance(a, dict | UserDict):
        assert list(a) == list(b)
        a, b = list(a.values()), list(b.values())
    if isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            alike(one, other)
    elif isinstance(a, torch.Tensor):
        assert largest_difference(a, b) < 1e-5
    else:
        assert a == b


@pytest.mark.parametrize(("change", "make"), CASES)
def test_changed_contents_equal_eager(change: Any, make: Any) -> None:
    model, mine, other = Changes(change), make(), make()
    before, tensors = (containers(mine), containers(other)), (leaves_of(mine), leaves_of(other))
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (X, make()))
        found, expected = placed(X, mine), model(X, other)
        assert len(placed.plans) == 1
    alike(found, expected)
    alike(mine, other)
    # what was there before is where the model has put it
    assert positions(before[0], mine) == positions(before[1], other)
    for own, others in zip(*tensors, strict=True):
        assert any(own is one for one in leaves_of(mine)) == any(others is one for one in leaves_of(other))


def test_objects_keep_their_identity() -> None:
    kept, inner = torch.ones(2, 16), [torch.zeros(2, 16)]
    state = {"inner": inner, "kept": kept}
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(Changes(pop_and_change), machine.max_memory, (X, dict(state)))
        _, returned = placed(X, state)
    assert returned is inner
    assert state["kept"] is kept
    assert list(state) == ["kept"]
    assert len(inner) == 2


def test_custom_cache_has_two_graphs() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))

        def forward(
            self, x: torch.Tensor, cache: dict[int, tuple[torch.Tensor, torch.Tensor]]
        ) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                k, v = layer(x).chunk(2, -1)
                if index in cache:
                    k, v = torch.cat([cache[index][0], k], 1), torch.cat([cache[index][1], v], 1)
                cache[index] = k, v
                x = torch.softmax(x @ k.mT, -1) @ v
            return x

    model = Attends().eval()
    steps = [torch.randn(1, size, 16) for size in (5, 1, 1, 1, 1)]
    with graphplan.simulate({0: "16KiB", 1: "16KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (steps[0], {}), max_length=16)
        mine: dict[int, Any] = {}
        other: dict[int, Any] = {}
        for step in steps:
            assert largest_difference(placed(step, mine), model(step, other)) < 1e-5
            alike(mine, other)
        assert len(placed.plans) == 2


def test_one_list_for_two_arguments_raises() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor, a: list[Any], b: list[Any]) -> torch.Tensor:
            a.append(x)
            b.append(x + 1)
            return x * 2

    with graphplan.simulate(ROOM) as machine:
        placed = graphplan.partition(Both(), machine.max_memory, (X, [], []))
        one: list[Any] = []
        with pytest.raises(graphplan.InputError, match="a and b are one object"):
            placed(X, one, one)
    assert not one


@pytest.mark.parametrize("change", ["both", "one"])
def test_one_list_in_two_places_raises(change: str) -> None:
    def both(state: Any, h: torch.Tensor) -> Any:
        state["b"].append(h)
        if change == "both":
            state["a"].append(h + 1)
        return [*state["a"], *state["b"]]

    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(Changes(both), machine.max_memory, (X, {"a": [], "b": []}))
        one: list[Any] = []
        with pytest.raises(graphplan.InputError, match=r"state\['.'\] and state\['.'\] are one object"):
            placed(X, {"a": one, "b": one})
        assert not one
        placed(X, {"a": [], "b": one})
    assert len(one) == 1


def test_cache_tensors_are_returned_with_a_changed_list() -> None:
    transformers = pytest.importorskip("transformers")

    def change(state: Any, h: torch.Tensor) -> torch.Tensor:
        state["log"].append(h)
        kept: torch.Tensor = state["cache"].layers[0].keys
        return kept

    def make() -> dict[str, Any]:
        cache = transformers.DynamicCache()
        cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
        return {"cache": cache, "log": []}

    model, mine, other = Changes(change), make(), make()
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (X, make()))
        assert largest_difference(placed(X, mine), model(X, other)) < 1e-5
    alike(mine["log"], other["log"])


def test_changed_contents_have_gradients_in_training() -> None:
    for how in ({"train": True}, {"grad": True}):
        model = Changes(append)
        with graphplan.simulate({0: "64KiB", 1: "64KiB"}) as machine:
            placed = graphplan.partition(model, machine.max_memory, (X, []), **how)
            state: list[Any] = []
            (placed(X, state).sum() + state[0].square().sum()).backward()
            assert len(state) == 1


def test_training_step_with_changed_contents_starts_at_the_loss() -> None:
    class WithLoss(Changes):
        def forward(self, x: torch.Tensor, state: Any) -> Any:
            y = super().forward(x, state)
            return {"loss": y.sum(), "logits": y}

    with graphplan.simulate(ROOM) as machine:
        placed = graphplan.partition(WithLoss(append), machine.max_memory, (X, []), train=True)
        state: list[Any] = []
        placed(X, state)["loss"].backward()
        assert len(state) == 1
        with pytest.raises(RuntimeError, match=r"result 'logits', but the planned step .* from 'loss'"):
            placed(X, state)["logits"].sum().backward()


@pytest.mark.parametrize("place", ["unnamed", "attribute"])
def test_unsupported_changes_run_module_by_module(place: str) -> None:
    class Unnamed(Changes):
        def forward(self, x: torch.Tensor, *state: Any) -> Any:
            return super().forward(x, state[0])

    model = Unnamed(append) if place == "unnamed" else Changes(lambda state, h: setattr(state, "h", h))
    make: Any = list if place == "unnamed" else lambda: Holds(X)
    mine, other = make(), make()
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match="forward changes .* in its arguments"):
            placed = graphplan.partition(model, machine.max_memory, (X, make()))
        assert largest_difference(placed(X, mine), model(X, other)) < 1e-5
    alike(*((mine, other) if place == "unnamed" else (mine.h, other.h)))


def test_saved_capture_changes_contents_too(tmp_path: Path) -> None:
    for _ in range(2):
        with graphplan.simulate(ROOM) as machine, torch.no_grad():
            model = Changes(append)
            placed = graphplan.partition(model, machine.max_memory, (X, [X]), capture_cache=tmp_path)
            mine, other = [X], [X]
            assert largest_difference(placed(X, mine), model(X, other)) < 1e-5
            alike(mine, other)
