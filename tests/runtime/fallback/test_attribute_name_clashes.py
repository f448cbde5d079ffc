"""A model's attributes take precedence over graphplan's, which are also under ``.graphplan``."""

from __future__ import annotations

import copy
import pickle
import warnings
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import pytest
import torch
from builders import bytes_of, largest_difference
from torch import nn

import graphplan

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
NAMES = ["graph", "code", "plan", "plans", "profile", "graph_module", "graph_modules", "recompile", "_graph"]
NAMES += ["print_readable", "_first", "_enter", "known_plan"]
ALL = pytest.mark.parametrize("names", [NAMES, ["graphplan"]], ids=["short", "graphplan"])


class Named(nn.Module):
    """Children, parameters or buffers of some names."""

    def __init__(self, names: list[str], kind: str = "child", by_data: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)
        self.names, self.kind, self.by_data = names, kind, by_data
        for name in names:
            if kind == "child":
                self.add_module(name, nn.Linear(64, 64))
            elif kind == "parameter":
                self.register_parameter(name, nn.Parameter(torch.randn(64)))
            else:
                self.register_buffer(name, torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.names:
            own = getattr(self, name)
            x = own(x) if self.kind == "child" else x + own
        return x if self.by_data and float(x.sum()) > 1e9 else self.last(x)


@pytest.mark.parametrize("kind", ["child", "parameter", "buffer"])
@ALL
def test_child_modules_may_have_any_name(names: list[str], kind: str) -> None:
    model = Named(names, kind).eval()
    room = int(0.7 * bytes_of(model)) + 16384
    with graphplan.simulate({0: 4 * room, 1: 4 * room}) as machine, torch.no_grad():
        placed = graphplan.partition(model, {0: room, 1: room}, (X,))
        for found in (placed, copy.deepcopy(placed), pickle.loads(pickle.dumps(placed))):
            for name in names:
                if kind == "child":
                    assert type(getattr(found, name)) is nn.Linear
                else:
                    own = getattr(found, name).cpu().data
                    assert largest_difference(own, getattr(model, name).data) == 0
            assert largest_difference(found(X), model(X)) < 1e-6
        if "graphplan" not in names:
            assert placed.graphplan.plan.method == "export"
            code = placed.graphplan.graph_module
            code.register_forward_hook(lambda *_: None)  # now it reads attributes by their names
            assert largest_difference(placed(X), model(X)) < 1e-6
            assert placed.graphplan.profile(X).summary()
        for name in names if kind == "child" else ():
            setattr(placed, name, copy.deepcopy(getattr(placed, name)))
            for one in (model, placed):
                getattr(one, name).weight.zero_()
            assert largest_difference(placed(X), model(X)) < 1e-6
        assert len(machine.max_memory) == 2


@pytest.mark.parametrize("name", [*NAMES, "graphplan"])
def test_child_names_are_free_without_example_inputs(name: str) -> None:
    model = nn.Sequential()
    model.add_module(name, nn.BatchNorm1d(16))
    model.add_module("last", nn.Linear(16, 16))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*the first call will be traced")
        placed = graphplan.partition(model.eval(), {"cpu": "1MiB"})
        assert largest_difference(placed(X), model(X)) < 1e-6


@ALL
def test_child_names_are_free_in_models_without_graphs(names: list[str]) -> None:
    model = Named(names, by_data=True).eval()
    with graphplan.simulate({0: "1MiB"}) as machine, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        placed: Any = graphplan.partition(model, machine.max_memory, (X,))
        assert all(isinstance(getattr(placed, name), nn.Linear) for name in names)
        assert largest_difference(placed(X), model(X)) < 1e-6
        if "graphplan" not in names:
            assert placed.graphplan.plan.method == "hooks"
            assert placed.graphplan.plans == (placed.graphplan.plan,)
            with pytest.raises(graphplan.PlanError, match="no generated code"):
                print(placed.graphplan.code)


class Profiled(nn.Linear):
    def profile(self) -> str:
        return "mine"


def test_view_attributes_do_not_hide_model_attributes() -> None:
    placed = graphplan.partition(Profiled(16, 16), {"cpu": "1MiB"}, (X,))
    assert placed.profile() == "mine"
    assert placed.plan is placed.graphplan.plan
    assert placed.plans == (placed.plan,)
    assert placed.code == placed.graphplan.code
    assert placed.graph_module is placed.graph_modules[0]
    assert {"graphplan", "plan", "code", "profile", "weight"} <= set(dir(placed))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        print(placed.nonsense)
    with pytest.raises(AttributeError, match="no attribute '_state'"):
        print(placed._state)


class Registered(nn.Module):
    """Its subclasses must pass a name when they are defined."""

    named: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.named[name] = cls


class Doubled(Registered, name="doubled"):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))

    def once(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_derived_classes_do_not_call_init_subclass() -> None:
    model = Doubled(Doubled(nn.Linear(16, 16))).eval()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed: Any = graphplan.partition(model, machine.max_memory, (X,))
        assert largest_difference(placed(X), model(X)) < 1e-6
        assert largest_difference(placed.layer.once(X), model.layer.once(X)) < 1e-6
    assert isinstance(placed, Doubled)
    assert isinstance(placed.layer, Doubled)
    assert Registered.named == {"doubled": Doubled}


class Table(dict[str, int], nn.Module):
    """A module that is also a dict, so that instances have another layout."""

    __hash__, __eq__ = object.__hash__, object.__eq__

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layer = nn.Linear(16, 16)
        self["factor"] = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self["factor"]


def test_module_that_subclasses_dict_is_placed() -> None:
    model = Table().eval()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (X,))
        assert largest_difference(placed(X), model(X)) < 1e-6


class Scales(ABC, nn.Module):
    """Its first base has another layout than a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def __init_subclass__(cls, *, by: int) -> None:
        cls.by = by

    @abstractmethod
    def scaled(self, x: torch.Tensor) -> torch.Tensor: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.layer(x))


class Doubles(Scales, by=2):
    by: ClassVar[int]

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


@pytest.mark.parametrize("model", [Doubles(), nn.Sequential(Doubles())])
def test_module_with_abstract_first_base_is_placed(model: nn.Module) -> None:
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (X,))
        assert largest_difference(placed(X), model(X)) < 1e-6
    with pytest.raises(TypeError, match="by"):
        type("Other", (Doubles,), {})
