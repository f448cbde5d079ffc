"""A lower bound where one accelerator streams weights, operation by operation, on its clock and copy queue.

A label is a way to place the operations so far: its state (see ``frontier``), the seconds with priced bytes,
and the lead of the queue (see ``leads``). Labels that cannot become better than what is asked are dropped,
by what is left to pay. So are those that another of the same state beats, which may wait until its lead is as
long. Where there are too many, of those that differ little one stands for the others: as much faster as makes
it at least as good as any of them, so that the bound stays one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphplan.passes.leads import Case, Leads, Rest
from graphplan.passes.states import Stage
from graphplan.passes.ways import Choice

__all__ = ["Bounded", "bound_by_labels"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_FINEST = 1e-6  # of all seconds: leads that differ less are not told apart where there are too many
_COARSER = 1.4  # times as much in the next try


@dataclass(frozen=True, slots=True)
class Bounded:
    """What a search proved.

    Attributes:
        seconds: that no placement of the case goes below, or those asked for, where that is less.
        over: bytes that the fastest way keeps beyond those that there is room for; 0 where none is left.
        labels: how many were made.
    """

    seconds: float
    over: float
    labels: int


@dataclass(slots=True)
class _Batch:
    """Labels after a step; arrays over them."""

    state: Ints
    seconds: Floats  # with priced bytes
    lead: Floats
    kept: Floats  # bytes

    def of(self, chosen: Ints) -> _Batch:
        """Some of them."""
        return _Batch(self.state[chosen], self.seconds[chosen], self.lead[chosen], self.kept[chosen])


def bound_by_labels(leads: Leads, case: Case, rest: Rest, *, enough: float, width: int) -> Bounded:
    """The bound of a case, at the prices of ``rest``.

    Args:
        leads: of a problem with one accelerator.
        case: what is looked at.
        rest: what is left to pay in it.
        enough: a bound that needs no improvement.
        width: labels that go on from a step at most.
    """
    capacity = float(leads.capacity(case)[0])
    price, ahead = float(rest.prices.nbytes[0]), leads.ahead(case)
    least, made, zero = enough + price * capacity, 0, np.zeros(1)
    batch = _Batch(np.zeros(1, dtype=np.int64), zero, zero + leads.spare, zero)
    for i, (stage, choices) in enumerate(zip(leads.stages, leads.allowed(case), strict=True)):
        parts = [_place(batch, stage, c, price, ahead, leads.ahead_beside(c, ahead)) for c in choices]
        batch = _Batch(
            np.concatenate([part.state for part in parts]),
            np.concatenate([part.seconds for part in parts]),
            np.concatenate([part.lead for part in parts]),
            np.concatenate([part.kept for part in parts]),
        )
        promise = rest.promise(i + 1, batch.state, batch.seconds, batch.lead[None, :])
        batch = batch.of(np.nonzero(promise < least)[0])
        made += len(batch.state)
        if not len(batch.state):
            return Bounded(enough, 0.0, made)
        batch = _fewer(batch, width, _FINEST * enough)
    best = int(batch.seconds.argmin())
    seconds = float(batch.seconds[best]) - price * capacity
    return Bounded(min(seconds, enough), float(batch.kept[best]) - capacity, made)


def _place(
    batch: _Batch, stage: Stage, choice: Choice, price: float, ahead: Floats, beside: Floats
) -> _Batch:
    """All labels with one choice: moves first, then a wait for what is copied."""
    seconds = stage.seconds[choice.device, batch.state]
    lead = np.minimum(batch.lead + (seconds - choice.run), ahead[0])
    paid = 0.0
    if choice.row >= 0:
        paid = price * choice.kept
    if choice.copying:
        lead = lead + choice.beside
        seconds = seconds + np.maximum(choice.copying - lead, 0.0)
        lead = np.maximum(lead - choice.copying, 0.0) - choice.beside
    lead = np.minimum(lead + choice.run, beside[0])
    state = stage.onward[choice.device, batch.state].astype(np.int64)
    kept = batch.kept + choice.kept
    return _Batch(state, batch.seconds + seconds + paid, lead, kept)


def _fewer(batch: _Batch, width: int, finest: float) -> _Batch:
    """Labels that no other of their state beats, and about so many of them at most."""
    order = np.lexsort((batch.seconds, batch.state))
    # who waits for its lead is early by as much as it has of it
    state, early = batch.state[order], (batch.seconds - batch.lead)[order]
    first = np.concatenate([[True], state[1:] != state[:-1]])
    apart = np.cumsum(first) * (float(early.max() - early.min()) + 1.0)
    earliest = np.minimum.accumulate(early - apart)
    better = np.concatenate([[True], earliest[1:] < earliest[:-1]])
    order, early, state = order[better], early[better], state[better]
    if len(order) <= width:
        return batch.of(order)
    fresh = np.concatenate([[True], state[1:] != state[:-1]])
    step = finest
    while True:
        level = np.floor(early / step)
        stays = fresh | np.concatenate([[True], level[1:] < level[:-1]])
        if stays.sum() <= max(width, 2 * fresh.sum()):
            break
        step *= _COARSER
    rows = np.nonzero(stays)[0]
    last = np.concatenate([rows[1:] - 1, [len(early) - 1]])
    found = batch.of(order[rows])
    found.seconds = found.seconds - (early[rows] - early[last])
    return found
