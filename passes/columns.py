"""A lower bound by column generation: which shares of the graph can the devices have, and at what price.

The master problem, a linear program, mixes known shares (see ``shares``) so that every operation runs
once, no kind of device has more shares than devices, and the longest clock is as short as can be. Its
prices say what running each operation is worth; the knapsacks answer with the best shares at those
prices, and with a lower bound that holds whatever the prices are (Lagrange). Prices are smoothed towards
those of the best bound (Wentges, "Weighted Dantzig-Wolfe Decomposition", 1997).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array

from graphplan.passes.evaluate import Evaluation
from graphplan.passes.shares import Prices, Shares

__all__ = ["Column", "ColumnGeneration"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_SMOOTHING = 0.6
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Column:
    """What one device of a kind may have.

    Attributes:
        kind: index of the kind of device.
        taken: (items,) what it has.
        aside: (items,) the weights of it that are brought at every call.
        cover: (groups,) how many units of each group it runs.
        clock: seconds on the clock of operations and moves.
        queue: seconds on its copy queue.
    """

    kind: int
    taken: Bools
    aside: Bools
    cover: Ints
    clock: float
    queue: float


class ColumnGeneration:
    """Bounds a problem from below, round by round.

    Attributes:
        bound: seconds that no placement can go below; grows.
        columns: the shares found.
    """

    def __init__(self, shares: Shares, known: Sequence[Evaluation] = ()) -> None:
        self.shares = shares
        self.columns: list[Column] = []
        self._seen: set[bytes] = set()
        self.bound = 0.0
        self._guess = 0.0  # the bound in single precision
        self.rounds = 0
        self.converged = False
        self.gone = np.zeros(shares.units, dtype=bool)
        self.counts = shares.counts.copy()
        self.count_of = shares.count_of.copy()
        self.margin = np.zeros(len(shares.kinds))
        self.mixture = np.zeros(0)
        for evaluation in known:
            self._add_known(evaluation)
        self._center = self._transport()

    def _add_known(self, evaluation: Evaluation) -> None:
        assignment = evaluation.schedule.assignment
        for index, kind in enumerate(self.shares.kinds):
            for key in kind.keys:
                taken, aside = self.shares.share_of(assignment.operations, assignment.weights, key)
                self._add(index, taken, aside)

    def _add(self, kind: int, taken: Bools, aside: Bools) -> bool:
        key = bytes([kind]) + np.packbits(taken).tobytes() + np.packbits(aside).tobytes()
        if key in self._seen:
            return False
        self._seen.add(key)
        shares = self.shares
        clock = shares.clock_seconds(kind, taken, aside)
        queue = shares.queue_seconds(kind, taken, aside)
        if not np.isfinite(clock + queue):
            return False
        cover = np.bincount(shares.group[taken[: shares.units]], minlength=len(shares.counts))
        self.columns.append(Column(kind, taken, aside, cover, clock, queue))
        return True

    def run(self, *, enough: float, work: float, deadline: float | None = None) -> float:
        """Raise the bound.

        Args:
            enough: seconds of a bound that needs no improvement.
            work: numbers that the knapsacks may touch.
            deadline: ``time.monotonic()`` at which to stop, or None.
        """
        each = max(1, self.shares.knapsack.work)
        smoothing = _SMOOTHING
        left = max(1.0, work / each)
        while left > 0 and self._guess < enough and not self.converged:
            if deadline is not None and time.monotonic() > deadline:
                break
            left -= 1
            self.rounds += 1
            prices, value = self.solve_master()
            tried = prices if self._center is None else _mix(self._center, prices, smoothing)
            bound, fresh = self._price(tried, exact=False)
            if bound > self._guess or self._center is None:
                self._center, self._guess = tried, bound
            if not fresh:
                if smoothing == 0.0:
                    self.converged = True
                smoothing = 0.0
            else:
                smoothing = _SMOOTHING
            if value - self._guess < 1e-6 * value:
                self.converged = True
        if self._guess > self.bound and self._center is not None:
            self.bound = max(self.bound, self._price(self._center, exact=True)[0])
        return self.bound

    def fix(self, column: Column) -> ColumnGeneration:
        """The problem that is left when a device has this share."""
        rest = copy.copy(self)
        shares = self.shares
        rest.gone = self.gone | column.taken[: shares.units]
        rest.counts = self.counts - column.cover
        rest.count_of = self.count_of.copy()
        rest.count_of[column.kind] -= 1
        rest.columns = [
            c
            for c in self.columns
            if rest.count_of[c.kind] and not (c.taken[: shares.units] & rest.gone).any()
        ]
        rest.bound, rest._guess, rest.converged = 0.0, 0.0, False
        return rest

    def with_margin(self, margin: Floats) -> ColumnGeneration:
        """The problem in which shares leave so many bytes (per kind) free beyond what they must."""
        rest = copy.copy(self)
        rest.margin = margin
        room = self.shares.room - margin
        rest.columns = [c for c in self.columns if self.shares.kept_bytes(c.taken, c.aside) <= room[c.kind]]
        rest.bound, rest._guess, rest.converged = 0.0, 0.0, False
        return rest

    def _price(self, prices: Prices, *, exact: bool) -> tuple[float, bool]:
        """The bound at these prices, and whether they brought new columns."""
        shares = self.shares
        chosen = shares.best(prices, self.gone, self.margin, exact=exact)
        least = np.zeros(len(shares.kinds))
        fresh = False
        for row, kind in enumerate(shares.row_kind):
            if not np.isfinite(chosen.cost[row]):
                continue
            if chosen.cost[row] < -_TOLERANCE * max(self._guess, 1e-12):
                fresh |= self._add(int(kind), chosen.taken[row], chosen.aside[row])
            least[kind] = min(least[kind], chosen.cost[row])
        value = float(prices.cover @ self.counts) - float(prices.unique.sum())
        return value + float(self.count_of @ least), fresh

    # -- the master problem -----------------------------------------------------------------------

    def solve_master(self) -> tuple[Prices, float]:
        """Prices of the best mixture of the known columns, and its seconds."""
        shares = self.shares
        groups, kinds, ties = len(shares.counts), len(shares.kinds), len(shares.ties)
        count = len(self.columns)
        clock = np.array([column.clock for column in self.columns])
        queue = np.array([column.queue for column in self.columns])
        kind = np.array([column.kind for column in self.columns], dtype=int)
        scale = max(float(clock.sum()) / max(count, 1), 1e-9)
        # variables: columns, a stand-in per group for what they do not cover, the makespan
        total = count + groups + 1
        cover = np.array([column.cover for column in self.columns]).T.reshape(groups, count)
        equal = np.hstack([cover, np.eye(groups), np.zeros((groups, 1))])
        right: list[float] = []
        lines: list[Floats] = []
        for k in range(kinds):
            line = np.zeros(total)
            line[:count][kind == k] = 1.0
            lines.append(line)
            right.append(float(self.count_of[k]))
        line = np.zeros(total)
        line[:count] = clock / scale
        line[-1] = -1.0
        lines.append(line)
        right.append(0.0)
        for k in range(kinds):
            line = np.zeros(total)
            line[:count][kind == k] = queue[kind == k] / scale
            line[-1] = -float(self.count_of[k])
            lines.append(line)
            right.append(0.0)
        for tie in shares.ties:
            line = np.zeros(total)
            line[:count] = [float(c.taken[tie] and not c.aside[tie]) for c in self.columns]
            lines.append(line)
            right.append(1.0)
        objective = np.zeros(total)
        objective[count : count + groups] = 1e3
        objective[-1] = 1.0
        found = linprog(
            objective,
            A_ub=coo_array(np.array(lines)),
            b_ub=np.array(right),
            A_eq=coo_array(equal),
            b_eq=self.counts.astype(float),
            method="highs",
        )
        if found.status != 0:
            raise RuntimeError(f"the master problem has no solution: {found.message}")
        self.mixture = found.x[:count]
        dual = -found.ineqlin.marginals
        compute = float(dual[kinds])
        copies = np.maximum(dual[kinds + 1 : 2 * kinds + 1], 0.0)
        unique = np.zeros(len(shares.items))
        unique[shares.ties] = np.maximum(dual[2 * kinds + 1 : 2 * kinds + 1 + ties], 0.0) * scale
        return self._prices(found.eqlin.marginals * scale, compute, copies, unique), float(found.fun) * scale

    def _prices(self, cover: Floats, compute: float, copies: Floats, unique: Floats) -> Prices:
        """Prices whose clocks add up to 1."""
        copies = np.maximum(copies, 0.0)
        compute = max(compute, 0.0)
        total = compute + float(self.count_of @ copies)
        if total <= 0:
            return Prices(cover, 1.0, np.zeros_like(copies), unique)
        return Prices(cover, compute / total, copies / total, unique)

    def _transport(self) -> Prices | None:
        """Prices to begin with: operations in fractions, no moves between devices."""
        shares = self.shares
        kinds, groups = len(shares.kinds), len(shares.counts)
        first = np.array([int(np.argmax(shares.group == g)) for g in range(groups)])
        clock = shares.clock[:, first]
        queue = shares.queue[:, first]
        aside_clock, aside_queue = shares.aside.clock[:, first], shares.aside.queue[:, first]
        nbytes = shares.nbytes[first].astype(float)
        # per kind: units kept, units brought; then the makespan
        total = 2 * kinds * groups + 1
        high = np.full(total, np.inf)
        compute_line, scale = np.zeros(total), max(float(np.nanmin(clock, axis=0).sum()), 1e-9)
        lines, right = [], []
        for k in range(kinds):
            kept, brought = 2 * k * groups, (2 * k + 1) * groups
            impossible = ~np.isfinite(clock[k])
            high[kept : kept + groups][impossible] = 0.0
            none = impossible | ~np.isfinite(aside_clock[k]) | ~np.isfinite(aside_queue[k])
            high[brought : brought + groups][none] = 0.0
            own = np.where(impossible, 0.0, clock[k])
            compute_line[kept : kept + groups] = own / scale
            compute_line[brought : brought + groups] = (own + np.where(none, 0.0, aside_clock[k])) / scale
            memory = np.zeros(total)
            memory[kept : kept + groups] = nbytes / max(shares.room[k], 1.0)
            lines.append(memory)
            right.append(float(self.count_of[k]) if shares.room[k] > 0 else 0.0)
            line = np.zeros(total)
            line[kept : kept + groups] = queue[k] / scale
            line[brought : brought + groups] = (queue[k] + np.where(none, 0.0, aside_queue[k])) / scale
            line[-1] = -float(self.count_of[k])
            lines.append(line)
            right.append(0.0)
        compute_line[-1] = -1.0
        lines.append(compute_line)
        right.append(0.0)
        equal = np.zeros((groups, total))
        for part in range(2 * kinds):
            equal[:, part * groups : (part + 1) * groups] = np.eye(groups)
        objective = np.zeros(total)
        objective[-1] = 1.0
        found = linprog(
            objective,
            A_ub=coo_array(np.array(lines)),
            b_ub=np.array(right),
            A_eq=coo_array(equal),
            b_eq=self.counts.astype(float),
            bounds=np.stack([np.zeros(total), high], axis=1),
            method="highs",
        )
        if found.status != 0:
            return None
        dual = -found.ineqlin.marginals
        copies = dual[1 : 2 * kinds : 2]
        return self._prices(
            found.eqlin.marginals * scale, float(dual[-1]), copies, np.zeros(len(shares.items))
        )


def _mix(a: Prices, b: Prices, share: float) -> Prices:
    """``share`` of the first and the rest of the second."""
    rest = 1.0 - share
    return Prices(
        share * a.cover + rest * b.cover,
        share * a.compute + rest * b.compute,
        share * a.copies + rest * b.copies,
        share * a.unique + rest * b.unique,
    )
