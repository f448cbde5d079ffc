"""The cheapest set of items within a capacity, where items that belong together are cheaper together.

Given binary variables with sizes, a cost for taking each, and small tables of cost over a few of
them, find for several capacities and cost vectors at once::

    minimise    sum of cost[i] x[i]  +  sum of table[x[i], x[j], ...]
    subject to  sum of size[i] x[i] <= capacity

Exactly: variables without size are eliminated first (Bertelè and Brioschi, "Nonserial Dynamic
Programming", 1972), the rest run through a dynamic program whose state is the values of the variables
at the frontier and the capacity used. It is small where the variables form something like a chain.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from graphplan.passes.spaces import Space, shared_spaces

__all__ = ["Chosen", "Knapsack", "Step", "frontier_order"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_STEP = 100_000  # numbers that numpy could touch in the time that a step takes by itself
_LIGHT_SCOPE = 5  # a variable without size is eliminated early if its table is no larger than this


@dataclass(frozen=True, slots=True)
class Chosen:
    """The cheapest sets, one per row.

    Attributes:
        cost: (rows,) the least cost.
        taken: (rows, variables) which variables are 1.
        aside: (rows, variables) those of them that take no capacity, at their price.
    """

    cost: Floats
    taken: Bools
    aside: Bools


@dataclass(frozen=True, slots=True)
class _Elimination:
    """Minimise over ``variable``: the factors that know it become one over ``scope``."""

    variable: int
    scope: tuple[int, ...]
    factors: tuple[int, ...]
    result: int


@dataclass(frozen=True, slots=True)
class Step:
    """Bring ``variable`` into the state, add what is known by now, minimise over ``closed``."""

    variable: int
    frontier: tuple[int, ...]
    factors: tuple[int, ...]
    closed: tuple[int, ...]


@dataclass(slots=True)
class _Trace:
    """What a step decided, for the way back."""

    aside: Bools | None = None
    closed: list[Bools] = field(default_factory=list)


def frontier_order(count: int, scopes: Iterable[tuple[int, ...]]) -> tuple[list[int], int]:
    """An order of variables in which few are open at a time, and the most that are.

    A variable is open from when it is introduced until all that share a scope with it are. Greedy:
    the next is the neighbour of an open one that leaves the fewest open.
    """
    near: list[set[int]] = [set() for _ in range(count)]
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    for variable in range(count):
        near[variable].discard(variable)
    missing = [len(adjacent) for adjacent in near]
    introduced = [False] * count
    open_: set[int] = set()
    order: list[int] = []
    widest, first = 0, 0
    while len(order) < count:
        while introduced[first]:
            first += 1
        candidates = {other for variable in open_ for other in near[variable] if not introduced[other]}
        if len(candidates) > 64:
            candidates = set(sorted(candidates)[:64])
        chosen = min(candidates or {first}, key=lambda v: (_left_open(v, near, missing, introduced), v))
        introduced[chosen] = True
        order.append(chosen)
        open_.add(chosen)
        for other in near[chosen]:
            missing[other] -= 1
        widest = max(widest, len(open_))
        for other in (chosen, *near[chosen]):
            if introduced[other] and not missing[other]:
                open_.discard(other)
    return order, widest


def _left_open(variable: int, near: list[set[int]], missing: list[int], introduced: list[bool]) -> int:
    """By how much introducing this variable changes the number of open ones."""
    closing = sum(1 for other in near[variable] if introduced[other] and missing[other] == 1)
    return (1 if missing[variable] else 0) - closing


class Knapsack:
    """The structure of a problem, prepared once and solved for many costs.

    Args:
        sizes: (variables,) whole units of capacity.
        scopes: the variables of each table, in the order of its axes.
        capacities: (rows,) units, negative where nothing fits.
    """

    def __init__(self, sizes: Ints, scopes: Sequence[tuple[int, ...]], capacities: Ints) -> None:
        self.sizes, self.capacities = sizes, capacities
        self.rows = len(capacities)
        self.count = len(sizes)
        self.scopes: list[tuple[int, ...]] = list(scopes)
        self.eliminations: list[_Elimination] = []
        active = self._eliminate_light()
        self.steps = self._path(active)
        self._spaces = shared_spaces()

    def of_rows(self, rows: Ints) -> Knapsack:
        """The same structure for some of the capacities."""
        part = copy.copy(self)
        part.capacities, part.rows = self.capacities[rows], len(rows)
        return part

    @property
    def work(self) -> int:
        """Numbers that one solution touches; a step costs some thousands by itself."""
        top = max(1, int(self.capacities.max(initial=0)) + 1)
        return _STEP + sum((self.rows * top << (len(step.frontier) + 1)) + _STEP for step in self.steps)

    def _eliminate_light(self) -> set[int]:
        """Plan the elimination of variables without size; the factors that are left."""
        active = set(range(len(self.scopes)))
        knows: list[set[int]] = [set() for _ in range(self.count)]
        for index, variables in enumerate(self.scopes):
            for variable in variables:
                knows[variable].add(index)
        waiting = [v for v in range(self.count) if not self.sizes[v]]
        for limit in range(1, _LIGHT_SCOPE + 1):
            left = []
            for variable in waiting:
                others = {v for f in knows[variable] for v in self.scopes[f]} - {variable}
                scope = tuple(sorted(others))
                if len(scope) > limit:
                    left.append(variable)
                    continue
                used = tuple(sorted(knows[variable]))
                result = len(self.scopes)
                self.scopes.append(scope)
                self.eliminations.append(_Elimination(variable, scope, used, result))
                for factor in used:
                    active.discard(factor)
                    for other in self.scopes[factor]:
                        knows[other].discard(factor)
                active.add(result)
                for other in scope:
                    knows[other].add(result)
            waiting = left
        return active

    def _path(self, active: set[int]) -> list[Step]:
        gone = {elimination.variable for elimination in self.eliminations}
        rest = [v for v in range(self.count) if v not in gone]
        number = {v: i for i, v in enumerate(rest)}
        scopes = [tuple(number[v] for v in self.scopes[f]) for f in sorted(active)]
        order, _ = frontier_order(len(rest), scopes)
        unseen = {f: set(self.scopes[f]) for f in sorted(active)}
        pending: dict[int, set[int]] = {v: set() for v in rest}
        for factor in unseen:
            for variable in self.scopes[factor]:
                pending[variable].add(factor)
        steps: list[Step] = []
        frontier: list[int] = []
        for variable in (rest[i] for i in order):
            ready = []
            for factor in sorted(pending[variable]):
                unseen[factor].discard(variable)
                if not unseen[factor]:
                    ready.append(factor)
            before = tuple(frontier)
            frontier.append(variable)
            for factor in ready:
                for other in self.scopes[factor]:
                    pending[other].discard(factor)
            closed = tuple(v for v in frontier if not pending[v])
            frontier = [v for v in frontier if pending[v]]
            steps.append(Step(variable, before, tuple(ready), closed))
        return steps

    def solve(
        self,
        cost: Floats,
        aside: Floats,
        tables: Sequence[Floats],
        less: Ints | None = None,
        dtype: npt.DTypeLike = np.float64,
    ) -> Chosen:
        """The cheapest set per row.

        Args:
            cost: (rows, variables) of taking each.
            aside: (rows, variables) what taking it without its size costs beyond, or infinity.
            tables: (rows or 1, 2, 2, ...) per scope.
            less: (rows,) units by which the capacities are smaller this time.
            dtype: of the states; float32 takes half the time, and is no proof.
        """
        capacities = self.capacities if less is None else self.capacities - less
        made = [np.asarray(table) for table in tables]
        light: list[Bools] = []
        for elimination in self.eliminations:
            table, choice = self._eliminate(elimination, made, cost)
            made.append(table)
            light.append(choice)
        space = self._spaces.pop() if self._spaces else Space()
        state, traces = self._run(cost, aside, made, capacities, dtype, space)
        found = self._back(state, traces, light)
        self._spaces.append(space)
        return found

    def _eliminate(self, plan: _Elimination, made: Sequence[Floats], cost: Floats) -> tuple[Floats, Bools]:
        scope = (*plan.scope, plan.variable)
        total = np.zeros((1,) * (len(scope) + 1))
        for factor in plan.factors:
            total = total + _fit(made[factor], self.scopes[factor], scope)
        without, taken = _halves(total)
        taken = taken + cost[:, plan.variable].reshape((-1,) + (1,) * len(plan.scope))
        choice = taken < without
        return np.where(choice, taken, without), choice

    def _run(
        self,
        cost: Floats,
        aside: Floats,
        made: Sequence[Floats],
        capacities: Ints,
        dtype: npt.DTypeLike,
        space: Space,
    ) -> tuple[Floats, list[_Trace]]:
        top = max(1, int(self.capacities.max(initial=0)) + 1)
        state = np.zeros((self.rows, top), dtype)
        for factor, scope in enumerate(self.scopes):
            if not scope and factor < len(made):  # what was eliminated to a constant
                state = state + made[factor].reshape(-1, 1).astype(dtype)
        traces: list[_Trace] = []
        space.begin(state)
        for step in self.steps:
            trace = _Trace()
            frontier = (*step.frontier, step.variable)
            table = np.stack([np.zeros(self.rows), cost[:, step.variable]], axis=1)
            table = table.reshape(self.rows, *(1,) * len(step.frontier), 2)
            for factor in step.factors:
                table = table + _fit(made[factor], self.scopes[factor], frontier)
            state = self._extend(step.variable, state, table.astype(dtype), aside, trace, space)
            for variable in step.closed:
                axis = 1 + frontier.index(variable)
                without, taken = _parts(state, axis)
                trace.closed.append(np.less(taken, without, out=space.choices(without.shape)))
                state = np.minimum(without, taken, out=space.states(without.shape))
                frontier = tuple(v for v in frontier if v != variable)
            traces.append(trace)
        state[np.arange(top)[None, :] > capacities[:, None]] = np.inf
        return state, traces

    def _extend(
        self, variable: int, state: Floats, table: Floats, aside: Floats, trace: _Trace, space: Space
    ) -> Floats:
        """The states with the variable at 0 and at 1, with what is known by now added."""
        size, top = int(self.sizes[variable]), state.shape[-1]
        wide = space.states((*state.shape[:-1], 2, top))
        np.add(state, table[..., 0, None], out=wide[..., 0, :])
        taken = wide[..., 1, :]
        if size:
            taken[..., :size] = np.inf
            np.add(state[..., : max(0, top - size)], table[..., 1, None], out=taken[..., size:])
            extra = aside[:, variable]
            if np.isfinite(extra).any():
                shape = (-1,) + (1,) * (state.ndim - 1)
                light = state + (table[..., 1, None] + extra.reshape(shape).astype(state.dtype))
                trace.aside = light < taken
                np.minimum(taken, light, out=taken)
        else:
            np.add(state, table[..., 1, None], out=taken)
        return wide

    def _back(self, state: Floats, traces: list[_Trace], light: list[Bools]) -> Chosen:
        rows = np.arange(self.rows)
        used = state.argmin(axis=-1)
        cost = state[rows, used]
        taken = np.zeros((self.rows, self.count), dtype=bool)
        aside = np.zeros((self.rows, self.count), dtype=bool)
        for step, trace in zip(reversed(self.steps), reversed(traces), strict=True):
            frontier = (*step.frontier, step.variable)
            open_ = [v for v in frontier if v not in step.closed]
            for variable, choice in zip(reversed(step.closed), reversed(trace.closed), strict=True):
                at = tuple(taken[:, v].astype(np.intp) for v in open_)
                taken[:, variable] = choice[(rows, *at, used)]
                open_.insert(_place_in(frontier, open_, variable), variable)
            size = int(self.sizes[step.variable])
            if size:
                mine = taken[:, step.variable]
                if trace.aside is not None:
                    at = tuple(taken[:, v].astype(np.intp) for v in step.frontier)
                    aside[:, step.variable] = mine & trace.aside[(rows, *at, used)]
                used = used - size * (mine & ~aside[:, step.variable])
        for elimination, choice in zip(reversed(self.eliminations), reversed(light), strict=True):
            at = tuple(taken[:, v].astype(np.intp) for v in elimination.scope)
            whole = np.broadcast_to(choice, (self.rows, *choice.shape[1:]))
            taken[:, elimination.variable] = whole[(rows, *at)]
        return Chosen(cost, taken, aside)


def _place_in(frontier: Sequence[int], open_: Sequence[int], variable: int) -> int:
    """Where a variable stands among those of the frontier that are open."""
    position = frontier.index(variable)
    return sum(1 for v in open_ if frontier.index(v) < position)


def _parts(state: Floats, axis: int) -> tuple[Floats, Floats]:
    """The states with one variable at 0 and at 1."""
    moved = np.moveaxis(state, axis, 0)
    return moved[0], moved[1]


def _halves(total: Floats) -> tuple[Floats, Floats]:
    """A table at 0 and at 1 of its last variable, which it may not depend on."""
    return total[..., 0], total[..., -1]


def _fit(table: Floats, scope: Sequence[int], frontier: Sequence[int]) -> Floats:
    """A table with its axes where the frontier has them, to be broadcast."""
    order = sorted(range(len(scope)), key=lambda i: frontier.index(scope[i]))
    moved = table.transpose(0, *(1 + i for i in order))
    known = set(scope)
    shape = [2 if v in known else 1 for v in frontier]
    return moved.reshape(moved.shape[0], *shape)
