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

_IMPOSSIBLE_SECONDS = 1e9  # more than any placement takes, and finite, so that sums stay finite
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
class LabelSearchResult:
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
        needs: (devices, labels) bytes of the neediest operation, in addition to the weights.
        queue: (devices, labels) seconds at which the copies so far are done; no rows without streaming.
        free: (devices, slots, labels) seconds at which each prefetch slot is free, the latest first.
        parent: (labels,) index among the labels of the step before.
        option: (labels,) twice the device, plus one where weights are streamed.
        f_value: (labels,) lower bound on the seconds of the completions.
    """

    state: Ints
    clock: Floats
    nbytes: Floats
    needs: Floats
    queue: Floats
    free: Floats
    parent: Ints
    option: Ints
    f_value: Floats

    @property
    def count(self) -> int:
        return len(self.clock)

    @property
    def arrays(self) -> list[npt.NDArray[Any]]:
        return [getattr(self, column.name) for column in fields(self)]

    def take(self, indices: Ints) -> _Labels:
        return _Labels(*(array.take(indices, axis=-1) for array in self.arrays))

    @classmethod
    def concatenate(cls, parts: Sequence[_Labels]) -> _Labels:
        columns = zip(*(part.arrays for part in parts), strict=True)
        return cls(*(np.concatenate(column, axis=-1) for column in columns))


def search_labels(
    relaxation: Relaxation,
    width: int,
    incumbent_seconds: float,
    effort: Effort,
    margin: Floats | float = 0.0,
    *,
    keep_all: bool = False,
) -> LabelSearchResult:
    """Search complete placements by label setting.

    Args:
        relaxation: the relaxation, with prices.
        width: most labels kept after a step.
        incumbent_seconds: seconds of the best known placement; labels that cannot be faster are pruned.
        effort: the effort to charge.
        margin: (devices,) bytes to leave free, where exact peaks exceeded a budget; the bound is then void.
        keep_all: whether to keep dominated labels and return all completions: their exact peaks differ.
    """
    return _LabelSearch(relaxation, width, incumbent_seconds, effort, margin, keep_all).run()


def max_width(relaxation: Relaxation, visits: float) -> int:
    """Return the width of a search with this many visits; below 1 if they are too few."""
    fixed = _visits(relaxation, 0)
    per_step = visits / max(1, len(relaxation.frontier.steps))
    return int((per_step - fixed) / (_visits(relaxation, 1) - fixed))


def _visits(relaxation: Relaxation, labels: int) -> float:
    """Return the visits of one step; twice as many if its weights may be streamed too."""
    devices = relaxation.frontier.devices
    return (1 + relaxation.streams) * (1500.0 + 600.0 * devices + 4.0 * devices * labels)


@dataclass
class _LabelSearch:
    relaxation: Relaxation
    width: int
    incumbent_seconds: float
    effort: Effort
    margin: Floats | float
    keep_all: bool

    def __post_init__(self) -> None:
        relaxation = self.relaxation
        self.frontier = relaxation.frontier
        self.buffers = relaxation.buffers or Buffers.none(self.frontier.devices)
        self.streams = relaxation.streams
        self.room = relaxation.room + relaxation.activation_reserve - self.margin
        self.per_byte, self.weight = relaxation.prices.per_byte, relaxation.prices.queue
        self.dropped = np.inf
        self.trail: list[tuple[Ints, Ints]] = []
        self.constant = self.frontier.constant - float(self.per_byte @ relaxation.room)
        self.knapsack = _ResidentWeightKnapsack(relaxation) if self.streams else None

    def run(self) -> LabelSearchResult:
        count = self.frontier.devices
        rows, slots = (count, max(1, int(self.buffers.slots.max()))) if self.streams else (0, 0)
        labels = _Labels(
            state=self.frontier.start(),
            clock=np.zeros(1),
            nbytes=np.zeros((count, 1)),
            needs=self.relaxation.activation_reserve[:, None],
            queue=np.zeros((rows, 1)),
            free=np.zeros((rows, slots, 1)),
            parent=np.zeros(1, dtype=np.int64),
            option=np.zeros(1, dtype=np.int64),
            f_value=np.zeros(1),
        )
        for i in range(len(self.frontier.steps)):
            labels = self._grow(i, labels)
            if not labels.count:
                bound = min(self.incumbent_seconds, self.dropped)
                return LabelSearchResult((), bound, not np.isfinite(self.dropped))
            self.trail.append((labels.parent.astype(np.int32), labels.option.astype(np.int16)))
            if self.effort.over:
                return LabelSearchResult((), 0.0, exact=False)
        seconds = labels.clock + self.frontier.constant
        order = np.argsort(seconds, kind="stable")
        if not self.keep_all:
            order = order[: PARAMS.completions]
        completions = tuple(self._completion(int(label), labels, seconds) for label in order)
        bound = min(self.incumbent_seconds, self.dropped, float(seconds.min()))
        return LabelSearchResult(completions, bound, not np.isfinite(self.dropped))

    def _grow(self, i: int, labels: _Labels) -> _Labels:
        relaxation, step = self.relaxation, self.frontier.steps[i]
        stage, cost_to_go = relaxation.stages[i], relaxation.cost_to_go[i + 1]
        after, seconds = self.frontier.extend(step, labels.state)
        self.effort.charge(_visits(relaxation, labels.count))
        grown = []
        for d, streamed in product(range(self.frontier.devices), (False, True)):
            if not self._is_allowed(i, d, streamed=streamed):
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
        children = _Labels.concatenate(grown)
        children.f_value = self._f_values(children, cost_to_go[stage.find(self.frontier, children.state)])
        rank = children.f_value
        if self.knapsack is not None:
            free_bytes = self.room[:, None] - children.needs - children.nbytes
            rank = rank + self.knapsack.seconds(i + 1, free_bytes)
        return self._best(children, rank)

    def _is_allowed(self, i: int, d: int, *, streamed: bool) -> bool:
        """Whether a step may be placed on a device, with its movable weights streamed or not."""
        if streamed:
            return bool(np.isfinite(self.relaxation.stream_seconds[d, i]))
        through_slots = self.streams and self.relaxation.fixed_queue[d, i]  # weights fixed in CPU memory
        return not through_slots or bool(self.buffers.slots[d])

    def _have_room(self, i: int, d: int, labels: _Labels, *, streamed: bool) -> Bools:
        """(labels,) whether a step's weights and needs fit in addition to those of the earlier steps."""
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
        """Return the seconds of streaming a step's weights, without the waits of ``stream_seconds``."""
        arrays, cpu = self.frontier.arrays, self.relaxation.cpu
        assert cpu is not None
        return float(arrays.latency[cpu, d] + self.frontier.steps[i].copied * arrays.per_byte[cpu, d])

    def _f_values(self, labels: _Labels, cost_to_go: Floats) -> Floats:
        """(labels,) f-values, given the cost-to-go of their states."""
        priced = self.per_byte @ labels.nbytes + self.constant + cost_to_go
        if not self.streams:
            return np.asarray(labels.clock + priced)
        # copies are ahead of the clock by at most the content of the buffers: longer idle time is lost
        earliest = labels.clock[None, :] - self.relaxation.prefetch_slack[:, None]
        last = labels.free[np.arange(len(self.buffers.slots)), np.maximum(self.buffers.slots - 1, 0)]
        queue = np.minimum(np.maximum(np.maximum(labels.queue, earliest), last), labels.clock[None, :])
        weighed = (1.0 - self.weight.sum()) * labels.clock + self.weight @ queue
        return np.asarray(np.maximum(weighed + priced, labels.clock))

    def _best(self, labels: _Labels, rank: Floats) -> _Labels:
        """Return the labels of least ``rank``, at most ``width``, without pruned and dominated ones."""
        order = np.argsort(rank, kind="stable")
        order = order[labels.f_value[order] < self.incumbent_seconds]
        if not self.keep_all:
            order = _undominated(labels, order)
        if len(order) > self.width:
            self.dropped = min(self.dropped, float(labels.f_value[order[self.width :]].min()))
        return labels.take(order[: self.width])

    def _completion(self, label: int, labels: _Labels, seconds: Floats) -> Completion:
        frontier = self.frontier
        count = frontier.units + len(frontier.shared)
        device, streamed = np.full(count, -1), np.zeros(count, dtype=np.int64)
        total, spare = float(seconds[label]), self.room - labels.nbytes[:, label] - labels.needs[:, label]
        for step, (parent, option) in zip(reversed(frontier.steps), reversed(self.trail), strict=True):
            device[step.variable], streamed[step.variable] = divmod(int(option[label]), 2)
            label = int(parent[label])
        return Completion(total, device, streamed, spare)


class _ResidentWeightKnapsack:
    """Estimates the seconds that labels lose later if they leave no room for weights that fit no slot.

    Prices are means over all bytes: a label may spend bytes that one large, last weight needs. The steps left
    whose weights must reside on accelerators are a knapsack for the bytes left there. Those without room run
    elsewhere, the cheapest for their bytes first, in fractions (Dantzig's bound).
    """

    def __init__(self, relaxation: Relaxation) -> None:
        self.accelerates, seconds = relaxation.frontier.arrays.accelerates, relaxation.seconds
        nbytes = relaxation.nbytes - np.where(np.isfinite(relaxation.stream_seconds), relaxation.movable, 0.0)
        nbytes = np.where(np.isfinite(seconds), nbytes, np.inf)[self.accelerates].min(axis=0, initial=np.inf)
        on_cpu = seconds[~self.accelerates].min(axis=0, initial=_IMPOSSIBLE_SECONDS)
        steps = np.flatnonzero(np.isfinite(nbytes) & (nbytes > 0))
        costs = on_cpu[steps] - seconds[self.accelerates][:, steps].min(axis=0, initial=np.inf)
        order = np.argsort(costs / nbytes[steps], kind="stable")
        self.steps, self.nbytes = steps[order], nbytes[steps][order]
        self.costs = np.maximum(costs[order], 0.0)

    def seconds(self, i: int, free_bytes: Floats) -> Floats:
        """(labels,) seconds lost by the steps from ``i`` on, with ``free_bytes`` (devices, labels)."""
        later = self.steps >= i
        nbytes, costs = self.nbytes[later].cumsum(), self.costs[later].cumsum()
        deficit = nbytes[-1:].sum() - free_bytes[self.accelerates].sum(axis=0)
        return np.asarray(np.interp(deficit, np.append(0.0, nbytes), np.append(0.0, costs)))


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
