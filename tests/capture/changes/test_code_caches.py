"""Global tables and caches of a model's code hold no traced tensors after a trace."""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphplan
from graphplan.capture.changes.code_caches import CodeCaches

X = torch.linspace(-1, 1, 32).reshape(4, 8)
TABLE: dict[Any, Any] = {"other": 1}
LISTED: list[Any] = []
MEMBERS = set[torch.Tensor]()
LOCAL = threading.local()
CONTEXT: ContextVar[Any] = ContextVar("CONTEXT", default=None)
FIRST: Any = None


def made(length: int) -> torch.Tensor:
    return torch.arange(length).float()


def memo(function: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    known: dict[int, torch.Tensor] = {}

    @functools.wraps(function)
    def run(length: int) -> torch.Tensor:
        if length not in known:
            known[length] = function(length)
        return known[length]

    return run


limited = functools.lru_cache(maxsize=4)(made)
unlimited = functools.cache(made)
memoized = memo(made)


def in_a_table(length: int) -> torch.Tensor:
    if length not in TABLE:
        TABLE[length] = {"positions": (made(length),)}
    return TABLE[length]["positions"][0]  # type: ignore[no-any-return]


def in_a_list(length: int) -> torch.Tensor:
    if not LISTED:
        LISTED.append(made(8))
    return LISTED[0][:length]  # type: ignore[no-any-return]


def in_a_set(length: int) -> torch.Tensor:
    if not MEMBERS:
        MEMBERS.add(made(8))
    return next(iter(MEMBERS))[:length]


def under_a_name(length: int) -> torch.Tensor:
    global FIRST
    if FIRST is None:
        FIRST = made(8)
    return FIRST[:length]  # type: ignore[no-any-return]


def of_itself(length: int) -> torch.Tensor:
    if not hasattr(of_itself, "known"):
        of_itself.known = made(8)  # type: ignore[attr-defined]
    return of_itself.known[:length]  # type: ignore[attr-defined, no-any-return]


def in_a_default(length: int, known: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    return known.setdefault(length, made(length))


def in_a_named_default(length: int, *, known: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    return known.setdefault(length, made(length))


def in_a_thread(length: int) -> torch.Tensor:
    return LOCAL.__dict__.setdefault(length, made(length))  # type: ignore[no-any-return]


def in_a_context(length: int) -> torch.Tensor:
    if CONTEXT.get() is None:
        CONTEXT.set(made(8))
    return CONTEXT.get()[:length]  # type: ignore[no-any-return]


class Positions:
    by_length: dict[int, torch.Tensor] = {}  # noqa: RUF012  # what is tested
    last: torch.Tensor | None = None

    def of(self, length: int) -> torch.Tensor:
        type(self).last = self.by_length.setdefault(length, made(length))
        return self.by_length[length]


positions = Positions()


def in_a_class(length: int) -> torch.Tensor:
    return positions.of(length)


@functools.cache
def tables() -> dict[int, torch.Tensor]:
    return {}


def in_a_result(length: int) -> torch.Tensor:
    return tables().setdefault(length, made(length))


tables()

WAYS = [
    *(limited, unlimited, memoized, in_a_table, in_a_list, under_a_name, of_itself, in_a_class, in_a_result),
    *(in_a_set, in_a_default, in_a_named_default, in_a_thread, in_a_context),
]


class Elsewhere:
    """Proxy of an object that does not exist now."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is of no use here")


class Lazy(dict[str, Any]):
    """Makes its items on access."""

    def items(self) -> Any:
        raise RuntimeError("it cannot be made")

    values = items


ELSEWHERE, LAZY = Elsewhere(), Lazy()


class Added(nn.Module):
    def __init__(self, positions: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.positions = nn.Linear(8, 8), positions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.positions(x.shape[-1]) + globals()["limited"](x.shape[-1])


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    limited.cache_clear()
    unlimited.cache_clear()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(getattr(way, "__qualname__", way)))
def test_callers_model_finds_no_traced_tensors(way: Callable[[int], torch.Tensor]) -> None:
    model, before = Added(way), dict(TABLE)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    assert dict(TABLE) == before
    expected = nn.functional.linear(X, model.linear.weight, model.linear.bias) + 2 * torch.arange(8)
    assert type(model(X)) is torch.Tensor
    torch.testing.assert_close(model(X), expected)
    torch.testing.assert_close(placed(X), expected)
    del placed
    again = graphplan.partition(model, {"cpu": "1MiB"}, (X[:3],))  # what eager has kept since stays
    torch.testing.assert_close(again(X[:3]), expected[:3])


class Branched(Added):
    """Has no graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return -found if x.sum() > 0 else found


def test_model_without_graph_finds_no_trial_tensors() -> None:
    model = Branched(limited)
    with pytest.warns(graphplan.GraphplanWarning, match="module by module"):
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    assert type(limited(8)) is torch.Tensor
    torch.testing.assert_close(placed(X + 1), model(X + 1))


def test_caches_of_other_modules_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_package_of_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tables.py").write_text(
        "import functools, torch\n\n@functools.lru_cache\ndef positions(n):\n"
        "    return torch.arange(n).float()\n"
    )
    (package / "net.py").write_text(
        "from torch import nn\nfrom . import tables\n\n\nclass Net(nn.Module):\n"
        "    def forward(self, x):\n        return x + tables.positions(x.shape[-1])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("a_package_of_models.net")
    graphplan.partition(net.Net(), {"cpu": "1MiB"}, (X,))
    assert type(net.tables.positions(8)) is torch.Tensor


class Linked:
    def __init__(self) -> None:
        self.others: list[Linked] = []


class Linking(nn.Module):
    """Adds long, heavily linked objects to a table."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chain, linked = list[Any](), [Linked() for _ in range(30)]
        for _ in range(2000):
            chain = [chain]
        for one in linked:
            one.others = list(linked)
        TABLE.update(chain=chain, linked=linked)
        return x + 1


def test_objects_of_any_shape_are_looked_through() -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            graphplan.partition(Linking(), {"cpu": "1MiB"}, (X,))
    finally:
        TABLE.pop("chain", None)
        TABLE.pop("linked", None)


class Odd:
    __module__ = property(lambda self: "of the object")  # type: ignore[assignment]


DATA, ODD = [{"text": "of a set of data"}], Odd()


class Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if isinstance(ODD, Odd) else x


def test_globals_not_named_in_code_are_not_searched() -> None:
    model = Reading()
    assert id(DATA) not in CodeCaches(model)._tables
    graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)


def test_plain_entries_added_by_a_trace_are_kept() -> None:
    class Counting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            TABLE.setdefault("seen", "yes")
            return x + 1

    try:
        graphplan.partition(Counting(), {"cpu": "1MiB"}, (X,))
        assert TABLE["seen"] == "yes"
    finally:
        TABLE.pop("seen", None)


class Branching(Added):
    """Has no graph, so that it is tried on tensors without values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if float(y.detach().sum()) > 0 else -y


@pytest.mark.parametrize("way", [limited, in_a_table, in_a_context])
def test_model_without_graph_finds_no_traced_tensors(way: Callable[[int], torch.Tensor]) -> None:
    model = Branching(way)
    with pytest.warns(graphplan.GraphplanWarning, match="could not be traced"):
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    torch.testing.assert_close(placed(X), model(X))
