"""Bounds of integer programs hold whatever HiGHS says."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from placements import ample, steered
from scipy.optimize import linprog

from graphplan.passes.placement.bounds import linear_program
from graphplan.passes.placement.bounds.linear_program import LinearProgram, branch_and_bound
from graphplan.passes.placement.params import Effort


class Made:
    """A random program of which ``z``, at least the cost, is to be small; and its parts."""

    def __init__(self, seed: int, *, integer: bool) -> None:
        draw = np.random.default_rng(seed)
        self.program = LinearProgram()
        self.count = int(draw.integers(2, 8))
        self.cost = draw.integers(-9, 10, self.count).astype(float)
        self.sizes = draw.integers(0, 8, (int(draw.integers(1, 4)), self.count)).astype(float)
        self.room = np.round(self.sizes.sum(axis=1) * draw.uniform(0.2, 0.9, len(self.sizes)))
        self.least = float(draw.integers(0, self.count))
        variables = [self.program.variable(1.0, integer=integer) for _ in range(self.count)]
        self.z = self.program.variable(1000.0, low=-1000.0)
        for row, room in zip(self.sizes, self.room, strict=True):
            self.program.at_most([(v, float(s)) for v, s in zip(variables, row, strict=True)], float(room))
        self.program.at_least([(v, 1.0) for v in variables], self.least)
        priced = [(v, float(c)) for v, c in zip(variables, self.cost, strict=True)]
        if seed % 2:
            self.program.at_most([*priced, (self.z, -1.0)], 0.0)
        else:
            self.program.equal([*priced, (self.z, -1.0)], 0.0)

    def best(self) -> float:
        """Of all sets."""
        found = math.inf
        for taken in itertools.product([0.0, 1.0], repeat=self.count):
            each = np.array(taken)
            if (self.sizes @ each <= self.room).all() and each.sum() >= self.least:
                found = min(found, float(self.cost @ each))
        return found

    def relaxed(self) -> float:
        """With fractions, by HiGHS with presolving."""
        rows = np.vstack([self.sizes, -np.ones(self.count)])
        found = linprog(self.cost, A_ub=rows, b_ub=[*self.room, -self.least], bounds=(0, 1), method="highs")
        return math.inf if found.x is None else float(found.fun)

    def solve(self) -> linear_program.Node | None:
        self.program.freeze()
        return self.program.solve(
            self.z, np.array(self.program.low), np.array(self.program.high), Effort(1e9)
        )


@pytest.mark.parametrize("seed", range(40))
def test_linear_program_bound_is_at_most_its_optimum(seed: int) -> None:
    made = Made(seed, integer=False)
    node, optimum = made.solve(), made.relaxed()
    if node is None:
        assert optimum == math.inf
        return
    assert node.bound <= optimum
    assert node.bound == pytest.approx(optimum, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_any_duals_of_valid_sign_prove_a_bound(seed: int) -> None:
    made, draw = Made(seed, integer=False), np.random.default_rng(seed)
    made.program.freeze()
    optimum, low, high = made.relaxed(), np.array(made.program.low), np.array(made.program.high)
    cost = np.zeros(len(low))
    cost[made.z] = 1.0
    for _ in range(50):
        y_ub = -draw.exponential(1.0, len(made.program._b_ub)) * (draw.random(len(made.program._b_ub)) < 0.7)
        y_eq = draw.normal(size=len(made.program._b_eq))
        assert made.program._proven(cost, y_ub, y_eq, low, high) <= optimum


def test_wrong_duals_prove_only_weaker_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(*args: Any, **kwargs: Any) -> Any:
        found = linprog(*args, **kwargs)
        if found.status == 0:
            found.ineqlin.marginals = found.ineqlin.marginals * 1.5 + 0.25
        return found

    monkeypatch.setattr(linear_program, "linprog", spoilt)
    for seed in range(20):
        made = Made(seed, integer=False)
        node = made.solve()
        assert node is None or node.bound <= made.relaxed()


def test_an_infeasible_program_has_no_solution() -> None:
    program = LinearProgram()
    x, z = program.variable(1.0), program.variable(10.0)
    program.at_least([(x, 1.0)], 0.75)
    program.at_most([(x, 1.0)], 0.25)
    program.at_most([(x, 1.0), (z, -1.0)], 0.0)
    program.freeze()
    assert program.solve(z, np.zeros(2), np.array([1.0, 10.0]), Effort(1e9)) is None


def test_infeasibility_claimed_only_by_highs_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def lying(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return SimpleNamespace(status=2, nit=1, x=None) if len(calls) == 1 else linprog(*args, **kwargs)

    monkeypatch.setattr(linear_program, "linprog", lying)
    made = Made(1, integer=False)
    assert made.relaxed() < math.inf
    node = made.solve()
    assert node is not None
    assert node.bound == -math.inf


@pytest.mark.parametrize("status", [1, 3, 4])
def test_bound_is_open_if_highs_gives_up(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = SimpleNamespace(status=status, nit=1, x=None)
    monkeypatch.setattr(linear_program, "linprog", lambda *_, **__: given_up)
    made = Made(1, integer=True)
    assert branch_and_bound(made.program, made.z, math.inf, ample()) == -math.inf


@pytest.mark.parametrize("seed", range(40))
def test_branch_and_bound_equals_exhaustive_search(seed: int) -> None:
    made = Made(seed, integer=True)
    best = made.best()
    with steered(linear_program, milp_nodes=10**6):
        found = branch_and_bound(made.program, made.z, 1e6, ample(1e12))
    if best == math.inf:
        assert found == math.inf
        return
    assert found <= best
    assert found == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("visits", [1.0, 1e5])
def test_less_effort_proves_only_weaker_bounds(visits: float) -> None:
    for seed in range(20):
        made = Made(seed, integer=True)
        assert branch_and_bound(made.program, made.z, 1e6, ample(visits)) <= made.best()


def test_bound_is_not_raised_beyond_the_target() -> None:
    made = Made(3, integer=True)
    root = made.solve()
    assert root is not None
    effort = ample()
    assert branch_and_bound(made.program, made.z, root.bound - 1.0, effort) == root.bound
    assert effort.total - effort.visits < 50_000


def test_program_too_large_for_the_effort_is_not_solved() -> None:
    program = LinearProgram()
    z = program.variable(10.0)
    program.at_least([(z, 1.0)], 2.0)
    program.freeze()
    low, high = np.zeros(1), np.array([10.0])
    node = program.solve(z, low, high, Effort(0.01))
    assert node is not None
    assert node.bound == -math.inf
    effort = Effort(1e6)
    solved = program.solve(z, low, high, effort)
    assert solved is not None
    assert solved.bound == pytest.approx(2.0)
    assert effort.visits < 1e6
