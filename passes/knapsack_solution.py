"""Solve a knapsack for certain costs: a dynamic program, forth and back.

Where steps repeat themselves, the program is at an end when a further layer changes nothing: a device holds
ten layers, be there twenty or two hundred. Its operator does not expand differences, so what the layers that
are left out could still change is no more than so many times the last change, which is taken off the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphplan.passes.repeats import Block, Repeat
from graphplan.passes.sameness import Sameness
from graphplan.passes.spaces import Space

if TYPE_CHECKING:
    from graphplan.passes.knapsack import Elimination, Knapsack, Step

__all__ = ["STEP_WORK", "Chosen", "Solution"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

STEP_WORK = 30_000  # numbers that numpy could touch in the time that a step takes by itself
_CHANGE = {np.dtype(np.float64): 1e-8, np.dtype(np.float32): 1e-6}  # of the income: what layers left out may
_SAMPLE = 13  # of so many numbers one is compared after each time, all when these are the same


@dataclass(frozen=True, slots=True)
class Chosen:
    """The cheapest sets, one per row.

    Attributes:
        cost: (rows,) that no set goes below; that of the set, but for rounding.
        taken: (rows, variables) which variables are 1.
        aside: (rows, variables) those of them that take no capacity, at their price.
        work: numbers that were touched, and what steps take by themselves.
    """

    cost: Floats
    taken: Bools
    aside: Bools
    work: int


@dataclass(slots=True)
class _Trace:
    """What a step decided, for the way back."""

    aside: Bools | None = None
    closed: list[Bools] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """Steps from ``first`` on, ``times`` periods, whose traces are those of one period."""

    first: int
    period: int
    times: int

    @property
    def end(self) -> int:
        return self.first + self.period * self.times


class Solution:
    """One dynamic program.

    Args:
        knapsack: its structure.
        same: what is the same in it.
        cost: (rows, variables) of taking each.
        aside: (rows, variables) what taking it without its size costs beyond, or infinity.
        capacities: (rows,) units.
        dtype: of the states.
        space: memory for them.
    """

    def __init__(
        self,
        knapsack: Knapsack,
        same: Sameness,
        cost: Floats,
        aside: Floats,
        capacities: Ints,
        dtype: npt.DTypeLike,
        space: Space,
    ) -> None:
        self.knapsack, self.same, self.capacities = knapsack, same, capacities
        self.cost, self.aside = cost, aside
        self.rows, self.space, self.dtype = len(capacities), space, np.dtype(dtype)
        self.top = max(1, int(knapsack.capacities.max(initial=0)) + 1)
        self.made: dict[int, Floats] = {}  # by their numbers: factors, ...
        self.choices: dict[int, Bools] = {}  # ... what eliminations decide, ...
        self.tables: dict[int, Floats] = {}  # ... and what steps add
        self.traces: list[_Trace] = []
        self.left_out: list[_LeftOut] = []
        self.income = float(-np.minimum(cost, 0.0).sum(axis=1).min(initial=0.0))  # of who could take all
        self.slack = 0.0
        self.work = STEP_WORK * (1 + len(same.eliminations))

    def solve(self, tables: Sequence[Floats]) -> Chosen:
        """The cheapest set per row; ``tables`` (rows or 1, 2, 2, ...) per scope."""
        self._make(tables)
        state = np.zeros((self.rows, 1), self.dtype)  # nothing is used yet; it grows with what can be
        for number, scope in zip(self.same.factor, self.knapsack.scopes, strict=True):
            if not scope:  # what was eliminated to a constant
                state = state + self.made[number].reshape(-1, 1).astype(self.dtype)
        self.space.begin(state)
        state = self._walk(self.same.blocks, state)
        state[np.arange(state.shape[-1])[None, :] > self.capacities[:, None]] = np.inf
        return self._back(state)

    def _make(self, tables: Sequence[Floats]) -> None:
        """One table of each kind."""
        given = zip(self.same.factor, tables, strict=False)  # eliminations make the rest
        self.made = {number: np.asarray(table) for number, table in given}
        for number, index in self.same.eliminations.items():
            self.made[number], self.choices[number] = self._eliminate(self.knapsack.eliminations[index])
        for number, index in self.same.steps.items():
            self.tables[number] = self._table(self.knapsack.steps[index])

    def _eliminate(self, plan: Elimination) -> tuple[Floats, Bools]:
        scope = (*plan.scope, plan.variable)
        total = np.zeros((1,) * (len(scope) + 1))
        for factor in plan.factors:
            total = total + self._fit(factor, scope)
        without, taken = total[..., 0], total[..., -1]  # of its last variable, which it may not depend on
        taken = taken + self.cost[:, plan.variable].reshape((-1,) + (1,) * len(plan.scope))
        choice = taken < without
        return np.where(choice, taken, without), choice

    def _table(self, step: Step) -> Floats:
        """What is known by this step, over the frontier and its variable."""
        frontier = (*step.frontier, step.variable)
        table = np.stack([np.zeros(self.rows), self.cost[:, step.variable]], axis=1)
        table = table.reshape(self.rows, *(1,) * len(step.frontier), 2)
        for factor in step.factors:
            table = table + self._fit(factor, frontier)
        return table.astype(self.dtype)

    def _fit(self, factor: int, frontier: Sequence[int]) -> Floats:
        """A factor with its axes where the frontier has them, to be broadcast."""
        scope, table = self.knapsack.scopes[factor], self.made[self.same.factor[factor]]
        order = sorted(range(len(scope)), key=lambda i: frontier.index(scope[i]))
        moved = table.transpose(0, *(1 + i for i in order))
        return moved.reshape(moved.shape[0], *(2 if v in scope else 1 for v in frontier))

    # -- forth ------------------------------------------------------------------------------------

    def _walk(self, blocks: Sequence[Block], state: Floats) -> Floats:
        for block in blocks:
            state = self._repeat(block, state) if isinstance(block, Repeat) else self._step(block, state)
        return state

    def _repeat(self, repeat: Repeat, state: Floats) -> Floats:
        """As often as it changes something; the last time stands for all that are left."""
        still = False
        for left in reversed(range(repeat.times)):
            every, slack, first = 1 if still else _SAMPLE, self.slack, len(self.traces)
            before = state[..., ::every].copy()
            state = self._walk(repeat.body, state)
            allowed = _CHANGE[self.dtype] * self.income
            change = (self._change(before, state[..., ::every], every) + self.slack - slack) * left
            if left and still and change <= allowed:
                self.left_out.append(_LeftOut(first, repeat.period, left + 1))
                self.traces.extend(self.traces[first:] * left)
                self.slack += change
                break
            still = change <= allowed
        return state

    def _change(self, before: Floats, after: Floats, every: int) -> float:
        """The largest within the capacities."""
        if before.shape != after.shape:
            return np.inf
        within = np.arange(0, before.shape[-1] * every, every) <= self.capacities[:, None]
        with np.errstate(invalid="ignore"):  # what is infinite twice has not changed
            change = np.abs(before - after) * within.reshape(self.rows, *(1,) * (after.ndim - 2), -1)
        return float(np.fmax.reduce(change, axis=None, initial=0.0))

    def _step(self, index: int, state: Floats) -> Floats:
        step, trace = self.knapsack.steps[index], _Trace()
        state = self._extend(step.variable, state, self.tables[self.same.step[index]], trace)
        self.work += STEP_WORK + state.size
        frontier = (*step.frontier, step.variable)
        for variable in step.closed:
            without, taken = _parts(state, 1 + frontier.index(variable))
            trace.closed.append(np.less(taken, without, out=self.space.choices(without.shape)))
            state = np.minimum(without, taken, out=self.space.states(without.shape))
            frontier = tuple(v for v in frontier if v != variable)
        self.traces.append(trace)
        return state

    def _extend(self, variable: int, state: Floats, table: Floats, trace: _Trace) -> Floats:
        """The states with the variable at 0 and at 1, with what is known by now added."""
        size, used = int(self.knapsack.sizes[variable]), state.shape[-1]
        top = min(self.top, used + size)
        wide = self.space.states((*state.shape[:-1], 2, top))
        without, taken = wide[..., 0, :], wide[..., 1, :]
        np.add(state, table[..., 0, None], out=without[..., :used])
        without[..., used:] = np.inf
        if not size:
            np.add(state, table[..., 1, None], out=taken)
            return wide
        taken[..., :size] = np.inf
        np.add(state[..., : max(0, top - size)], table[..., 1, None], out=taken[..., size:])
        extra = self.aside[:, variable]
        if np.isfinite(extra).any():
            shape = (-1,) + (1,) * (state.ndim - 1)
            light = state + (table[..., 1, None] + extra.reshape(shape).astype(state.dtype))
            trace.aside = np.zeros(taken.shape, dtype=bool)
            np.less(light, taken[..., :used], out=trace.aside[..., :used])
            np.minimum(taken[..., :used], light, out=taken[..., :used])
        return wide

    # -- back -------------------------------------------------------------------------------------

    def _back(self, state: Floats) -> Chosen:
        rows = np.arange(self.rows)
        used = state.argmin(axis=-1)
        cost = state[rows, used] - self.slack
        taken = np.zeros((self.rows, len(self.knapsack.sizes)), dtype=bool)
        aside = np.zeros_like(taken)
        position = len(self.traces)
        while position:
            if self.left_out and self.left_out[-1].end == position:
                position, used = self._back_over(self.left_out.pop(), rows, used, taken, aside)
            else:
                position -= 1
                used = self._back_step(position, rows, used, taken, aside)
        for look_up in self.same.look_ups:
            choice = self.choices[look_up.number]
            whole = np.broadcast_to(choice, (self.rows, *choice.shape[1:]))
            at = tuple(taken[:, variables].astype(np.intp) for variables in look_up.scope)
            taken[:, look_up.variables] = whole[(rows[:, None], *at)]
        return Chosen(cost, taken, aside, self.work)

    def _back_over(
        self, left_out: _LeftOut, rows: Ints, used: Ints, taken: Bools, aside: Bools
    ) -> tuple[int, Ints]:
        """Back to the first step of what was left out: who decides as a period before will go on so."""
        steps, period = self.knapsack.steps, left_out.period
        for start in range(left_out.end - period, left_out.first - 1, -period):
            last = steps[start + period - 1]
            open_ = [v for v in (*last.frontier, last.variable) if v not in last.closed]
            state, before = taken[:, open_].copy(), used
            for position in reversed(range(start, start + period)):
                used = self._back_step(position, rows, used, taken, aside)
            if (used == before).all() and (taken[:, list(steps[start].frontier)] == state).all():
                self._copy_period(left_out.first, start, period, taken, aside)
                break
        return left_out.first, used

    def _copy_period(self, first: int, start: int, period: int, taken: Bools, aside: Bools) -> None:
        """Decide the periods from ``first`` on as the one at ``start``."""
        steps = self.knapsack.steps
        for position in range(start, start + period):
            for index, variable in enumerate(steps[position].closed):
                others = [steps[i].closed[index] for i in range(first + position - start, start, period)]
                taken[:, others] = taken[:, [variable]]
            others = [steps[i].variable for i in range(first + position - start, start, period)]
            aside[:, others] = aside[:, [steps[position].variable]]

    def _back_step(self, position: int, rows: Ints, used: Ints, taken: Bools, aside: Bools) -> Ints:
        """Decide what the step closed; the capacity that was used before it."""
        step, trace = self.knapsack.steps[position], self.traces[position]
        frontier = (*step.frontier, step.variable)
        open_ = [v for v in frontier if v not in step.closed]
        for variable, choice in zip(reversed(step.closed), reversed(trace.closed), strict=True):
            at = tuple(taken[:, v].astype(np.intp) for v in open_)
            taken[:, variable] = choice[(rows, *at, used)]
            open_.insert(_place_in(frontier, open_, variable), variable)
        size = int(self.knapsack.sizes[step.variable])
        if not size:
            return used
        mine = taken[:, step.variable]
        if trace.aside is not None:
            at = tuple(taken[:, v].astype(np.intp) for v in step.frontier)
            aside[:, step.variable] = mine & trace.aside[(rows, *at, used)]
        return used - size * (mine & ~aside[:, step.variable])


def _place_in(frontier: Sequence[int], open_: Sequence[int], variable: int) -> int:
    """Where a variable stands among those of the frontier that are open."""
    position = frontier.index(variable)
    return sum(1 for v in open_ if frontier.index(v) < position)


def _parts(state: Floats, axis: int) -> tuple[Floats, Floats]:
    """The states with one variable at 0 and at 1."""
    before = [slice(None)] * axis
    without: tuple[slice | int, ...] = (*before, 0)
    taken: tuple[slice | int, ...] = (*before, 1)
    return state[without], state[taken]
