"""Bytes that whole units of capacity do not see.

Weights have sizes that are powers of two, and so have budgets: fifteen layers fill a card to the last byte
but for the half megabyte of their norms, which is less than a unit. So where a single small weight is too
much for what a budget has beyond whole units, there are two knapsacks: one has a unit less, the other no such
weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graphplan.passes.bands import Band
from graphplan.passes.shares import Shares

__all__ = ["Row", "with_remainders"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Row:
    """A knapsack: a band, bytes for weights, and (items,) those that may not be in it."""

    band: Band
    room: float
    without: Bools


def with_remainders(shares: Shares, bands: Sequence[Band], unit: int) -> list[Row]:
    """The knapsacks of all bands: what fits a device with this band fits one of them, in units of bytes."""
    total = float(shares.nbytes.sum())
    rest = shares.nbytes % unit
    rows, beside = list[Row](), dict[int, list[Row]]()
    for band in bands:
        room = min(float(shares.room[band.kind]) - band.low, total)
        row = Row(band, room, np.zeros(len(rest), dtype=bool))
        over = (rest > room % unit) & _stays(shares, band.kind)
        if room < 0 or not over.any():
            rows.append(row)
            continue
        rows.append(replace(row, room=room - float(rest[over].min())))
        beside.setdefault(band.kind, []).append(replace(row, without=over))
    return [*rows, *(_joined(each) for each in beside.values())]


def _stays(shares: Shares, kind: int) -> Bools:
    """(items,) weights that a device of this kind must keep where it reads them."""
    brought = np.isfinite(shares.aside.clock[kind]) & np.isfinite(shares.aside.queue[kind])
    found: Bools = (shares.nbytes > 0) & ~brought
    return found


def _joined(rows: Sequence[Row]) -> Row:
    """A knapsack for what fits one of these."""
    band = replace(
        rows[0].band, low=min(row.band.low for row in rows), high=max(row.band.high for row in rows)
    )
    without = np.logical_and.reduce([row.without for row in rows])
    return Row(band, max(row.room for row in rows), without)
