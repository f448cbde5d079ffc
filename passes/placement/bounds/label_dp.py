"""Label-setting search over the frontier: a resource-constrained shortest path.

A label is a placement of the first operations: its state, its clock, and the bytes that weights and the
neediest operation take on each device. Labels grow by one step at a time, each on every device; of those
that agree in state and bytes the fastest is kept (Irnich and Desaulniers, "Shortest path problems with
resource constraints", 2005). A label's f-value, its priced clock plus the relaxation's cost to the end, is a
lower bound of its completions: what cannot beat the best known placement is dropped. While no step has more
labels than ``width`` the search is exact for the relaxed problem; where one has, it is a beam, and the least
f-value dropped is the bound.

Where weights are streamed, a label also has the end of each device's copy queue and the times at which its
prefetch slots are free; the f-value weighs the queue by its price, and proves nothing.
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

_NEVER = 1e9  # seconds of what cannot be: nothing takes as long, and sums of it are finite
_MIX = np.int64(-7046029254386353131)  # an odd number that scatters bits


@dataclass(frozen=True, slots=True)
class Completion:
    """A placement that a search has found.

    Attributes:
        seconds: by the clock of the labels.
        device: (variables,) of each macro-operation, then the home of each shared weight.
        streamed: (variables,) whether its movable weights are streamed.
        spare: (devices,) bytes of the room that weights leave.
    """

    seconds: float
    device: Ints
    streamed: Ints
    spare: Floats


@dataclass(frozen=True, slots=True)
class LabelSearch:
    """The result: completions, the fastest first, and seconds that none can be below."""

    completions: tuple[Completion, ...]
    bound: float
    exact: bool


@dataclass(slots=True)
class _Labels:
    """Columns are labels.

    Attributes:
        state: (labels,).
        clock: (labels,) seconds.
        nbytes: (devices, labels).
        needs: (devices, labels) bytes of the neediest operation beside the weights.
        queue: (devices, labels) when the copies so far are done; no rows where nothing is streamed.
        free: (devices, slots, labels) when each prefetch slot is free, the latest first.
        parent: (labels,) index among the labels of the step before.
        option: (labels,) twice the device, and one more where weights are streamed.
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
    """Complete placements by label setting.

    Args:
        relaxation: with prices.
        width: labels kept after a step.
        below: seconds of a known placement; what cannot be faster is dropped.
        effort: what is charged.
        margin: (devices,) bytes to leave free, where exact peaks passed a budget; the bound is then none.
        every: whether dominated labels go on too, and all completions are returned: peaks tell them apart.
    """
    return _LabelSearch(relaxation, width, below, effort, margin, every).run()


def widest(relaxation: Relaxation, visits: float) -> int:
    """Labels that a search with so many visits can keep after each step; below 1 where there are too few."""
    fixed = _visits(relaxation, 0)
    each = visits / max(1, len(relaxation.frontier.steps))
    return int((each - fixed) / (_visits(relaxation, 1) - fixed))


def _visits(relaxation: Relaxation, labels: int) -> float:
    """What a step takes: its weights stay, or are streamed."""
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
        found = tuple(self._trace(int(label), labels, seconds) for label in order)
        bound = min(self.below, self.dropped, float(seconds.min()))
        return LabelSearch(found, bound, not np.isfinite(self.dropped))

    def _grow(self, i: int, labels: _Labels) -> _Labels:
        """The labels after a step."""
        relaxation, step = self.relaxation, self.frontier.steps[i]
        stage, rest = relaxation.stages[i], relaxation.rest[i + 1]
        after, seconds = self.frontier.extend(step, labels.state)
        self.effort.charge(_visits(relaxation, labels.count))
        grown = []
        for d, streamed in product(range(self.frontier.devices), (False, True)):
            if not self._possible(i, d, streamed=streamed):
                continue
            roomy = self._have_room(i, d, labels, streamed=streamed)
            able = np.flatnonzero(np.isfinite(seconds[d]) & roomy)
            if len(able):
                found = labels.take(able)
                found.state, found.parent = after[d, able], able
                found.clock = found.clock + seconds[d, able]
                self._place(i, d, found, streamed=streamed)
                grown.append(found)
        if not grown:
            return labels.take(np.zeros(0, dtype=np.int64))
        found = _Labels.joined(grown)
        found.value = self._values(found, rest[stage.find(self.frontier, found.state)])
        rank = found.value
        if self.detours is not None:
            left = self.room[:, None] - found.needs - found.nbytes
            rank = rank + self.detours.seconds(i + 1, left)
        return self._best(found, rank)

    def _possible(self, i: int, d: int, *, streamed: bool) -> bool:
        """Whether a step's movable weights may be streamed to a device, or reside there."""
        if streamed:
            return bool(np.isfinite(self.relaxation.copy[d, i]))
        through_slots = self.streams and self.relaxation.fixed_queue[d, i]  # weights fixed in CPU memory
        return not through_slots or bool(self.buffers.slots[d])

    def _have_room(self, i: int, d: int, labels: _Labels, *, streamed: bool) -> Bools:
        """(labels,) whether a step's weights fit beside those of the steps before."""
        step, cpu = self.frontier.steps[i], self.relaxation.cpu
        nbytes = step.nbytes - (step.movable if streamed else 0.0)
        found: Bools = labels.nbytes[d] + nbytes <= self.room[d] - np.maximum(labels.needs[d], step.needs[d])
        if streamed:
            found &= labels.nbytes[cpu] + step.movable <= self.room[cpu] - labels.needs[cpu]
        return found

    def _place(self, i: int, d: int, labels: _Labels, *, streamed: bool) -> None:
        """Let labels, whose clocks have a step on a device already, have its weights there or streamed."""
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
        """Of streaming a step's weights; a single slot is waited for by the clock of the labels."""
        arrays, cpu = self.frontier.arrays, self.relaxation.cpu
        assert cpu is not None
        return float(arrays.latency[cpu, d] + self.frontier.steps[i].copied * arrays.per_byte[cpu, d])

    def _values(self, labels: _Labels, rest: Floats) -> Floats:
        priced = self.per_byte @ labels.nbytes + self.constant + rest
        if not self.streams:
            return np.asarray(labels.clock + priced)
        # copying that is behind the clock by more than the buffers hold cannot catch up
        least = labels.clock[None, :] - self.relaxation.ahead[:, None]
        last = labels.free[np.arange(len(self.buffers.slots)), np.maximum(self.buffers.slots - 1, 0)]
        queue = np.minimum(np.maximum(np.maximum(labels.queue, least), last), labels.clock[None, :])
        weighed = (1.0 - self.weight.sum()) * labels.clock + self.weight @ queue
        return np.asarray(np.maximum(weighed + priced, labels.clock))

    def _best(self, labels: _Labels, rank: Floats) -> _Labels:
        """Without dominated labels, and with no more than ``width``, those of the least ``rank``."""
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
    """What labels will pay that leave too little room for weights that no slot can take.

    Prices say what bytes are worth on average: a label may spend what one large weight needs that comes last.
    Steps whose weights must reside on accelerators fill what is left there as a knapsack; those that find no
    place run elsewhere, the cheapest for their bytes first, in parts (Dantzig's bound).
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
        """(labels,) of the steps from ``i`` on, with ``left`` (devices, labels) bytes."""
        later = self.steps >= i
        kept, costs = self.kept[later].cumsum(), self.costs[later].cumsum()
        lacking = kept[-1:].sum() - left[self.on].sum(axis=0)
        return np.asarray(np.interp(lacking, np.append(0.0, kept), np.append(0.0, costs)))


def _undominated(labels: _Labels, order: Ints) -> Ints:
    """Of labels in the order of their f-values, the first of each state, bytes and needs."""
    rows = [row[order] for row in (labels.state, *labels.nbytes, *labels.needs)]
    mixed = np.zeros(len(order), dtype=np.int64)
    for row in rows:
        mixed = (mixed ^ (mixed >> 29)) * _MIX + row.astype(np.int64)
    alike = np.argsort(mixed, kind="stable")
    same = np.ones(max(0, len(alike) - 1), dtype=bool)
    for row in (mixed, *rows):
        same &= _same_as_next(row[alike])
    keep = np.ones(len(order), dtype=bool)
    keep[alike[1:][same]] = False
    return order[keep]


def _same_as_next(row: npt.NDArray[Any]) -> Bools:
    """(all but the last,) whether an entry equals the one after it."""
    found: Bools = row[:-1] == row[1:]
    return found
