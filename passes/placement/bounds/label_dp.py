"""Label-setting search over the frontier: a resource-constrained shortest path.

A label is a partial placement: its state, its clock, and the bytes that weights and the neediest operation
take on each device. It is extended by one step at a time, on every device. If labels differ in the clock
only, the fastest dominates (Irnich and Desaulniers, "Shortest path problems with resource constraints",
2005). A label's f-value, its priced clock plus the relaxation's cost-to-go, is a lower bound of its
completions; a label that cannot beat the best known placement is pruned. While no step has more labels than
``width`` the search is exact for the relaxed problem. Beyond that it is a beam, and the bound is the least
f-value dropped.

Where weights are streamed, a label also has the end of each device's copy queue and the times at which its
prefetch slots are free. The f-value then weighs the queue by its price, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from graphplan.passes.placement.arrays import Bools, Floats, Ints
from graphplan.passes.placement.bounds.relaxation import Buffers, Relaxation
from graphplan.passes.placement.params import PARAMS, Effort

_NEVER = 1e9  # seconds of what is impossible: more than anything takes, with finite sums
_MIX = np.int64(-7046029254386353131)  # an odd number that scatters bits


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete placement that a search has found.

    Attributes:
        seconds: seconds by the clock of the labels.
        device: (variables,) device of each macro-operation, then the home of each shared weight.
        streamed: (variables,) 1 where its movable weights are streamed, else 0.
        spare: (devices,) bytes that stay free.
    """

    seconds: float
    device: Ints
    streamed: Ints
    spare: Floats


@dataclass(frozen=True, slots=True)
class LabelSearch:
    """The result of a search: completions, the fastest first; a lower bound; whether no label was dropped."""

    completions: tuple[Completion, ...]
    bound: float
    exact: bool


@dataclass(slots=True)
class _Labels:
    """Labels, as columns of arrays.

    Attributes:
        state: (labels,) states of the frontier.
        clock: (labels,) seconds.
        nbytes: (devices, labels) bytes of resident weights.
        needs: (devices, labels) bytes of the neediest operation beside the weights.
        queue: (devices, labels) seconds at which the copies so far are done; no rows without streaming.
        free: (devices, slots, labels) seconds at which each prefetch slot is free, the latest first.
        parent: (labels,) index among the labels of the step before.
        option: (labels,) twice the device, plus one where weights are streamed.
        value: (labels,) the f-value.
    """

    state: Ints
    clock: Floats
    nbytes: Floats
    needs: Floats
    queue: Floats
    free: Floats
    parent: Ints
    option: Ints
    value: Floats

    @property
    def count(self) -> int:
        return len(self.clock)

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        return [getattr(self, each.name) for each in fields(self)]

    def take(self, which: Ints) -> _Labels:
        return _Labels(*(array.take(which, axis=-1) for array in self.arrays))

    @classmethod
    def joined(cls, parts: Sequence[_Labels]) -> _Labels:
        columns = zip(*(part.arrays for part in parts), strict=True)
        return cls(*(np.concatenate(each, axis=-1) for each in columns))


def search_labels(
    relaxation: Relaxation,
    width: int,
    below: float,
    effort: Effort,
    margin: Floats | float = 0.0,
    *,
    every: bool = False,
) -> LabelSearch:
    """Search complete placements by label setting.

    Args:
        relaxation: the relaxation, with prices.
        width: most labels kept after a step.
        below: seconds of a known placement; labels that cannot be faster are pruned.
        effort: the effort to charge.
        margin: (devices,) bytes to leave free, where exact peaks exceeded a budget; the bound is then void.
        every: whether to keep dominated labels, and to return all completions: their exact peaks differ.
    """
    return _LabelSearch(relaxation, width, below, effort, margin, every).run()


def widest(relaxation: Relaxation, visits: float) -> int:
    """Return the width of a search with this many visits; below 1 if they are too few."""
    fixed = _visits(relaxation, 0)
    each = visits / max(1, len(relaxation.frontier.steps))
    return int((each - fixed) / (_visits(relaxation, 1) - fixed))


def _visits(relaxation: Relaxation, labels: int) -> float:
    """Return the visits of one step; twice as many if its weights may be streamed too."""
    devices = relaxation.frontier.devices
    return (1 + relaxation.streams) * (1500.0 + 600.0 * devices + 4.0 * devices * labels)


@dataclass
class _LabelSearch:
    relaxation: Relaxation
    width: int
    below: float
    effort: Effort
    margin: Floats | float
    every: bool

    def __post_init__(self) -> None:
        relaxation = self.relaxation
        self.frontier = relaxation.frontier
        self.buffers = relaxation.buffers or Buffers.none(self.frontier.devices)
        self.streams = relaxation.streams
        self.room = relaxation.room + relaxation.least - self.margin
        self.per_byte, self.weight = relaxation.prices.per_byte, relaxation.prices.queue
        self.dropped = np.inf
        self.trail: list[tuple[Ints, Ints]] = []
        self.constant = self.frontier.constant - float(self.per_byte @ relaxation.room)
        self.detours = _Detours(relaxation) if self.streams else None

    def run(self) -> LabelSearch:
        count = self.frontier.devices
        rows, slots = (count, max(1, int(self.buffers.slots.max()))) if self.streams else (0, 0)
        labels = _Labels(
            self.frontier.start(),
            np.zeros(1),
            np.zeros((count, 1)),
            self.relaxation.least[:, None],
            np.zeros((rows, 1)),
            np.zeros((rows, slots, 1)),
            np.zeros(1, dtype=np.int64),
            np.zeros(1, dtype=np.int64),
            np.zeros(1),
        )
        for i in range(len(self.frontier.steps)):
            labels = self._grow(i, labels)
            if not labels.count:
                return LabelSearch((), min(self.below, self.dropped), not np.isfinite(self.dropped))
            self.trail.append((labels.parent.astype(np.int32), labels.option.astype(np.int16)))
            if self.effort.over:
                return LabelSearch((), 0.0, exact=False)
        seconds = labels.clock + self.frontier.constant
        order = np.argsort(seconds, kind="stable")
        order = order if self.every else order[: PARAMS.completions]
        completions = tuple(self._trace(int(label), labels, seconds) for label in order)
        bound = min(self.below, self.dropped, float(seconds.min()))
        return LabelSearch(completions, bound, not np.isfinite(self.dropped))

    def _grow(self, i: int, labels: _Labels) -> _Labels:
        relaxation, step = self.relaxation, self.frontier.steps[i]
        stage, rest = relaxation.stages[i], relaxation.rest[i + 1]
        after, seconds = self.frontier.extend(step, labels.state)
        self.effort.charge(_visits(relaxation, labels.count))
        grown = []
        for d, streamed in product(range(self.frontier.devices), (False, True)):
            if not self._possible(i, d, streamed=streamed):
                continue
            fits = self._have_room(i, d, labels, streamed=streamed)
            able = np.flatnonzero(np.isfinite(seconds[d]) & fits)
            if len(able):
                children = labels.take(able)
                children.state, children.parent = after[d, able], able
                children.clock = children.clock + seconds[d, able]
                self._place(i, d, children, streamed=streamed)
                grown.append(children)
        if not grown:
            return labels.take(np.zeros(0, dtype=np.int64))
        children = _Labels.joined(grown)
        children.value = self._values(children, rest[stage.find(self.frontier, children.state)])
        rank = children.value
        if self.detours is not None:
            left = self.room[:, None] - children.needs - children.nbytes
            rank = rank + self.detours.seconds(i + 1, left)
        return self._best(children, rank)

    def _possible(self, i: int, d: int, *, streamed: bool) -> bool:
        """Whether a step may be placed on a device, with its movable weights streamed or not."""
        if streamed:
            return bool(np.isfinite(self.relaxation.copy[d, i]))
        through_slots = self.streams and self.relaxation.fixed_queue[d, i]  # weights fixed in CPU memory
        return not through_slots or bool(self.buffers.slots[d])

    def _have_room(self, i: int, d: int, labels: _Labels, *, streamed: bool) -> Bools:
        """(labels,) whether a step's weights and needs fit beside those of the steps before."""
        step, cpu = self.frontier.steps[i], self.relaxation.cpu
        nbytes = step.nbytes - (step.movable if streamed else 0.0)
        fits: Bools = labels.nbytes[d] + nbytes <= self.room[d] - np.maximum(labels.needs[d], step.needs[d])
        if streamed:
            fits &= labels.nbytes[cpu] + step.movable <= self.room[cpu] - labels.needs[cpu]
        return fits

    def _place(self, i: int, d: int, labels: _Labels, *, streamed: bool) -> None:
        """Update labels in place for a step on a device, whose seconds their clocks include already."""
        relaxation, step = self.relaxation, self.frontier.steps[i]
        labels.needs[d] = np.maximum(labels.needs[d], step.needs[d])
        labels.nbytes[d] += step.nbytes - (step.movable if streamed else 0.0)
        labels.option = np.full(labels.count, 2 * d + streamed)
        if streamed:
            labels.nbytes[relaxation.cpu] += step.movable
            if relaxation.on_clock:
                labels.clock = labels.clock + self._copy_seconds(i, d)
        copying = relaxation.fixed_queue[d, i] + (self._copy_seconds(i, d) if streamed else 0.0)
        if self.streams and copying:
            slot = int(self.buffers.slots[d]) - 1
            labels.queue[d] = np.maximum(labels.queue[d], labels.free[d, slot]) + copying
            labels.clock = np.maximum(labels.clock - step.seconds[d], labels.queue[d]) + step.seconds[d]
            labels.free[d, 1:] = labels.free[d, :-1].copy()
            labels.free[d, 0] = labels.clock

    def _copy_seconds(self, i: int, d: int) -> float:
        """Return the seconds of streaming a step's weights; unlike ``Relaxation.copy``, without waits."""
        arrays, cpu = self.frontier.arrays, self.relaxation.cpu
        assert cpu is not None
        return float(arrays.latency[cpu, d] + self.frontier.steps[i].copied * arrays.per_byte[cpu, d])

    def _values(self, labels: _Labels, rest: Floats) -> Floats:
        """(labels,) f-values, given the cost-to-go of their states."""
        priced = self.per_byte @ labels.nbytes + self.constant + rest
        if not self.streams:
            return np.asarray(labels.clock + priced)
        # copies are ahead of the clock by what the buffers hold at most: longer idle time is lost
        least = labels.clock[None, :] - self.relaxation.prefetch_slack[:, None]
        last = labels.free[np.arange(len(self.buffers.slots)), np.maximum(self.buffers.slots - 1, 0)]
        queue = np.minimum(np.maximum(np.maximum(labels.queue, least), last), labels.clock[None, :])
        weighed = (1.0 - self.weight.sum()) * labels.clock + self.weight @ queue
        return np.asarray(np.maximum(weighed + priced, labels.clock))

    def _best(self, labels: _Labels, rank: Floats) -> _Labels:
        """Return the labels of least ``rank``, at most ``width``, without pruned and dominated ones."""
        order = np.argsort(rank, kind="stable")
        order = order[labels.value[order] < self.below]
        if not self.every:
            order = _undominated(labels, order)
        if len(order) > self.width:
            self.dropped = min(self.dropped, float(labels.value[order[self.width :]].min()))
        return labels.take(order[: self.width])

    def _trace(self, label: int, labels: _Labels, seconds: Floats) -> Completion:
        frontier = self.frontier
        count = frontier.units + len(frontier.shared)
        device, streamed = np.full(count, -1), np.zeros(count, dtype=np.int64)
        total, spare = float(seconds[label]), self.room - labels.nbytes[:, label] - labels.needs[:, label]
        for step, (parent, option) in zip(reversed(frontier.steps), reversed(self.trail), strict=True):
            device[step.variable], streamed[step.variable] = divmod(int(option[label]), 2)
            label = int(parent[label])
        return Completion(total, device, streamed, spare)


class _Detours:
    """Estimates the seconds that labels lose later if they leave no room for weights that fit no slot.

    Prices are means over all bytes: a label may spend bytes that one large, last weight needs. The steps left
    whose weights must reside on accelerators are a knapsack for the bytes left there. Those without room run
    elsewhere, the cheapest for their bytes first, in fractions (Dantzig's bound).
    """

    def __init__(self, relaxation: Relaxation) -> None:
        self.on, seconds = relaxation.frontier.arrays.accelerates, relaxation.seconds
        kept = relaxation.nbytes - np.where(np.isfinite(relaxation.copy), relaxation.movable, 0.0)
        kept = np.where(np.isfinite(seconds), kept, np.inf)[self.on].min(axis=0, initial=np.inf)
        elsewhere = seconds[~self.on].min(axis=0, initial=_NEVER)
        steps = np.flatnonzero(np.isfinite(kept) & (kept > 0))
        costs = elsewhere[steps] - seconds[self.on][:, steps].min(axis=0, initial=np.inf)
        order = np.argsort(costs / kept[steps], kind="stable")
        self.steps, self.kept, self.costs = steps[order], kept[steps][order], np.maximum(costs[order], 0.0)

    def seconds(self, i: int, left: Floats) -> Floats:
        """(labels,) seconds lost by the steps from ``i`` on, with ``left`` (devices, labels) bytes."""
        later = self.steps >= i
        kept, costs = self.kept[later].cumsum(), self.costs[later].cumsum()
        lacking = kept[-1:].sum() - left[self.on].sum(axis=0)
        return np.asarray(np.interp(lacking, np.append(0.0, kept), np.append(0.0, costs)))


def _undominated(labels: _Labels, order: Ints) -> Ints:
    """Return the first label of each state, bytes and needs, in the given order."""
    rows = [row[order] for row in (labels.state, *labels.nbytes, *labels.needs)]
    hashes = np.zeros(len(order), dtype=np.int64)
    for row in rows:
        hashes = (hashes ^ (hashes >> 29)) * _MIX + row.astype(np.int64)
    by_hash = np.argsort(hashes, kind="stable")
    same = np.ones(max(0, len(by_hash) - 1), dtype=bool)
    for row in (hashes, *rows):
        same &= row[by_hash[:-1]] == row[by_hash[1:]]
    keep = np.ones(len(order), dtype=bool)
    keep[by_hash[1:][same]] = False
    return order[keep]
