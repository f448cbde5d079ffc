"""What a variable cannot go below within linear rows in which some variables are whole.

HiGHS solves such programs too, with cuts; but some of its cuts have cut the optimum off, with presolve and
without (``tests/test_branch_and_bound.py``, HiGHS 1.12 to 1.15; ERGO-Code/HiGHS issues 1725 and 2173), and
what graphplan proves must hold. So here only linear programs are solved, and of each only the duals are
believed: any duals of the right signs give a bound, or prove that rows cannot be kept, however they were
found. Of the variables that the duals weigh most, some are tried out to part by (Achterberg, Koch and Martin,
"Branching rules revisited", 2005).
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack, vstack
from scipy.sparse import eye as identity

from graphplan.passes.rows import Rows

__all__ = ["least"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_TRIED = 4  # variables that are tried out before one of them is parted
_KNOWN = 2  # trials of a variable after which its gain is known
_LEAST_SECONDS = 0.05  # of a linear program: with less HiGHS would only fail
_PROGRESS = 0.01  # part of what is missing that a bound must rise by
_VIOLATED = 1e-9  # of rows, from which on they cannot be kept
_WHOLE = 1e-6  # what differs less from a whole number is one


def least(
    rows: Rows,
    variable: int,
    high: Floats,
    whole: Bools,
    *,
    enough: float,
    programs: int,
    patience: int | None = None,
    deadline: float | None = None,
) -> float:
    """A number that the variable cannot be below; infinite where the rows cannot be kept.

    Args:
        rows: to be kept.
        variable: to be as small as possible.
        high: (variables,) upper limits, all finite; the lower ones are 0.
        whole: (variables,) those that are whole.
        enough: a bound that needs no improvement.
        programs: linear programs to solve at most.
        patience: programs after which to stop unless they have raised the bound by a hundredth of what is
            missing; None: never.
        deadline: ``time.monotonic()`` at which to stop, or None.
    """
    relaxation = _Relaxation(rows, variable, len(high), deadline)
    search = _Search(relaxation, whole, enough, programs if patience is None else patience)
    return search.run(np.zeros(len(high)), high, programs, deadline)


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """A linear program that has been solved.

    Attributes:
        bound: of the variable, by the duals.
        values: (variables,) of the solution.
        weight: (variables,) what rows would pay for a change of each.
    """

    bound: float
    values: Floats
    weight: Floats


class _Relaxation:
    """The rows for scipy, with any limits of the variables."""

    def __init__(self, rows: Rows, variable: int, variables: int, deadline: float | None = None) -> None:
        self.deadline = deadline
        constraint = rows.constraint(variables)
        matrix, low, high = constraint.A.tocsr(), constraint.lb, constraint.ub
        equal = low == high
        above, below = ~equal & np.isfinite(high), ~equal & np.isfinite(low)
        self.equal, self.at = matrix[equal], high[equal]
        self.less, self.than = vstack([matrix[above], -matrix[below]]), np.append(high[above], -low[below])
        self.objective = np.zeros(variables)
        self.objective[variable] = 1.0

    def solve(self, low: Floats, high: Floats) -> _Relaxed | None:
        """None where the rows cannot be kept."""
        found = linprog(
            self.objective,
            A_ub=self.less,
            b_ub=self.than,
            A_eq=self.equal,
            b_eq=self.at,
            bounds=np.column_stack([low, high]),
            method="highs",
            options={"presolve": False, **self._time_limit},  # presolving takes longer than it saves
        )
        if found.status == 2 and self._impossible(low, high):
            return None
        if found.status != 0:  # HiGHS gave up, or had no time: nothing is known
            return _Relaxed(-np.inf, low, np.zeros(len(low)))
        less, equal = np.minimum(found.ineqlin.marginals, 0.0), found.eqlin.marginals
        weight = abs(self.less).T @ -less + abs(self.equal).T @ np.abs(equal)
        return _Relaxed(self._bound(self.objective, less, equal, low, high), found.x, weight)

    @property
    def _time_limit(self) -> dict[str, float]:
        left = None if self.deadline is None else self.deadline - time.monotonic()
        return {} if left is None else {"time_limit": max(_LEAST_SECONDS, left)}

    def _bound(self, objective: Floats, less: Floats, equal: Floats, low: Floats, high: Floats) -> float:
        """What the objective cannot be below, by any duals of which those of ``less`` are not positive."""
        reduced = objective - self.less.T @ less - self.equal.T @ equal
        ends = np.minimum(reduced * low, reduced * high)
        return float(less @ self.than + equal @ self.at + ends.sum())

    def _impossible(self, low: Floats, high: Floats) -> bool:
        """Whether the rows are violated by something at least, as the duals of the least violation prove."""
        count, fewer = len(self.than), len(self.at)
        over, beside = identity(count), identity(fewer)
        found = linprog(
            np.concatenate([np.zeros(len(low)), np.ones(count + 2 * fewer)]),
            A_ub=hstack([self.less, -over, csr_array((count, 2 * fewer))]),
            b_ub=self.than,
            A_eq=hstack([self.equal, csr_array((fewer, count)), beside, -beside]),
            b_eq=self.at,
            bounds=[*zip(low, high, strict=True), *[(0.0, None)] * (count + 2 * fewer)],
            method="highs",
            options=self._time_limit,
        )
        if found.status != 0:
            return False
        less, equal = np.clip(found.ineqlin.marginals, -1.0, 0.0), np.clip(found.eqlin.marginals, -1.0, 1.0)
        return self._bound(np.zeros(len(low)), less, equal, low, high) > _VIOLATED


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the problem: limits of the variables, and their relaxation."""

    bound: float
    low: Floats
    high: Floats
    relaxed: _Relaxed


@dataclass(slots=True)
class _Gains:
    """What parting a variable has gained for each unit that it was rounded by, down and up."""

    total: list[float] = field(default_factory=lambda: [0.0, 0.0])
    trials: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def known(self) -> bool:
        return min(self.trials) >= _KNOWN

    def learn(self, side: int, gain: float, rounded: float) -> None:
        self.total[side] += gain / rounded
        self.trials[side] += 1

    def expected(self, fraction: float) -> tuple[float, float]:
        down, up = (total / max(1, trials) for total, trials in zip(self.total, self.trials, strict=True))
        return down * fraction, up * (1.0 - fraction)


class _Search:
    """Parts what has the lowest bound, again and again."""

    def __init__(self, relaxation: _Relaxation, whole: Bools, enough: float, patience: int) -> None:
        self.relaxation, self.whole, self.enough, self.patience = relaxation, whole, enough, patience
        self.solved = 0
        self._seen = (0, -np.inf)  # programs, and the bound after them
        self.gains: dict[int, _Gains] = {}
        self._order = count()
        self._open: list[tuple[float, int, _Part]] = []

    @property
    def bound(self) -> float:
        return self._open[0][0] if self._open else np.inf

    def run(self, low: Floats, high: Floats, programs: int, deadline: float | None) -> float:
        self._add(self._part(low, high, -np.inf))
        self._seen = self.solved, self.bound
        while self._open and self.bound < self.enough and self.solved < programs:
            if deadline is not None and time.monotonic() > deadline:
                break
            if self._stuck():
                break
            part = self._open[0][2]
            children = self._parted(part)
            if not children:  # nothing to part by: its relaxation is the answer
                break
            heapq.heappop(self._open)
            for child in children:
                self._add(child)
        return float(self.bound)

    def _stuck(self) -> bool:
        """Whether the last programs have hardly raised the bound."""
        solved, bound = self._seen
        if self.solved - solved < self.patience:
            return False
        self._seen = self.solved, self.bound
        return self.bound - bound < _PROGRESS * (self.enough - bound)

    def _add(self, part: _Part | None) -> None:
        if part is not None:
            heapq.heappush(self._open, (part.bound, next(self._order), part))

    def _part(self, low: Floats, high: Floats, least: float) -> _Part | None:
        self.solved += 1
        relaxed = self.relaxation.solve(low, high)
        return None if relaxed is None else _Part(max(least, relaxed.bound), low, high, relaxed)

    def _parted(self, part: _Part) -> list[_Part | None]:
        """By the variable that promises most, of those that the duals weigh most."""
        values = part.relaxed.values
        fraction = values - np.floor(values)
        off = np.where(self.whole, np.minimum(fraction, 1.0 - fraction), 0.0)
        able = np.nonzero(off > _WHOLE)[0]
        score = off * (part.relaxed.weight + 1e-9)
        best, chosen, known = -1.0, -1, list[_Part | None]()
        for index in able[np.argsort(-score[able], kind="stable")][:_TRIED].tolist():
            gains = self.gains.setdefault(index, _Gains())
            children: list[_Part | None] = []
            if gains.known:
                down, up = gains.expected(float(fraction[index]))
            else:
                children = self._split(part, index)
                down, up = (self._gain(part, child) for child in children)
            promise = max(down, 1e-9) * max(up, 1e-9)
            if promise > best * (1 + 1e-6):
                best, chosen, known = promise, index, children
        return known or (self._split(part, chosen) if chosen >= 0 else [])

    def _split(self, part: _Part, index: int) -> list[_Part | None]:
        """A whole variable at most, and at least, what it is next to."""
        value = float(part.relaxed.values[index])
        high, low = part.high.copy(), part.low.copy()
        high[index], low[index] = np.floor(value), np.floor(value) + 1.0
        children = [self._part(part.low, high, part.bound), self._part(low, part.high, part.bound)]
        rounded = value - np.floor(value), np.floor(value) + 1.0 - value
        for side, child in enumerate(children):
            self.gains[index].learn(side, self._gain(part, child), max(rounded[side], _WHOLE))
        return children

    def _gain(self, part: _Part, child: _Part | None) -> float:
        """Seconds, no more than are missing."""
        missing = max(self.enough - part.bound, 0.0)
        return missing if child is None else min(child.bound - part.bound, missing)
