"""Hooks that store activations: traced if the model reads them; for other readers, a warning."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from builders import run_placed
from cases import in_turn
from torch import nn

import graphplan

X = torch.linspace(-1, 1, 32).reshape(4, 8)
_seen: dict[str, torch.Tensor] = {}


class Tapped(nn.Module):
    """Reads in forward the activations that a hook has stored."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.hidden: Any = None
        self.seen = _seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x)
        hidden = self.seen["layer"] if self.hidden is None else self.hidden
        return self.head(hidden.relu())


def by_itself(model: Tapped) -> Callable[..., None]:
    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        model.hidden = output

    return keep


def by_its_dict(model: Tapped) -> Callable[..., None]:
    seen: dict[str, torch.Tensor] = {}
    model.seen = seen
    return lambda module, args, output: seen.update(layer=output)


def by_a_global(model: Tapped) -> Callable[..., None]:
    return lambda module, args, output: _seen.update(layer=output)


def by_a_partial(model: Tapped) -> Callable[..., None]:
    def keep(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        setattr(model, name, output)

    return functools.partial(keep, "hidden")


def by_a_default(model: Tapped) -> Callable[..., None]:
    def keep(module: nn.Module, args: Any, output: torch.Tensor, to: Tapped = model) -> None:
        to.hidden = output

    return keep


WAYS = [by_itself, by_its_dict, by_a_global, by_a_partial, by_a_default]


@pytest.mark.parametrize(("hook", "called"), in_turn(WAYS, [False, True]))
def test_hook_state_read_by_model_is_traced(
    hook: Callable[[Tapped], Callable[..., None]], called: bool
) -> None:
    model = Tapped()
    model.layer.register_forward_hook(hook(model))
    _seen.clear()
    if called:
        model(X)
    before = dict(_seen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
        assert _seen == before
        found = [placed(x) for x in (X, X + 1)]
    assert placed._graphplan.programs
    torch.testing.assert_close(found, [model(x) for x in (X, X + 1)])


class Store:
    """Of others."""

    def __init__(self) -> None:
        self.calls = 0
        self.last: Any = None
        self.all: list[torch.Tensor] = []

    def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.calls, self.last = self.calls + 1, output


def in_an_attribute(store: Store) -> Callable[..., None]:
    return lambda module, args, output: setattr(store, "last", output)


def in_a_list(store: Store) -> Callable[..., None]:
    kept = store.all
    return lambda module, args, output: kept.append(output)


def by_a_method(store: Store) -> Callable[..., None]:
    append = store.all.append
    return lambda module, args, output: append(output)


def in_a_variable(store: Store) -> Callable[..., None]:
    calls = 0

    def count(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal calls
        calls += 1

    return count


def of_its_own(store: Store) -> Callable[..., None]:
    return store.keep


@pytest.mark.parametrize("hook", [in_an_attribute, in_a_list, by_a_method, in_a_variable, of_its_own])
def test_hooks_storing_outside_the_model_warn(hook: Callable[[Store], Callable[..., None]]) -> None:
    store, model = Store(), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    keep = hook(store)
    handle = model[0].register_forward_hook(keep)
    with pytest.warns(graphplan.GraphplanWarning, match="The hook .* of '0' stores something") as told:
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    assert len(told) == 1
    assert told[0].filename == __file__
    assert (store.calls, store.last, store.all) == (0, None, [])
    if keep.__closure__ and keep.__name__ == "count":
        assert [cell.cell_contents for cell in keep.__closure__] == [0]
    torch.testing.assert_close(placed(X), model(X))
    handle.remove()


class Own(nn.Sequential):
    """A class of this file, whose globals the model's code reads."""


class Calling:
    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        _seen["inherited"] = output


class Inherits(Calling):
    pass


class Extractor(nn.Module):
    """Holds a model without being part of it."""

    last: Any = None

    def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.last = output


def in_a_table(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    _seen["table"] = output


def on_itself(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    on_itself.last = output  # type: ignore[attr-defined]


def in_a_module(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    GLOBAL.last = output


def in_a_class(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    Extractor.last = output


def by_another(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    in_a_table(module, args, output)


GLOBAL = Extractor()


@pytest.mark.parametrize("kind", [Own, nn.Sequential])
@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (in_a_table, True),
        (Inherits(), True),
        (on_itself, True),
        (in_a_module, True),
        (GLOBAL.keep, True),
        (in_a_class, False),
        (by_another, False),
    ],
)
def test_hooks_store_no_traced_tensors(kind: type[nn.Sequential], hook: Any, said: bool) -> None:
    model = kind(nn.Linear(8, 8), nn.ReLU())
    model[0].register_forward_hook(hook)
    _seen.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    assert [str(one.message).startswith("The hook ") for one in told] == [True] * said
    assert (_seen, GLOBAL.last, Extractor.last, vars(on_itself)) == ({}, None, None, {})
    torch.testing.assert_close(placed(X), model(X))
    _seen.clear()
    GLOBAL.last, Extractor.last = None, None
    vars(on_itself).clear()


class Proxy:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is of no use here")


def test_hooks_using_loggers_or_proxies_do_not_warn() -> None:
    model, proxy, logger = nn.Sequential(nn.Linear(8, 8)), Proxy(), logging.getLogger("of a hook")

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        logger.debug("%s", output if output is not None else proxy)

    model[0].register_forward_hook(note)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphplan.partition(model, {"cpu": "1MiB"}, (X,))


def require_weights_of_its_own(model: nn.Module, name: str) -> None:
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, {0: "1MiB"}, (X,))
        placed.get_submodule(name).bias.add_(1)
        found = run_placed(machine, placed, (X,))
        model.get_submodule(name).bias.add_(1)
        torch.testing.assert_close(found, model(X))


def test_containers_in_hook_closures_refer_to_copied_modules() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    names = {part: name for name, part in model.named_modules()}
    others = [("next", (model[1],))]

    def add(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + int(names[module]) + others[0][1][0].bias

    for part in model:
        part.register_forward_hook(add)
    require_weights_of_its_own(model, "1")
    assert list(names) == list(model.modules())


_parts: dict[str, Any] = {}


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.parts, self.shared = _parts, [threading.Lock(), lambda: self.layer.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["layer"](x)  # type: ignore[no-any-return]


def test_foreign_containers_are_unchanged() -> None:
    model = Looked()
    _parts.update(layer=model.layer, bias=lambda: model.layer.bias)
    model.layer.register_forward_hook(lambda module, args, output: output * len(_parts))
    functions = _parts["bias"], model.shared[1]
    with pytest.warns(graphplan.GraphplanWarning, match="'shared'"):
        require_weights_of_its_own(model, "layer")
    assert (_parts["bias"], model.shared[1]) == functions
    _parts.clear()


def test_result_changing_hook_is_traced_without_warning() -> None:
    model, scale = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), {"by": 3.0}
    model[0].register_forward_hook(lambda module, args, output: output * scale["by"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    torch.testing.assert_close(placed(X), model(X))


class Branched(Tapped):
    """Has no graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return -found if x.sum() > 0 else found


@pytest.mark.parametrize("hook", WAYS)
def test_hooks_of_models_without_graph_store_for_copy(
    hook: Callable[[Tapped], Callable[..., None]],
) -> None:
    model = Branched()
    model.layer.register_forward_hook(hook(model))
    _seen.clear()
    with pytest.warns(graphplan.GraphplanWarning, match="module by module"):
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    for x in (X + 1, X - 1):
        torch.testing.assert_close(placed(x), model(x))


def test_functions_in_attributes_know_the_placed_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    linear = model[0].forward
    model[0].forward = lambda x: linear(x) + model.shifts[0]()
    model.shifts = [lambda: model[0].bias]  # type: ignore[assignment]
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, {0: "1MiB"}, (X,))
        with torch.no_grad():
            placed[0].bias.add_(1)
        torch.testing.assert_close(run_placed(machine, placed, (X,)), model(X) + 2)


def test_self_referring_function_is_copied_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8))

    def repeated(x: torch.Tensor, times: int = 3) -> torch.Tensor:
        return repeated(model[0](x), times - 1) if times else x

    model.forward = repeated  # type: ignore[method-assign]
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    torch.testing.assert_close(placed(X), model(X))


class Shifted(nn.Module):
    """Adds its bias as something in an attribute of it has it."""

    def __init__(self, keep: Callable[[Shifted], Any], read: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.read, self.scale = nn.Linear(8, 8), read, 1.0
        object.__setattr__(self, "kept", keep(self))  # no submodule where it is a proxy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.read(self.kept) * self.scale


def bound(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: run()


class Named(NamedTuple):
    """Holds a function."""

    run: Callable[[], torch.Tensor]
    times: int


def bias_of(layer: nn.Linear) -> torch.Tensor:
    return layer.bias


HOLDERS: dict[str, tuple[Callable[[Shifted], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda model: (lambda: model.layer.bias,), lambda kept: kept[0]()),
    "named tuple": (lambda model: Named(lambda: model.layer.bias, 2), lambda kept: kept.run()),
    "deque": (lambda model: deque([lambda: model.layer.bias]), lambda kept: kept[0]()),
    "object": (lambda model: SimpleNamespace(of=lambda: model.layer.bias), lambda kept: kept.of()),
    "method": (lambda model: MethodType(lambda _: model.layer.bias, model.layer), lambda kept: kept()),
    "partial": (lambda model: bound(partial(bias_of, model.layer)), lambda kept: kept()),
    "reference": (weakref.ref, lambda kept: kept().layer.bias),
    "proxy": (weakref.proxy, lambda kept: kept.layer.bias),
    "list of references": (lambda model: [weakref.ref(model.layer)], lambda kept: kept[0]().bias),
}


@pytest.mark.parametrize(("holder", "lazy"), in_turn(HOLDERS, [False, True]))
def test_functions_and_weak_references_refer_to_placed_model(holder: str, lazy: bool) -> None:
    model = Shifted(*HOLDERS[holder])
    with torch.no_grad():
        expected = model(X) + model.layer.bias + 3
    with graphplan.simulate({0: "1MiB"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has no example inputs|'scale' was")
        placed = graphplan.partition(model, {0: "1MiB"}, () if lazy else (X,))
        del model
        gc.collect()
        placed(X)
        with torch.no_grad():
            placed.layer.bias.add_(1)
        placed.scale = 2.0  # it is traced again
        torch.testing.assert_close(placed(X), expected)


class Pair(tuple[Any, ...]):
    """A tuple class whose constructor takes two arguments, not an iterable."""

    def __new__(cls, one: Any, other: Any) -> Pair:
        return super().__new__(cls, (one, other))

    def __deepcopy__(self, memo: Any) -> Pair:
        return self


def test_tuples_of_unknown_classes_are_unchanged() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.pair = Pair(lambda: model[0].bias, 2)  # type: ignore[assignment]
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    assert placed.pair is model.pair
    torch.testing.assert_close(placed(X), model(X))
