"""Shares to begin column generation with: pieces of the order that a device of a kind can hold.

In a stack of layers the best shares are contiguous or nearly so; the prices that come of them are near the
final ones, and the knapsacks have little left to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from graphplan.passes.shares import Shares

__all__ = ["Interval", "intervals"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Interval = tuple[int, Bools]

_CUTS = 96  # places where the order is cut
_MOST = 400  # pieces of each kind; beyond that only the longest are taken


def intervals(shares: Shares) -> Iterator[Interval]:
    """(kind, units) of pieces between the cheapest cuts, one for each number of units of each group."""
    cuts = _cheapest_cuts(shares)
    one_hot = np.zeros((shares.units + 1, len(shares.counts)), dtype=np.int32)
    one_hot[np.arange(1, shares.units + 1), shares.group] = 1
    before = one_hot.cumsum(axis=0, dtype=np.int32)[cuts]
    nbytes = np.concatenate([[0], shares.nbytes[: shares.units].cumsum()])[cuts]
    for kind in range(len(shares.kinds)):
        runs = np.concatenate([[0], np.isfinite(shares.clock[kind, : shares.units]).cumsum()])[cuts]
        for start, end in _fitting(cuts, before, nbytes, runs, float(shares.room[kind])):
            taken = np.zeros(shares.units, dtype=bool)
            taken[start:end] = True
            yield kind, taken


def _fitting(
    cuts: npt.NDArray[np.int64],
    before: npt.NDArray[np.int32],
    nbytes: npt.NDArray[np.int64],
    runs: npt.NDArray[np.int64],
    room: float,
) -> list[tuple[int, int]]:
    seen: dict[bytes, tuple[int, int]] = {}
    longest: dict[bytes, tuple[int, int]] = {}
    for i in range(len(cuts) - 1):
        last = None
        for j in range(i + 1, len(cuts)):
            whole = runs[j] - runs[i] == cuts[j] - cuts[i]
            if nbytes[j] - nbytes[i] > room or not whole:
                break
            key = (before[j] - before[i]).tobytes()
            last = key, (int(cuts[i]), int(cuts[j]))
            seen.setdefault(*last)
        if last is not None:
            longest.setdefault(*last)
    return list((seen if len(seen) <= _MOST else longest).values())


def _cheapest_cuts(shares: Shares) -> npt.NDArray[np.int64]:
    """Ends of the order, and the places between units where the least seconds of copies cross."""
    crossing = np.zeros(shares.units + 1)
    for (maker, reader), table in shares.tables.items():
        if maker < shares.units and reader < shares.units:
            crossing[min(maker, reader) + 1 : max(maker, reader) + 1] += float(table[:, 0, 1].max())
    makers: dict[int, list[int]] = defaultdict(list)
    for maker, item in shares.tables:
        if maker < shares.units <= item:
            makers[item].append(maker)
    for reader, item in shares.needs:
        for maker in makers[item]:
            crossing[maker + 1 : reader + 1] += float(shares.tables[maker, item][:, 0, 1].max())
    inner = np.argsort(crossing[1:-1], kind="stable")[: _CUTS - 2] + 1
    return np.unique(np.concatenate([[0], inner, [shares.units]])).astype(np.int64)
