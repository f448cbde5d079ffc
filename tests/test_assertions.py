"""Assertions of what a tensor holds: a trace passes over them.

PYTEST_DONT_REWRITE: those below are to be Python's own.
"""

from __future__ import annotations

import linecache
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import largest_difference
from torch import nn

import graphplan
from graphplan._compat.assertions import truth_that_passes

X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", graphplan.GraphplanWarning)
        yield


def _holds(x: torch.Tensor) -> None:
    assert torch.isfinite(x).all()
    assert (x < 9).all(), f"{x.shape}"
    assert bool((x < 9).all())
    assert (x < 9).all().item()


def _not(x: torch.Tensor) -> None:
    assert not torch.isnan(x).any(), "not a number"
    assert not x.max().item() > 9


def _and(x: torch.Tensor) -> None:
    assert x.shape[0] < 99 and x.min() >= -9 and not x.max() > 9  # noqa: PT018  # what is tested


def _or(x: torch.Tensor) -> None:
    assert x.max() < 9 or x.min() < 9
    assert not x.min() < 9 or (x < 9).all() or x.shape[0] > 99, "one of three"


def _chained(x: torch.Tensor) -> None:
    assert -9 < x.min() < 9


def _all(x: torch.Tensor) -> None:
    assert all(row.max() < 9 for row in x.split(1))
    rows = [row.max() > 9 for row in x.split(1)]
    assert not any(rows)


class Asserts(nn.Module):
    def __init__(self, check: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.check = nn.Linear(4, 4), check

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.check(x)
        return self.layer(x)


WRITTEN_OUT = pytest.mark.skipif(sys.version_info >= (3, 14), reason="all() of a generator is a loop there")


@pytest.mark.parametrize("check", [_holds, _not, _and, _or, _chained, pytest.param(_all, marks=WRITTEN_OUT)])
def test_an_assertion_of_values_is_no_branch(check: Callable[[torch.Tensor], None]) -> None:
    model = Asserts(check).eval()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (X,))
        assert largest_difference(placed(X), model(X)) < 1e-6
        assert largest_difference(placed(X * 100), model.layer(X * 100)) < 1e-4


@pytest.mark.parametrize("branch", ["if", "in", "raise"])
def test_other_branches_on_values_stay(branch: str) -> None:
    def check(x: torch.Tensor) -> None:
        if branch == "if" and x.max() > 9:
            x.mul_(0)
        if branch == "in" and x.max() > 9:
            x.mul_(0)
            assert x.min() < 9
        if branch == "raise" and x.max() > 9:
            raise ValueError

    with pytest.warns(graphplan.GraphplanWarning, match="data-dependent"):
        graphplan.partition(Asserts(check), {"cpu": "1GiB"}, (X,))


def test_assertion_on_sizes_becomes_a_guard() -> None:
    def check(x: torch.Tensor) -> None:
        assert x.shape[0] % 2 == 0

    placed = graphplan.partition(Asserts(check), {"cpu": "1GiB"}, (X,))
    with pytest.raises(AssertionError):
        placed(X[:1])


class Asked:
    """Notes what the assertion wants that asks for its truth."""

    def __init__(self, truth: bool) -> None:
        self.truth, self.wanted = truth, list[bool | None]()

    def __bool__(self) -> bool:
        self.wanted.append(truth_that_passes(sys._getframe(1)))
        return self.truth

    def itself(self) -> Asked:
        return self


def test_each_assertion_form_asks_for_truth() -> None:
    true, false = Asked(True), Asked(False)
    assert true
    assert not false
    assert true and not false, "message"  # noqa: PT018  # what is tested
    assert bool(true)
    assert [one for one in [1] if true]
    value = 1 if true else 2
    kind = AssertionError if false else ValueError
    if false:
        raise AssertionError
    while false:
        value += 1
    assert false or (value and kind)
    assert false or not true or value
    assert true.wanted == [True, True, True, None, None, False]
    assert false.wanted == [False, False, None, None, None, True, True]


def test_operands_of_every_form_are_found() -> None:
    true, false = Asked(True), Asked(False)
    # fmt: off
    assert (
        true
        .itself()
    )
    # fmt: on
    assert true if X.dim() else false
    assert not (true if X.numel() == 0 else false)
    assert (one := true)
    assert not (other := false)
    assert true.wanted == [True, True, True]
    assert false.wanted == [False, False]
    assert (one, other) == (true, false)


class Equal(Asked):
    """Is its own result of a comparison, as a tensor's is another tensor."""

    def __eq__(self, other: object) -> Any:
        return self

    __hash__ = None


def test_comparisons_of_items_are_no_operands() -> None:
    false = Equal(False)
    assert 1 not in [false]
    assert false.wanted == [None]


def test_operand_of_a_long_assertion_is_found() -> None:
    """The jump over the message is longer than one instruction can tell."""
    source = f"def check(value):\n    assert value, [{'value, ' * 300}]\n"
    linecache.cache["<long>"] = len(source), None, source.splitlines(keepends=True), "<long>"
    namespace = dict[str, Any]()
    exec(compile(source, "<long>", "exec"), namespace)
    true = Asked(True)
    namespace["check"](true)
    assert true.wanted == [True]
