"""Attributes that cannot be copied are shared with a warning; a model whose forward uses one has no graph."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import largest_difference
from torch import nn

import graphplan

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
KINDS: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "generator": lambda: (i for i in range(1000)),
    "TextIOWrapper": lambda: open(__file__, encoding="utf-8"),  # noqa: SIM115  # the model closes it
    "list": lambda: [1, threading.Lock()],
    "module": lambda: logging,
}


class Holder(nn.Module):
    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.linear, self.thing = nn.Linear(16, 16), thing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Using(Holder):
    """Uses its attribute in each call: a counter, under a lock."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lock, numbers = self.thing
        with lock:
            return self.linear(x) + next(numbers)


class Model(nn.Module):
    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held, self.last, self.parts = held, nn.Linear(16, 16), [held]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.held(x))


@pytest.mark.parametrize("kind", KINDS)
def test_uncopyable_attribute_is_shared_with_warning(kind: str) -> None:
    thing = KINDS[kind]()
    model = Model(Holder(thing))
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine, torch.no_grad():
        with pytest.warns(
            graphplan.GraphplanWarning, match=rf"'held\.thing' \({kind}\) cannot be c"
        ) as caught:
            placed = graphplan.partition(model, machine.max_memory, (X,))
        assert [one.filename for one in caught] == [__file__]
        assert placed.plan.method == "export"
        assert placed.held.thing is thing
        assert placed.parts[0] is placed.held
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert largest_difference(placed(X), model(X)) < 1e-6
        plain = graphplan.unplace(placed)
        assert plain.held.thing is thing
        assert largest_difference(plain(X), model(X)) < 1e-6
    if kind == "TextIOWrapper":
        thing.close()


class Turning(nn.Module):
    """Takes the next layer, and the next number, in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.turns, self.numbers = itertools.cycle(self.layers), iter(range(1, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.turns)(x) * next(self.numbers)  # type: ignore[no-any-return]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="itertools takes no copies of its iterators")
@pytest.mark.parametrize("args", [(), (X,)])
def test_iterators_advance_in_each_call(args: tuple[torch.Tensor, ...]) -> None:
    torch.manual_seed(0)
    model = Turning()
    with graphplan.simulate({0: "1MiB"}), torch.no_grad():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            placed = graphplan.partition(model, {0: "1MiB"}, args)
            found = [placed(X) for _ in range(5)]
        assert "forward uses 'turns' (cycle), which advances" in " ".join(str(one.message) for one in told)
        torch.testing.assert_close(found, [model(X) for _ in range(5)])


def test_uncopyable_attribute_used_in_forward_runs_module_by_module() -> None:
    things = [threading.Lock(), (i for i in range(1000))]
    model = Model(Using(things))
    plain = Model(Holder(None))
    plain.load_state_dict(model.state_dict())
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning) as caught:
            placed = graphplan.partition(model, machine.max_memory, (X,))
        shared, ran = (str(one.message) for one in caught)
        assert shared.startswith("'held.thing' (list) cannot be copied")
        assert "forward uses 'held.thing' (list), which cannot be copied" in ran
        assert "the model runs module by module" in ran
        results = [placed.last.weight.new_zeros(()) + placed(X).mean() for _ in range(3)]
        assert len({round(float(result), 5) for result in results}) == 3
    with pytest.raises(graphplan.NoGraphError, match=r"forward uses 'held\.thing'"):
        graphplan.plan(model, {"cpu": "1MiB"}, (X,))


class Keeping(Holder):
    """Keeps its last result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.thing = {"last": [self.linear(x)]}
        return self.thing["last"][0]


class Reading(Holder):
    """Reads a result of an earlier computation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.cached


def test_attribute_with_gradient_history_is_copied_as_values() -> None:
    old_style = nn.utils.weight_norm(nn.Linear(16, 16))
    for model in (Model(Holder(None)), Model(Keeping(None)), Model(old_style)):
        model.held.cached = model.last.weight * 2
        expected = model(X)
        with graphplan.simulate({0: "1MiB"}) as machine:
            placed = graphplan.partition(model, machine.max_memory, (X,))
            assert largest_difference(placed(X), expected) < 1e-6
            assert torch.equal(placed.held.cached, model.held.cached)
            assert placed.held.cached is not model.held.cached
            assert placed.held.cached.is_leaf

    for model in (Model(Holder(None)), Model(old_style)):  # what is not read needs no gradient: no warning
        model.held.cached = model.last.weight * 2
        graphplan.partition(model, {"cpu": "1MiB"}, (X,), grad=True)
    model = Model(Reading(None))
    model.held.cached = model.last.weight * 2
    with pytest.warns(graphplan.GraphplanWarning, match=r"'held\.cached' was computed with gradients"):
        graphplan.partition(model, {"cpu": "1MiB"}, (X,), grad=True)


def test_uncopyable_attribute_with_tensors_raises() -> None:
    model = Model(Holder([threading.Lock(), torch.ones(2)]))
    with pytest.raises(graphplan.CaptureError, match=r"'held\.thing' of Model.*keep it outside the model"):
        graphplan.partition(model, {"cpu": "1MiB"}, (X,))


def test_logger_attribute_is_shared_without_warning() -> None:
    model = Model(Holder(logging.getLogger("some")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    assert placed.held.thing is model.held.thing


class Saved(nn.Module):
    """A copy of it has tensors of its own, as of what is copied by a file of its code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale

    def __deepcopy__(self, memo: Any) -> Saved:
        made = Saved()
        made.load_state_dict(self.state_dict())
        return made


@pytest.mark.parametrize("budgets", [{0: "64KiB", 1: "64KiB"}, {0: "4KiB", "cpu": "1MiB"}])
def test_modules_that_copy_themselves_have_the_placed_tensors(budgets: Any) -> None:
    # each call was an error that said that their weights had been moved
    model = nn.Sequential(nn.Linear(16, 16), Saved(), Saved()).eval()
    own = dict(model.named_parameters())
    with graphplan.simulate({0: "64KiB", 1: "64KiB"}), torch.no_grad():
        placed = graphplan.partition(model, budgets, (X,), strict=True)
        assert largest_difference(placed(X), model(X)) < 1e-5
        assert largest_difference(placed(X[:2]), model(X[:2])) < 1e-5
    assert all(own[name] is parameter for name, parameter in model.named_parameters())


class MadeAnew(nn.Module):
    """Its copies are made by its constructor, as those of layers that keep no more than their settings."""

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # that of a subclass might differ: there is none

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


def test_layers_recreated_by_deepcopy_keep_their_mode() -> None:
    model, x = nn.Sequential(MadeAnew(), nn.Linear(8, 8)).eval(), torch.ones(2, 8)
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (x,))
        assert not placed[0].training
        placed.eval()(x)
        assert len(placed.plans) == 1


class Fused(nn.Module):
    """A copy of it is written otherwise."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found

    def __deepcopy__(self, memo: Any) -> Fused:
        return Fused(nn.Sequential(nn.ReLU(), nn.Identity()), nn.ReLU())


def test_deepcopy_with_other_modules_is_placed() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Fused(nn.ReLU())).eval()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        assert torch.equal(placed(X), model(X))
