"""Raise the bound of column generation by branching on how much of a group a kind of device runs.

A mixture of shares may give a device 7.4 of 32 equal layers, or half of an embedding; no placement does.
The problem is parted in two, at most 7 and at least 8, and each part has a bound of its own: the bound of
the whole is the lower of the two.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from itertools import count

import numpy as np

from graphplan.passes.columns import ColumnGeneration
from graphplan.passes.master import Limit

__all__ = ["branch"]

_ROUNDS = 12  # of column generation in each part
_WHOLE = 1e-4  # what differs less from a whole number is one


def branch(
    root: ColumnGeneration, *, enough: float, work: float, deadline: float | None = None
) -> tuple[float, int]:
    """The bound after branching, and the number of parts that were looked at.

    Args:
        root: column generation that has been run.
        enough: seconds of a bound that needs no improvement.
        work: numbers that the knapsacks may touch.
        deadline: ``time.monotonic()`` at which to stop, or None.
    """
    each = _ROUNDS * max(1, root.shares.knapsack.work)
    order = count()
    open_: list[tuple[float, int, ColumnGeneration]] = [(root.bound, next(order), root)]
    looked, closed = 0, np.inf
    while open_ and open_[0][0] < min(enough, closed) and work > 0:
        if deadline is not None and time.monotonic() > deadline:
            break
        _, _, part = heapq.heappop(open_)
        limits = list(_limits(part))
        if not limits:  # whole already: the bound can rise no further this way
            closed = min(closed, part.bound)
            continue
        for limit in limits:
            child = part.with_limit(limit)
            begun = child.rounds
            child.run(enough=enough, work=each, deadline=deadline)
            work -= (child.rounds - begun + 1) * each / _ROUNDS
            looked += 1
            heapq.heappush(open_, (child.bound, next(order), child))
    lowest = min((bound for bound, _, _ in open_), default=np.inf)
    return float(min(lowest, closed, enough)), looked


def _limits(part: ColumnGeneration) -> Iterator[Limit]:
    """The two parts of the most telling number that is not whole."""
    mixture = part.mix()
    if mixture is None:
        return
    shares = part.shares
    mixed = np.zeros((len(shares.kinds), len(part.counts)))
    for column, amount in zip(part.columns, mixture.shares, strict=True):
        if amount > _WHOLE:
            mixed[column.kind] += amount * column.cover
    off = np.abs(mixed - np.round(mixed))
    first = np.array([int(np.argmax(shares.group == g)) for g in range(len(part.counts))])
    # of what is large or differs between kinds, half a unit more or less matters most
    clock = np.where(np.isfinite(shares.clock[:, first]), shares.clock[:, first], 0.0)
    weight = shares.nbytes[first] / max(1.0, float(shares.room.max())) + np.ptp(clock, axis=0) / max(
        part.bound, 1e-12
    )
    score = np.where(off > _WHOLE, off * weight[None, :], 0.0)
    if not score.any():
        return
    kind, group = np.unravel_index(int(score.argmax()), score.shape)
    below = int(np.floor(mixed[kind, group]))
    yield Limit(int(kind), int(group), below, least=False)
    yield Limit(int(kind), int(group), below + 1, least=True)
