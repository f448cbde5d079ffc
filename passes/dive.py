"""Placements out of column generation: give one device its share, solve for the rest, and so on.

Each time the share that the master problem uses most is settled, and new shares are made for the
operations and devices that are left. The last device takes what remains. Where the evaluator finds a
device over its budget, the shares are made again with as much more room left free.
"""

from __future__ import annotations

import time

import numpy as np

from graphplan.device import DeviceKey
from graphplan.passes.columns import ColumnGeneration
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.master import Column
from graphplan.passes.pricing import Effort
from graphplan.passes.residence import follow, reside
from graphplan.passes.spread import fetch_excess

__all__ = ["dive"]

_TRIES = 4


def dive(
    problem: Problem,
    generation: ColumnGeneration,
    *,
    rounds: int = 4,
    work: float,
    deadline: float | None = None,
) -> tuple[list[Evaluation], float]:
    """Placements, feasible or nearly so, and the work that they took."""
    shares = generation.shares
    found: list[Evaluation] = []
    spent = 0.0
    margin = np.zeros(len(shares.kinds))
    for _ in range(_TRIES):
        if spent >= work or (deadline is not None and time.monotonic() > deadline):
            break
        devices, used = _devices(generation.with_margin(margin), rounds, deadline)
        spent += used
        operations = problem.obey(devices)
        evaluation = evaluate(problem, reside(problem, operations))
        if evaluation.excess and problem.offload:
            streamed = fetch_excess(problem, operations)
            evaluation = evaluation if streamed is None else streamed
        found.append(evaluation)
        if evaluation.feasible:
            break
        margin = margin.copy()
        for row, kind in enumerate(shares.kinds):
            margin[row] += max((evaluation.excess.get(key, 0) for key in kind.keys), default=0) * 1.05
    return found, spent


def _devices(
    generation: ColumnGeneration, rounds: int, deadline: float | None
) -> tuple[dict[str, DeviceKey], float]:
    """A device for each operation, and the work that it took to find them."""
    shares = generation.shares
    left = [list(kind.keys) for kind in shares.kinds]
    where: dict[int, DeviceKey] = {}
    work = 0.0
    rest = generation
    while sum(map(len, left)) > 1 and rest.counts.any():
        work += rest.approach(enough=np.inf, work=rounds * rest.pricing.work(Effort.ROUGH), deadline=deadline)
        column = _most_used(rest) if sum(map(len, left)) > 2 else _best_pair(rest, left)
        if column is None:
            break
        key = left[column.kind].pop(0)
        for unit in np.nonzero(column.taken[: shares.units])[0]:
            where[int(unit)] = key
        rest = rest.fix(column)
    last = next(keys[0] for keys in reversed(left) if keys)
    placed = {
        name: where.get(unit, last) for unit in range(shares.units) for name in shares.items[unit].members
    }
    return follow(shares.graph, placed), work


def _most_used(rest: ColumnGeneration) -> Column | None:
    """The share that the mixture has most of."""
    mixture = rest.mix()
    if mixture is None:
        return None
    used = [i for i in np.argsort(-mixture.shares, kind="stable") if rest.columns[i].cover.any()]
    return rest.columns[used[0]] if used and mixture.shares[used[0]] > 1e-6 else None


def _best_pair(rest: ColumnGeneration, left: list[list[DeviceKey]]) -> Column | None:
    """The share that is best together with what it leaves to the last device."""
    shares = rest.shares
    best: tuple[float, float, Column] | None = None
    for column in rest.columns:
        if not left[column.kind] or not column.cover.any():
            continue
        other = next(k for k, keys in enumerate(left) if len(keys) > (k == column.kind))
        taken, nbytes = shares.complete(~(rest.gone | column.taken[: shares.units]))
        over = max(0.0, nbytes - shares.room[other] + rest.margin[other])
        mine = shares.kept_bytes(column.taken, column.aside)
        over += max(0.0, mine - shares.room[column.kind] + rest.margin[column.kind])
        seconds = column.clock + rest.pricing.clock_seconds(other, taken, np.zeros_like(taken))
        if best is None or (over, seconds) < best[:2]:
            best = (over, seconds, column)
    return None if best is None else best[2]
