"""The master problem of column generation: the best mixture of known shares, and what it says of prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array, eye_array, hstack

from graphplan.passes.pricing import Prices
from graphplan.passes.shares import Shares

__all__ = ["Box", "Column", "Fractions", "Limit", "Mixture", "mix_columns", "mix_fractions"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_COVERED = 1e-7  # of a unit may be missing
_PENALTY = 1e3  # of a unit that no column covers, in makespans


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


@dataclass(frozen=True, slots=True)
class Limit:
    """Devices of a kind run at most, or (``least``) at least, so many units of a group."""

    kind: int
    group: int
    count: int
    least: bool


@dataclass(frozen=True, slots=True)
class Mixture:
    """The solution of the master problem.

    Attributes:
        shares: (columns,) how much of each column there is.
        prices: the multipliers of its constraints.
        seconds: of the mixture.
        covers: whether each group is covered as it should be.
    """

    shares: Floats
    prices: Prices
    seconds: float
    covers: bool


@dataclass(frozen=True, slots=True)
class Box:
    """Prices of groups between ``center - width`` and ``center + width``, each (groups,) seconds."""

    center: Floats
    width: Floats


def _typical_seconds(shares: Shares, counts: Ints) -> float:
    """What a call takes about: the numbers of the program are to be near 1."""
    first = np.unique(shares.group, return_index=True)[1]
    clock = shares.clock[:, first]
    fastest = np.where(np.isfinite(clock), clock, np.inf).min(axis=0)
    return max(float(fastest[np.isfinite(fastest)] @ counts[np.isfinite(fastest)]), 1e-9)


class _Lines:
    """Inequalities ``line @ variables <= right``."""

    def __init__(self, variables: int) -> None:
        self.variables = variables
        self.lines: list[Floats] = []
        self.right: list[float] = []

    def add(self, parts: Sequence[tuple[slice, Floats]], right: float, last: float = 0.0) -> int:
        line = np.zeros(self.variables)
        for where, values in parts:
            line[where] = values
        if last:
            line[-1] = last
        self.lines.append(line)
        self.right.append(right)
        return len(self.lines) - 1


def mix_columns(
    shares: Shares,
    columns: Sequence[Column],
    counts: Ints,
    count_of: Ints,
    limits: Sequence[Limit],
    box: Box | None = None,
) -> Mixture | None:
    """The best mixture, or None where the solver gives up.

    Args:
        shares: what the columns are shares of.
        columns: the known ones.
        counts: (groups,) units that are to be covered.
        count_of: (kinds,) devices of each kind.
        limits: what else the mixture has to keep.
        box: that prices of groups are kept in; where they are at its sides, groups are not covered as they
            should be, and the mixture's seconds are only the most that a bound with prices in the box can be.
    """
    groups, kinds, count = len(counts), len(count_of), len(columns)
    clock = np.array([column.clock for column in columns])
    queue = np.array([column.queue for column in columns])
    kind = np.array([column.kind for column in columns], dtype=int)
    cover = np.array([column.cover for column in columns], dtype=float).reshape(count, groups)
    scale = _typical_seconds(shares, counts)
    # variables: columns, stand-ins per group for what they do not cover and cover beyond, the makespan
    lines, own = _Lines(count + 2 * groups + 1), slice(0, count)
    for k in range(kinds):
        lines.add([(own, (kind == k).astype(float))], float(count_of[k]))
    lines.add([(own, clock / scale)], 0.0, -1.0)
    for k in range(kinds):
        lines.add([(own, np.where(kind == k, queue, 0.0) / scale)], 0.0, -float(count_of[k]))
    kept = np.array([(c.taken & ~c.aside)[shares.ties] for c in columns]).reshape(count, len(shares.ties))
    for row in kept.T:
        lines.add([(own, row.astype(float))], 1.0)
    for limit in limits:
        sign = -1.0 if limit.least else 1.0
        covered = np.where(kind == limit.kind, cover[:, limit.group], 0.0)
        stand_in = slice(count + limit.group, count + limit.group + 1)
        # a stand-in covers what is asked for at least, so that there is always a solution
        parts = [(own, sign * covered), (stand_in, np.array([-1.0 if limit.least else 0.0]))]
        lines.add(parts, sign * limit.count)
    lack, beyond = np.full(groups, _PENALTY), np.full(groups, _PENALTY)
    if box is not None:
        lack, beyond = (box.center + box.width) / scale, (box.width - box.center) / scale
    objective = np.concatenate([np.zeros(count), lack, beyond, [1.0]])
    found = linprog(
        objective,
        A_ub=coo_array(np.array(lines.lines)),
        b_ub=np.array(lines.right),
        A_eq=hstack([csr_array(cover.T), eye_array(groups), -eye_array(groups), csr_array((groups, 1))]),
        b_eq=counts.astype(float),
        method="highs",
    )
    if found.status != 0:
        return None
    dual = np.maximum(-found.ineqlin.marginals, 0.0)
    unique = np.zeros(len(shares.items))
    first = 2 * kinds + 1
    unique[shares.ties] = dual[first : first + len(shares.ties)] * scale
    limited, constant = np.zeros((kinds, groups)), 0.0
    for limit, price in zip(limits, dual[first + len(shares.ties) :], strict=True):
        paid = float(price) * scale * (1.0 if limit.least else -1.0)
        limited[limit.kind, limit.group] += paid
        constant += paid * limit.count
    prices = _weighed(
        found.eqlin.marginals * scale,
        float(dual[kinds]),
        dual[kinds + 1 : first],
        unique,
        limited,
        constant,
        count_of,
    )
    covers = bool(found.x[count:-1].max(initial=0.0) <= _COVERED)
    return Mixture(found.x[:count], prices, float(found.fun) * scale, covers)


def _weighed(
    cover: Floats,
    compute: float,
    copies: Floats,
    unique: Floats,
    limited: Floats,
    constant: float,
    count_of: Ints,
) -> Prices:
    """Prices whose clocks add up to 1, which makes their bound one of the makespan."""
    total = compute + float(count_of @ copies)
    if total <= 0:
        compute, copies, total = 1.0, np.zeros_like(copies), 1.0
    return Prices(cover, compute / total, copies / total, unique, limited, constant)


@dataclass(frozen=True, slots=True)
class Fractions:
    """Units of each group placed in fractions, without moves between devices.

    Attributes:
        kept: (kinds, groups) those whose weights stay.
        brought: (kinds, groups) those whose weights are brought at every call.
        prices: what the program says of prices.
        seconds: of the call.
        nbytes: (groups,) weights of a unit.
    """

    kept: Floats
    brought: Floats
    prices: Prices
    seconds: float
    nbytes: Floats


@dataclass(frozen=True, slots=True)
class _Whole:
    """A unit of each group with the weights that it alone reads; arrays as in ``shares``."""

    clock: Floats
    queue: Floats
    nbytes: Floats
    aside_clock: Floats
    aside_queue: Floats


def _with_own_items(shares: Shares) -> _Whole:
    first = np.unique(shares.group, return_index=True)[1]
    group_of = {int(unit): group for group, unit in enumerate(first)}
    readers = Counter(item for _, item in shares.needs)
    arrays = (shares.clock, shares.queue, shares.aside.clock, shares.aside.queue)
    clock, queue, aside_clock, aside_queue = (array[:, first].astype(float) for array in arrays)
    nbytes = shares.nbytes[first].astype(float)
    for unit, item in shares.needs:
        group = group_of.get(unit)
        if group is None or readers[item] > 1 or not shares.nbytes[item]:
            continue
        if not nbytes[group]:  # it had nothing to bring
            aside_clock[:, group] = aside_queue[:, group] = 0.0
        clock[:, group] += shares.clock[:, item]
        queue[:, group] += shares.queue[:, item]
        aside_clock[:, group] += shares.aside.clock[:, item]
        aside_queue[:, group] += shares.aside.queue[:, item]
        nbytes[group] += float(shares.nbytes[item])
    return _Whole(clock, queue, nbytes, aside_clock, aside_queue)


def _each_once(groups: int, times: int) -> coo_array:
    """Rows of ones for the fractions of each group, and nothing for the makespan."""
    row = np.tile(np.arange(groups), times)
    return coo_array((np.ones(len(row)), (row, np.arange(len(row)))), shape=(groups, len(row) + 1))


def mix_fractions(shares: Shares, margin: Floats | None = None) -> Fractions | None:
    """The best fractions; ``margin`` (kinds,) bytes are left free."""
    kinds, groups = len(shares.kinds), len(shares.counts)
    whole = _with_own_items(shares)
    clock, queue, nbytes = whole.clock, whole.queue, whole.nbytes
    scale = _typical_seconds(shares, shares.counts)
    # variables: per kind the units whose weights are kept and those whose are brought; the makespan
    lines = _Lines(2 * kinds * groups + 1)
    high = np.full(lines.variables, np.inf)
    compute = np.zeros(lines.variables)
    for k in range(kinds):
        kept = slice(2 * k * groups, (2 * k + 1) * groups)
        brought = slice((2 * k + 1) * groups, (2 * k + 2) * groups)
        extra, copying = whole.aside_clock[k], whole.aside_queue[k]
        possible = np.isfinite(clock[k])
        may_bring = possible & np.isfinite(extra) & np.isfinite(copying)
        high[kept] = np.where(possible, np.inf, 0.0)
        high[brought] = np.where(may_bring, np.inf, 0.0)
        compute[kept] = np.where(possible, clock[k], 0.0) / scale
        compute[brought] = np.where(may_bring, clock[k] + extra, 0.0) / scale
        room = max(float(shares.room[k] - (0.0 if margin is None else margin[k])), 0.0)
        lines.add([(kept, nbytes / max(room, 1.0))], float(shares.count_of[k]) * (room > 0))
        parts = [(kept, queue[k] / scale), (brought, np.where(may_bring, queue[k] + copying, 0.0) / scale)]
        lines.add(parts, 0.0, -float(shares.count_of[k]))
    everything = slice(0, lines.variables)
    lines.add([(everything, compute)], 0.0, -1.0)
    found = linprog(
        np.concatenate([np.zeros(lines.variables - 1), [1.0]]),
        A_ub=coo_array(np.array(lines.lines)),
        b_ub=np.array(lines.right),
        A_eq=_each_once(groups, 2 * kinds),
        b_eq=shares.counts.astype(float),
        bounds=np.stack([np.zeros(lines.variables), high], axis=1),
        method="highs",
    )
    if found.status != 0:
        return None
    dual = np.maximum(-found.ineqlin.marginals, 0.0)
    nothing, free = np.zeros(len(shares.items)), np.zeros((kinds, groups))
    prices = found.eqlin.marginals * scale
    weighed = _weighed(prices, float(dual[-1]), dual[1 : 2 * kinds : 2], nothing, free, 0.0, shares.count_of)
    parts = found.x[:-1].reshape(kinds, 2, groups)
    return Fractions(parts[:, 0], parts[:, 1], weighed, float(found.fun) * scale, nbytes)
