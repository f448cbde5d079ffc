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
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphplan.passes.knapsack_solution import STEP_WORK, Chosen, Solution
from graphplan.passes.sameness import Sameness, alike
from graphplan.passes.spaces import Space, shared_spaces

__all__ = ["STEP_WORK", "Chosen", "Elimination", "Knapsack", "Step", "frontier_order"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_REMEMBERED = 8  # sets of costs of which it is known what is the same in them
_LIGHT_SCOPE = 5  # a variable without size is eliminated early if its table is no larger than this


@dataclass(frozen=True, slots=True)
class Elimination:
    """Minimise over ``variable``: the factors that know it become one over ``scope``.

    ``pattern`` is the same where the scopes of the factors lie alike.
    """

    variable: int
    scope: tuple[int, ...]
    factors: tuple[int, ...]
    pattern: int


@dataclass(frozen=True, slots=True)
class Step:
    """Bring ``variable`` into the state, add what is known by now, minimise over ``closed``.

    ``pattern`` is the same where the size is, and where the frontier and what is closed of it lie alike.
    """

    variable: int
    frontier: tuple[int, ...]
    factors: tuple[int, ...]
    closed: tuple[int, ...]
    pattern: int


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
        self.eliminations: list[Elimination] = []
        self._patterns: dict[Hashable, int] = {}
        self._same: dict[tuple[tuple[int, ...], tuple[int, ...]], Sameness] = {}
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
        """Numbers that one solution touches at most, and what its steps take by themselves."""
        top = max(1, int(self.capacities.max(initial=0)) + 1)
        steps = sum((self.rows * top << (len(step.frontier) + 1)) + STEP_WORK for step in self.steps)
        return STEP_WORK * (1 + len(self.eliminations)) + steps

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
                pattern = self._pattern((*scope, variable), used)
                self.eliminations.append(Elimination(variable, scope, used, pattern))
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
            open_ = tuple(frontier)
            closed = tuple(v for v in frontier if not pending[v])
            frontier = [v for v in frontier if pending[v]]
            places = (int(self.sizes[variable]), *(open_.index(v) for v in closed))
            pattern = self._pattern(open_, ready, places)
            steps.append(Step(variable, before, tuple(ready), closed, pattern))
        return steps

    def _pattern(self, frontier: tuple[int, ...], factors: Sequence[int], beside: Hashable = None) -> int:
        """A number for how the factors lie in the frontier."""
        places = tuple(tuple(frontier.index(v) for v in self.scopes[factor]) for factor in factors)
        return self._patterns.setdefault((len(frontier), places, beside), len(self._patterns))

    def sameness(self, cost: Floats, aside: Floats, tables: Sequence[Floats]) -> Sameness:
        """What is the same at these costs: mostly what was at the last ones."""
        known: dict[int, int] = {}
        key = alike(cost, aside), tuple(known.setdefault(id(table), len(known)) for table in tables)
        found = self._same.get(key)
        if found is None:
            if len(self._same) >= _REMEMBERED:
                self._same.clear()
            found = self._same[key] = Sameness(self, *key)
        return found

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
            tables: (rows or 1, 2, 2, ...) per scope; those that are one object save time.
            less: (rows,) units by which the capacities are smaller this time.
            dtype: of the states; float32 takes half the time, and is no proof.
        """
        capacities = self.capacities if less is None else self.capacities - less
        space = self._spaces.pop() if self._spaces else Space()
        same = self.sameness(cost, aside, tables)
        found = Solution(self, same, cost, aside, capacities, dtype, space).solve(tables)
        self._spaces.append(space)
        return found
