"""Raise the bound of column generation by branching on how much of a group a kind of device runs.

A mixture of shares may give a device 7.4 of 32 equal layers, or half of an embedding; no placement does.
The problem is parted in two, at most 7 and at least 8, and each part has a bound of its own: the bound of
the whole is the lowest of its parts.
"""

from __future__ import annotations

import heapq
import time
from itertools import count

import numpy as np

from graphplan.passes.columns import ColumnGeneration
from graphplan.passes.master import Limit
from graphplan.passes.pricing import Effort

__all__ = ["Tree"]

_ROUNDS = 12  # of column generation in each part
_WHOLE = 1e-4  # what differs less from a whole number is one


class Tree:
    """The parts of a problem that no placement better than the best known is excluded from.

    Attributes:
        looked: how many parts have been looked at.
        late: whether there was no time left for another round in any.
    """

    def __init__(self, root: ColumnGeneration) -> None:
        self.looked = 0
        self.late = False
        self._order = count()
        self._open = [(root.bound, next(self._order), root)]
        self._whole = np.inf  # the lowest bound of parts whose mixture has no fractions to part by
        self._each = _ROUNDS * max(1, root.pricing.work(Effort.WHOLE))

    @property
    def bound(self) -> float:
        """Seconds that no placement can go below."""
        return float(min(self._open[0][0] if self._open else np.inf, self._whole))

    @property
    def lowest(self) -> ColumnGeneration | None:
        """The part whose bound is that of the whole."""
        return self._open[0][2] if self._open else None

    def grow(self, *, enough: float, work: float, deadline: float | None = None) -> float:
        """Part what has the lowest bound, again and again; the bound then.

        Args:
            enough: seconds of a bound that needs no improvement.
            work: numbers that the knapsacks may touch.
            deadline: ``time.monotonic()`` at which to stop, or None.
        """
        while self._open and self._open[0][0] < min(enough, self._whole) and work > 0 and not self.late:
            if deadline is not None and time.monotonic() > deadline:
                break
            _, _, part = heapq.heappop(self._open)
            limits = _limits(part)
            if not limits:
                self._whole = min(self._whole, part.bound)
            self.late = bool(limits) and deadline is not None
            for limit in limits:
                child = part.with_limit(limit)
                begun = child.rounds
                child.run(enough=enough, work=self._each, deadline=deadline)
                work -= (child.rounds - begun + 1) * self._each / _ROUNDS
                self.late &= child.rounds == begun
                self.looked += 1
                heapq.heappush(self._open, (child.bound, next(self._order), child))
        return self.bound


def _limits(part: ColumnGeneration) -> list[Limit]:
    """The two parts by the most telling number that is not whole; none if all are."""
    mixture = part.mix()
    if mixture is None:
        return []
    shares = part.shares
    mixed = np.zeros((len(shares.kinds), len(part.counts)))
    for column, amount in zip(part.columns, mixture.shares, strict=True):
        if amount > _WHOLE:
            mixed[column.kind] += amount * column.cover
    off = np.abs(mixed - np.round(mixed))
    # of what is large or differs between kinds, half a unit more or less matters most
    first = np.unique(shares.group, return_index=True)[1]
    clock = np.where(np.isfinite(shares.clock[:, first]), shares.clock[:, first], 0.0)
    size = shares.nbytes[first] / max(1.0, float(shares.room.max()))
    weight = size + np.ptp(clock, axis=0) / max(part.bound, 1e-12)
    score = np.where(off > _WHOLE, off * weight[None, :], 0.0)
    if not score.any():
        return []
    kind, group = np.unravel_index(int(score.argmax()), score.shape)
    below = int(np.floor(mixed[kind, group]))
    return [
        Limit(int(kind), int(group), below, least=False),
        Limit(int(kind), int(group), below + 1, least=True),
    ]
