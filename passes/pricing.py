"""The knapsacks that find the best share of each kind of device at given prices.

Their items, costs and tables are those of ``shares``; capacities are counted in units of bytes. Activations
make several knapsacks of one: there is one for each band of what a device leaves free for them (see
``bands``). What would open too many variables of a knapsack at once is left out, which leans to the cheap
side: the bound is weaker, and still one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from itertools import count

import numpy as np
import numpy.typing as npt

from graphplan.passes.bands import Band, Crowd, make_bands
from graphplan.passes.knapsack import STEP_WORK, Chosen, Knapsack, Step
from graphplan.passes.remainders import with_remainders
from graphplan.passes.shares import Shares

__all__ = ["Effort", "Prices", "Pricing"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_UNITS = 3000  # parts of the largest budget at most
_ROUGH_UNITS = 300  # likewise where nothing is to be proven
_LOSS = 1e-3  # share of the weights' bytes that coarser units may fail to see
_STATES = 1 << 18  # numbers per row that one step of the knapsack may touch
_THREADS = min(8, os.cpu_count() or 1)
_PATIENCE = 24  # attempts after which twice as much is left out at a time
_SHARED_WORK = 100_000_000  # numbers from which it pays to share them out, ...
_PARTS = 4  # ... into so many parts
_NEEDED = np.array([[[0.0, 0.0], [np.inf, 0.0]]])  # the first needs the second


@dataclass(frozen=True, slots=True)
class Prices:
    """Multipliers of the constraints that tie the shares together.

    Attributes:
        cover: (groups,) seconds paid for running an operation of each group.
        compute: weight of the clock of operations and moves.
        copies: (kinds,) weight of each kind's copy queue; with ``compute``, and each times the number
            of its devices, they add up to 1.
        unique: (items,) seconds asked for keeping a weight that several operations read.
        limited: (kinds, groups) seconds paid beside, where a kind has to run more or less of a group.
        constant: seconds that these limits add to the bound.
    """

    cover: Floats
    compute: float
    copies: Floats
    unique: Floats
    limited: Floats
    constant: float


class Effort(Enum):
    """How much of the knapsacks is solved.

    ``WHOLE`` is what proves a bound. ``QUICK`` is one knapsack for each kind of device, which leaves free
    what any of its units may need. ``ROUGH`` is the same in coarse units of capacity: its shares may lack
    or waste some bytes.
    """

    ROUGH = "rough"
    QUICK = "quick"
    WHOLE = "whole"


@dataclass(slots=True)
class _Level:
    """The knapsacks of an effort.

    Attributes:
        knapsack: their structure.
        rows: which of all they are.
        unit: bytes of a unit of capacity.
        refusals: a table for each crowd that is in the structure.
        touched: numbers that the last solution touched, or the next might.
        solved: whether there was one.
    """

    knapsack: Knapsack
    rows: Ints
    unit: int
    refusals: list[Floats]
    touched: int
    solved: bool = False


class Pricing:
    """Knapsacks over shares, prepared once and solved for many prices.

    Attributes:
        shares: what they choose from.
        row_kind: (rows,) the kind of device of each knapsack.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.room, self.working = shares.room, shares.working
        self.tables = dict(shares.tables)
        total = float(shares.nbytes.sum())
        self.unit = _unit(shares.nbytes, min(total, float(self.room.max(initial=1.0))))
        sizes = shares.nbytes // self.unit
        bands = make_bands(self.working, shares.crowds, shares.nbytes[: shares.units], self.room)
        rows = with_remainders(shares, bands, self.unit)
        self.bands = [row.band for row in rows]
        self.row_kind = np.array([band.kind for band in self.bands], dtype=np.int64)
        self._barred = np.array([self.working[row.band.kind] > row.band.high for row in rows])
        self._barred |= np.array([row.without[: shares.units] for row in rows])
        self._crowds = self._counted(shares.crowds)
        rooms = np.array([row.room for row in rows])
        capacities = np.floor(rooms / self.unit).astype(np.int64)
        top = max(1, int(capacities.max(initial=0)) + 1)
        limit = max(3, int(np.log2(_STATES / top)))
        dropped: set[int] = set()
        for attempt in count():
            kept = [pair for pair in self.tables if not dropped & set(pair)]
            needs = [pair for pair in shares.needs if not dropped & set(pair)]
            scopes = [*kept, *needs, *(crowd.units for crowd in self._crowds)]
            knapsack = Knapsack(sizes, scopes, capacities)
            wide = _widest(knapsack.steps, limit)
            if not wide or not self._narrow(wide, limit, dropped, 1 << attempt // _PATIENCE):
                break
        self._kept, self._kept_needs = kept, needs
        self._learned = 1.0  # share of the work that is left where what repeats itself is known
        self._table_kinds, self._table_kind = _distinct([self.tables[pair] for pair in kept])
        refusals, kinds = _distinct([self._refusal(crowd) for crowd in self._crowds])
        tables = [refusals[kind] for kind in kinds]
        every = np.arange(len(rows))
        self._levels = {Effort.WHOLE: _Level(knapsack, every, self.unit, tables, knapsack.work)}
        self._add_quick_level(sizes, [*kept, *needs])
        # sizes to the nearest coarse unit, and capacities as much larger or smaller as all of them are
        self._coarse = self.unit * max(1, top // _ROUGH_UNITS)
        self._rooms = rooms
        self._crowded = np.zeros((len(self._crowds), shares.units), dtype=bool)
        for index, crowd in enumerate(self._crowds):
            self._crowded[index, list(crowd.units)] = True
        self._crowd_needs = np.array([crowd.nbytes for crowd in self._crowds], dtype=np.int64)
        self._crowd_needs = self._crowd_needs.reshape(len(self._crowds), len(shares.kinds))
        self._maker, self._reader = np.array(kept, dtype=np.int64).reshape(len(kept), 2).T
        apart = [self.tables[pair][:, 0, 1] for pair in kept]
        self._apart = np.array(apart, dtype=float).reshape(len(kept), len(shares.kinds)).T

    def _add_quick_level(self, sizes: Ints, scopes: Sequence[tuple[int, ...]]) -> None:
        """Rows without a proof refuse nothing, so that they need no tables of crowds."""
        rows = _roomiest(self.bands)
        knapsack = self._levels[Effort.WHOLE].knapsack.of_rows(rows)
        if self._crowds:
            knapsack = Knapsack(sizes, scopes, knapsack.capacities)
        self._levels[Effort.QUICK] = _Level(knapsack, rows, self.unit, [], knapsack.work)

    def _level(self, effort: Effort) -> _Level:
        """The knapsacks of an effort; the rough ones are made when they are first asked for."""
        found = self._levels.get(effort)
        if found is None:
            rows, coarse, nbytes = self._levels[Effort.QUICK].rows, self._coarse, self.shares.nbytes
            nearest = np.rint(nbytes / coarse).astype(np.int64)
            grown = float(nearest.sum()) * coarse / max(float(nbytes.sum()), 1.0)
            capacities = np.floor(self._rooms[rows] * grown / coarse).astype(np.int64)
            knapsack = Knapsack(nearest, [*self._kept, *self._kept_needs], capacities)
            found = _Level(knapsack, rows, coarse, [], int(knapsack.work * self._learned))
            self._levels[effort] = found
        return found

    def _narrow(self, wide: Sequence[tuple[int, ...]], limit: int, dropped: set[int], times: int) -> bool:
        """Leave out what opens too many variables at once: crowds, then cheap values, then cheap pairs.

        ``times`` as many as are too many: so that large graphs take few attempts.
        """
        open_ = {variable for frontier in wide for variable in frontier}
        touching = {self._sort(crowd) for crowd in self._crowds if not open_.isdisjoint(crowd.units)}
        if touching:  # those of every layer: else they would go layer by layer
            self._crowds = [crowd for crowd in self._crowds if self._sort(crowd) not in touching]
            return True
        before = len(dropped), len(self.tables)
        for frontier in wide:
            values = sorted(
                (v for v in frontier if v in self.shares.value_cost), key=self.shares.value_cost.__getitem__
            )
            dropped.update(values[: times * (len(frontier) - limit)])
            if not values:
                self._drop_pairs(frontier, times * (len(frontier) - limit))
        return before != (len(dropped), len(self.tables))

    def _counted(self, crowds: Sequence[Crowd]) -> list[Crowd]:
        """Those that some band refuses though it has all of their units one by one."""
        return [
            crowd
            for crowd in crowds
            if any(
                crowd.nbytes[band.kind] > band.high
                and max(self.working[band.kind][unit] for unit in crowd.units) <= band.high
                for band in self.bands
            )
        ]

    def _sort(self, crowd: Crowd) -> tuple[tuple[int, ...], bytes]:
        """The same for crowds of equal units that need the same."""
        return tuple(self.shares.group[list(crowd.units)].tolist()), crowd.nbytes.tobytes()

    def _refusal(self, crowd: Crowd) -> Floats:
        """The table that keeps a crowd out of the bands that have no room for it."""
        table = np.zeros((len(self.bands), *(2,) * len(crowd.units)))
        refused = np.array([crowd.nbytes[band.kind] > band.high for band in self.bands])
        table.reshape(len(self.bands), -1)[:, -1] = np.where(refused, np.inf, 0.0)
        return table

    def _drop_pairs(self, frontier: Sequence[int], excess: int) -> None:
        open_ = set(frontier)
        touching = [pair for pair in self.tables if open_ & set(pair)]
        touching.sort(key=lambda pair: float(self.tables[pair].max()))
        for pair in touching[: max(1, excess)]:
            del self.tables[pair]

    # -- solving ----------------------------------------------------------------------------------

    def work(self, effort: Effort) -> int:
        """Numbers that :meth:`best` touched the last time, or might touch."""
        return self._level(effort).touched

    @property
    def least_rough_work(self) -> float:
        """What the steps of the knapsacks take by themselves: of that, coarse units save nothing."""
        return self._learned * STEP_WORK * (1 + self._levels[Effort.QUICK].knapsack.count)

    def kinds(self, effort: Effort) -> Ints:
        """(rows,) the kind of device of each knapsack that is solved."""
        found: Ints = self.row_kind[self._level(effort).rows]
        return found

    def best(
        self, prices: Prices, gone: Bools, margin: Floats, effort: Effort, *, exact: bool = False
    ) -> Chosen:
        """The cheapest share of each kind and band at these prices.

        Args:
            prices: multipliers.
            gone: (units,) those that may not be in a share.
            margin: (kinds,) bytes that a share leaves free beyond what it must.
            effort: which knapsacks.
            exact: in double precision, as a proof needs it.
        """
        level, shares = self._level(effort), self.shares
        rows = self.row_kind[level.rows]
        with np.errstate(invalid="ignore"):  # 0 x infinity, where an operation may not run
            clock, queue = shares.clock[rows] * prices.compute, shares.queue[rows]
        weight = prices.copies[rows][:, None]
        cost = clock + queue * weight
        cost[:, : shares.units] -= (prices.cover + prices.limited[rows])[:, shares.group]
        cost[:, : shares.units][self._barred[level.rows] | gone[None, :]] = np.inf
        with np.errstate(invalid="ignore"):
            aside = shares.aside.clock[rows] * prices.compute + shares.aside.queue[rows] * weight
        aside = np.where(np.isnan(aside), np.inf, aside) - prices.unique[None, :]
        cost = cost + prices.unique[None, :]
        made = [table[rows] * prices.compute for table in self._table_kinds]
        tables = [made[number] for number in self._table_kind]
        tables += [_NEEDED] * len(self._kept_needs)
        tables += level.refusals
        less = np.ceil(margin[rows] / level.unit).astype(np.int64)
        dtype = np.float64 if exact else np.float32
        solve = _shared if level.knapsack.rows > 1 and level.touched >= _SHARED_WORK else Knapsack.solve
        found = solve(level.knapsack, cost, aside, tables, less, dtype)
        self._learn(level, found.work)
        return found

    def _learn(self, level: _Level, touched: int) -> None:
        """What repeats itself is found while it is solved, and is the same at all levels."""
        if not level.solved:
            share = touched / level.touched
            self._learned *= share
            for other in self._levels.values():
                other.touched = other.touched if other.solved else int(other.touched * share)
            level.solved = True
        level.touched = touched

    def clock_seconds(self, kind: int, taken: Bools, aside: Bools) -> float:
        """Seconds of a share on the clock of operations and moves."""
        seconds = float(self.shares.clock[kind][taken].sum() + self.shares.aside.clock[kind][aside].sum())
        arrives = taken[self._reader] & ~taken[self._maker]
        return seconds + float(self._apart[kind][arrives].sum())

    def queue_seconds(self, kind: int, taken: Bools, aside: Bools) -> float:
        """Seconds of a share on the copy queue."""
        return float(self.shares.queue[kind][taken].sum() + self.shares.aside.queue[kind][aside].sum())

    def fits(self, kind: int, taken: Bools, aside: Bools, margin: Floats) -> bool:
        """Whether a device has room for a share, as far as the knapsacks know."""
        needs = self.shares.kept_bytes(taken, aside) + self.activation_bytes(kind, taken)
        return bool(needs <= self.room[kind] - margin[kind])

    def activation_bytes(self, kind: int, taken: Bools) -> float:
        """Bytes for activations that a share needs at least beside its weights."""
        mine = taken[: self.shares.units]
        needs = float(self.working[kind][mine].max(initial=0))
        there = ~(self._crowded & ~mine).any(axis=1)
        return max(needs, float(self._crowd_needs[there, kind].max(initial=0)))


def _roomiest(bands: Sequence[Band]) -> Ints:
    """For each kind of device the first row with room for the most activations."""
    first: dict[int, int] = {}
    for row, band in enumerate(bands):
        if band.kind not in first or band.high > bands[first[band.kind]].high:
            first[band.kind] = row
    return np.array(list(first.values()), dtype=np.int64)


def _distinct(tables: Sequence[Floats]) -> tuple[list[Floats], list[int]]:
    """Those that differ, and which of them each one is."""
    known: dict[tuple[tuple[int, ...], bytes], int] = {}
    found, kinds = list[Floats](), list[int]()
    for table in tables:
        kind = known.setdefault((table.shape, table.tobytes()), len(known))
        kinds.append(kind)
        if kind == len(found):
            found.append(table)
    return found, kinds


def _shared(
    knapsack: Knapsack, cost: Floats, aside: Floats, tables: Sequence[Floats], less: Ints, dtype: type
) -> Chosen:
    """Some rows by each thread, which numpy lets run."""

    def solve(part: Ints) -> Chosen:
        mine = {id(table): table[part] if len(table) > 1 else table for table in tables}
        chosen = [mine[id(table)] for table in tables]
        return knapsack.of_rows(part).solve(cost[part], aside[part], chosen, less[part], dtype)

    # rows of like capacities have states of like length; as many parts on every machine
    order = np.argsort(knapsack.capacities, kind="stable")
    shares = np.array_split(order, min(_PARTS, knapsack.rows))
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(solve, shares))
    back = np.argsort(order, kind="stable")
    return Chosen(
        np.concatenate([part.cost for part in parts])[back],
        np.concatenate([part.taken for part in parts])[back],
        np.concatenate([part.aside for part in parts])[back],
        sum(part.work for part in parts),
    )


def _widest(steps: Sequence[Step], limit: int) -> list[tuple[int, ...]]:
    """What is open where more is than may be: the most of each stretch of such steps."""
    found: list[tuple[int, ...]] = []
    inside = False
    for step in steps:
        open_ = (*step.frontier, step.variable)
        if len(open_) <= limit:
            inside = False
        elif not inside:
            found.append(open_)
            inside = True
        elif len(open_) > len(found[-1]):
            found[-1] = open_
    return found


def _unit(nbytes: Ints, room: float) -> int:
    """Bytes of a unit of capacity: as large as loses nothing of the large weights, if that is possible."""
    sizes, counts = np.unique(nbytes[nbytes > 0], return_counts=True)
    least = max(1, int(room / _UNITS))
    if not len(sizes):
        return least
    total = float((sizes * counts).sum())
    heavy = sizes[np.argsort(-(sizes * counts))][:12]
    candidates = {least}
    for size in heavy:
        candidates.update(int(size // k) for k in range(1, max(1, int(size // least)) + 1))
    lost = {c: float(((sizes % c) * counts).sum()) / total for c in candidates if c >= least}
    allowed = min(lost.values()) + _LOSS
    return max(c for c, share in lost.items() if share <= allowed)
