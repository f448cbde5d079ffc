"""State that a call leaves in objects held by a model equals eager mode, by a graph where possible."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import in_turn
from torch import nn
from transformers import DynamicCache

import graphplan
from graphplan.capture.changes.attribute_data import attributes_of
from graphplan.capture.changes.attribute_snapshots import restore_attributes

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Rows:
    """All rows of the calls so far."""

    def __init__(self) -> None:
        self.rows: Any = None

    def with_new(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = x if self.rows is None else torch.cat([self.rows, x])
        return self.rows  # type: ignore[no-any-return]


class Table:
    """One that is made when it is asked for."""

    def __init__(self) -> None:
        self.table: Any = None

    def first(self, count: int) -> torch.Tensor:
        if self.table is None or len(self.table) < count:
            self.table = torch.arange(float(count))[:, None]
        return self.table[:count]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Kept:
    rows: Any = None
    calls: int = 0


class Named(dict[str, Any]):
    """A dictionary with attributes."""


class With(nn.Module):
    """Computes with an object, one of its own or one that it shares."""

    def __init__(self, kind: str, held: Any) -> None:
        super().__init__()
        self.linear, self.kind, self.held = nn.Linear(8, 8), kind, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x + getattr(self, self.kind)(x)  # type: ignore[no-any-return]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return self.held.with_new(x).mean(0)  # type: ignore[no-any-return]

    def rows_of_a_list(self, x: torch.Tensor) -> torch.Tensor:
        return self.held[-1].with_new(x).mean(0)  # type: ignore[no-any-return]

    def made_in_the_call(self, x: torch.Tensor) -> torch.Tensor:
        if self.held is None:
            self.held = Rows()
        return self.rows(x)

    def put_into_a_dict(self, x: torch.Tensor) -> torch.Tensor:
        return self.held.setdefault("rows", Rows()).with_new(x).mean(0)  # type: ignore[no-any-return]

    def replaced(self, x: torch.Tensor) -> torch.Tensor:
        before, self.held = self.held, Kept(x.mean(0))
        return before.rows  # type: ignore[no-any-return]

    def replaced_number(self, x: torch.Tensor) -> torch.Tensor:
        self.held = Kept(calls=self.held.calls + 1)
        return x * self.held.calls

    def inside_another(self, x: torch.Tensor) -> torch.Tensor:
        self.held.inner.calls += 1
        return x * self.held.inner.calls  # type: ignore[no-any-return]

    def attribute_of_a_dict(self, x: torch.Tensor) -> torch.Tensor:
        self.held.calls += 1
        return x * self.held.calls  # type: ignore[no-any-return]

    def first_attribute(self, x: torch.Tensor) -> torch.Tensor:
        before = getattr(self.held, "before", 0.0)
        self.held.before = x.mean(0)
        return x + before

    def written_in_place(self, x: torch.Tensor) -> torch.Tensor:
        return self.held.sum.add_(x.mean(0))  # type: ignore[no-any-return]

    def cache(self, x: torch.Tensor) -> torch.Tensor:
        keys, _ = self.held.update(x[None, None], x[None, None], 0)
        return keys[0, 0].mean(0)  # type: ignore[no-any-return]

    def begun_anew(self, x: torch.Tensor) -> torch.Tensor:
        self.held.rows = None
        return self.held.with_new(x).mean(0) + self.held.with_new(x).mean(0)  # type: ignore[no-any-return]

    def counted_only(self, x: torch.Tensor) -> torch.Tensor:
        self.held.inner.calls += 1
        self.held.last = x.detach()
        return x

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return self.held.first(len(x))  # type: ignore[no-any-return]

    def table_made_in_the_call(self, x: torch.Tensor) -> torch.Tensor:
        if self.held is None:
            self.held = Table()
        return self.table(x)


def counter() -> SimpleNamespace:
    return SimpleNamespace(inner=SimpleNamespace(calls=0), last=None)


def named() -> Named:
    made = Named()
    vars(made)["calls"] = 0
    return made


GOES_ON: dict[str, Any] = {
    "rows": Rows,
    "rows_of_a_list": lambda: [Rows(), Rows()],
    "made_in_the_call": lambda: None,
    "put_into_a_dict": dict,
    "replaced": lambda: Kept(torch.zeros(8)),
    "replaced_number": Kept,
    "inside_another": counter,
    "attribute_of_a_dict": named,
    "first_attribute": SimpleNamespace,
    "written_in_place": lambda: SimpleNamespace(sum=torch.zeros(8)),
    "cache": DynamicCache,
}
DOES_NOT: dict[str, Any] = {
    "begun_anew": Rows,
    "counted_only": counter,
    "table": Table,
    "table_made_in_the_call": lambda: None,
}


def model_of(kind: str, made: Any, *, shared: bool) -> nn.Module:
    """Two layers that share an object; or one."""
    return nn.Sequential(With(kind, made), With(kind, made)) if shared else With(kind, made)


def same_calls(placed: nn.Module, model: nn.Module) -> None:
    for rows in (X, 0.5 * X, torch.cat([X, X]), X):
        torch.testing.assert_close(placed(rows), model(rows))


@pytest.mark.parametrize(("kind", "shared"), in_turn(GOES_ON, [False, True]))
@torch.no_grad()
def test_state_read_by_next_call_runs_module_by_module(kind: str, shared: bool) -> None:
    model = model_of(kind, GOES_ON[kind](), shared=shared)
    with pytest.warns(
        graphplan.GraphplanWarning, match="nothing from the call before|computes something else"
    ):
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    same_calls(placed, model)


@pytest.mark.parametrize(("kind", "shared"), in_turn(DOES_NOT, [False, True]))
@torch.no_grad()
def test_state_unused_by_later_calls_is_traced(kind: str, shared: bool) -> None:
    model = model_of(kind, DOES_NOT[kind](), shared=shared)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
    same_calls(placed, model)


def test_attributes_of_objects_are_restored() -> None:
    model = nn.Sequential(With("inside_another", counter()), With("rows_of_a_list", [Rows()]))
    before = attributes_of(model)
    model(X)
    assert sorted(restore_attributes(before)) == ["calls", "rows"]
    assert (model[0].held.inner.calls, model[1].held[0].rows) == (0, None)
