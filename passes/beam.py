"""Placements with streamed weights, operation by operation, on the clocks that the evaluator runs.

A label is a way to place the operations so far: which device holds which open value (see ``frontier``), what
the clock and each copy queue show, when each slot was last free, and how many bytes each device keeps. Its
promise is what ``fluid`` or ``leads`` says of the rest; those that promise most go on (Lowerre, "The Harpy
speech recognition system", 1976).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceKey
from graphplan.passes.fluid import Fluid, Planes, Work
from graphplan.passes.frontier import Frontier, Step
from graphplan.passes.leads import Guide

__all__ = ["Beam", "StreamRing", "Way"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOSTLY = 0.5  # part of an operation on one device, from which on that is where it belongs
_TINY = 0.01  # of the smallest room that weights take together which are not worth a decision
_AMONG = 4  # times the labels that are kept: so many are looked at for such as are alike
_MIX = np.array([-7046029254386353131, 2862933555777941757])


@dataclass(frozen=True, slots=True)
class StreamRing:
    """What weights are streamed through on one device.

    Attributes:
        slots: how many there are.
        nbytes: of each.
        bandwidth: bytes per second of the link.
        latency: seconds of a copy beside that.
    """

    slots: int
    nbytes: int
    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Way:
    """A placement.

    Attributes:
        devices: item of ``shares`` -> device.
        brought: those whose weights are brought.
        seconds: of the call.
        left: (devices,) bytes that nothing takes.
    """

    devices: dict[int, DeviceKey]
    brought: frozenset[int]
    seconds: float
    left: Floats


@dataclass(slots=True)
class _Batch:
    """Labels after a step; the last axis of every array is theirs."""

    state: Ints
    clock: Floats
    queue: Floats  # (devices,)
    free: Floats  # (devices, slots) when they were released, the latest first
    kept: Floats  # (devices,) bytes of weights
    need: Floats  # (devices,) bytes beside these
    promise: Floats
    parent: Ints
    choice: Ints  # twice the device, and one more where the weights are brought

    def of(self, chosen: Ints) -> _Batch:
        """Some of them."""
        return _Batch(*(getattr(self, name).take(chosen, axis=-1) for name in _FIELDS))


_FIELDS = tuple(field.name for field in fields(_Batch))


class Beam:
    """The search over one frontier.

    Args:
        frontier: of shares whose units carry all weights that they alone read.
        rings: one for each device of the frontier, or None where nothing is streamed to it.
        movable: (items,) bytes of the weights of each item that may be brought.
        settled: (items,) bytes of those that are brought to any accelerator in any case.
        needs: (devices, steps) bytes beside the weights while a step runs.
        levels: (devices,) bytes beside the weights at most; a device runs nothing that needs more.
        margin: (devices,) bytes that are left free beyond that.
    """

    def __init__(
        self,
        frontier: Frontier,
        rings: Sequence[StreamRing | None],
        movable: Floats,
        settled: Floats,
        needs: Floats,
        levels: Floats,
        margin: Floats | None = None,
    ) -> None:
        self.frontier, self.count = frontier, frontier.count
        taken = np.array([0 if ring is None else ring.slots * ring.nbytes for ring in rings])
        self.nbytes, tiny = self._weights(frontier, [ring is not None for ring in rings])
        self.capacity = np.maximum(frontier.room - taken - tiny - (0.0 if margin is None else margin), 0.0)
        self.needs = needs
        self.variables = [step.variable for step in frontier.steps]
        seconds = np.array([step.seconds for step in frontier.steps]).T
        widest = np.array([np.inf if ring is None else ring.nbytes for ring in rings])
        fits = (needs <= levels[:, None]) & (settled[self.variables] <= widest[:, None])
        self.seconds = np.where(fits, seconds, np.inf)
        self.slots = np.array([1 if ring is None else ring.slots for ring in rings])
        # seconds that a queue may be ahead of the clock
        self.ahead = np.array([0.0 if r is None else r.slots * r.nbytes / r.bandwidth for r in rings])
        self.before, self.after = frontier.beside
        self.least_need = self._least_need()
        self.movable = np.minimum(movable[self.variables], self.nbytes)
        self.fixed = frontier.shares.queue[frontier.alike][:, self.variables]
        self.copying = self._copy_seconds(rings)
        self.reserved = np.zeros((self.count, len(self.nbytes)))
        self.fluid = Fluid(self._work())
        self._reserve()
        self.planes: Planes | None = None
        passed = np.cumsum([0.0, *self.nbytes])
        self.passed = passed / max(float(passed[-1]), 1.0)

    def _least_need(self) -> Floats:
        """(devices,) bytes beside the weights for what accelerators may run, and others must."""
        needs, runs = self.needs, np.isfinite(self.seconds)
        streams = self.ahead > 0
        must = runs & ((runs.sum(axis=0) == 1) | streams[:, None])
        return np.asarray(np.where(must, needs, 0.0).max(axis=1))

    def _copy_seconds(self, rings: Sequence[StreamRing | None]) -> Floats:
        """(devices, steps) of bringing the weights of a step; infinite where they cannot be."""
        copying = np.full((self.count, len(self.movable)), np.inf)
        for d, ring in enumerate(rings):
            if ring is not None:
                may = (self.movable > 0) & (self.movable <= ring.nbytes)
                copying[d, may] = ring.latency + self.movable[may] / ring.bandwidth
        return copying

    @staticmethod
    def _weights(frontier: Frontier, streams: Sequence[bool]) -> tuple[Floats, Floats]:
        """(steps,) bytes of weights, but for tiny ones; (devices,) room that all keep for these."""
        nbytes = np.array([float(step.nbytes) for step in frontier.steps])
        smallest = min((room for room, ring in zip(frontier.room, streams, strict=True) if ring), default=0.0)
        order = np.argsort(nbytes, kind="stable")
        tiny = order[: np.searchsorted(np.cumsum(nbytes[order]), _TINY * smallest)]
        everywhere = np.where(streams, nbytes[tiny].sum(), 0.0)
        nbytes[tiny] = 0.0
        return nbytes, everywhere

    def _reserve(self) -> None:
        """Keep room for weights that are one of a kind and too large for a ring."""
        if self.bound == np.inf:
            return
        kept = np.where(np.isfinite(self.copying).any(axis=0), 0.0, self.fluid.single())
        kept[self.ahead == 0] = 0.0
        chosen = (kept == kept.max(axis=0)) & (kept >= _MOSTLY)
        reserved = np.where(chosen, self.nbytes, 0.0)
        if reserved.any() and (reserved.sum(axis=1) + self.least_need <= self.capacity).all():
            self.reserved = reserved
            self.fluid = Fluid(self._work())

    def _work(self) -> Work:
        # the next copy to a slot waits for what is read in it
        blocked = np.where((self.slots == 1)[:, None], self.seconds, 0.0)
        return Work(
            self.seconds,
            self.copying + blocked,
            self.fixed,
            np.where(self.reserved > 0, 0.0, self.nbytes),
            self.movable,
            np.maximum(self.capacity - self.least_need - self.reserved.sum(axis=1), 0.0),
        )

    @property
    def bound(self) -> float:
        """Seconds that no placement with these rings goes below; infinite where there is none."""
        if (self.capacity < self.least_need).any():
            return np.inf
        return self.fluid.total

    def search(
        self,
        *,
        below: float,
        width: int,
        pace: float = 0.0,
        guide: Guide | None = None,
        alone: bool = False,
        deadline: float | None = None,
    ) -> Way | None:
        """The fastest placement found of less than ``below`` seconds; None where there is none.

        Args:
            below: seconds to be beaten.
            width: labels that are kept between two steps.
            pace: how much less promise a label has whose devices fill faster than evenly, as a share of what
                the bytes are worth: with none, a device may be full early, and stream all that follows.
            guide: says more of what is left, moves included.
            alone: whether it is all that is asked.
            deadline: ``time.monotonic()`` at which to stop, or None.
        """
        planes = None if guide is not None and alone else self._known_planes(deadline)
        if planes is not None and not len(planes.clock):
            return None
        batch = self._first()
        trail: list[tuple[Ints, Ints]] = []
        for i, step in enumerate(self.frontier.steps):
            if deadline is not None and time.monotonic() > deadline:
                return None
            batch = self._extend(batch, i, step, planes, below, guide)
            if not len(batch.state):
                return None
            if pace and planes is not None:
                batch.promise = batch.promise + pace * self._haste(batch, planes, i + 1)
            batch = batch.of(_most_promising(batch, width))
            trail.append((batch.parent, batch.choice))
        return self._way(batch, trail)

    def _known_planes(self, deadline: float | None) -> Planes:
        if self.planes is None:
            self.planes = self.fluid.planes(deadline)
        return self.planes

    def _first(self) -> _Batch:
        nothing, zero = np.zeros(1, dtype=np.int64), np.zeros(1)
        each = np.zeros((self.count, 1))
        free = np.zeros((self.count, int(self.slots.max()), 1))
        kept, need = self.reserved.sum(axis=1)[:, None], self.least_need[:, None]
        return _Batch(nothing, zero, each, free, kept, need, zero, nothing, nothing)

    def _extend(
        self, batch: _Batch, i: int, step: Step, planes: Planes | None, below: float, guide: Guide | None
    ) -> _Batch:
        """Every label on every device, with its weights kept or brought, but those without room or hope."""
        after, seconds = self.frontier.extend(step, batch.state)
        parts = []
        for d in range(self.count):
            if not np.isfinite(self.seconds[d, i]):
                continue
            parts.append(self._place(batch, i, d, after[d], seconds[d], brought=False))
            if np.isfinite(self.copying[d, i]):
                parts.append(self._place(batch, i, d, after[d], seconds[d], brought=True))
        if not parts:
            return batch.of(np.zeros(0, dtype=np.int64))
        joined = _Batch(*(np.concatenate([getattr(p, name) for p in parts], axis=-1) for name in _FIELDS))
        fits = (joined.kept + joined.need <= self.capacity[:, None]).all(axis=0)
        joined = joined.of(np.nonzero(fits & np.isfinite(joined.clock))[0])
        lead = self._lead(joined)
        if planes is not None:
            joined.promise = self._promise(joined, planes, i + 1, lead)
        if guide is not None:
            joined.state = guide.leads.stages[i].ordered(joined.state)
            kept = joined.kept - self.reserved[:, i + 1 :].sum(axis=1)[:, None]
            more = guide.promise(i + 1, joined.state, joined.clock, np.maximum(lead, 0.0), kept)
            joined.promise = more if planes is None else np.maximum(joined.promise, more)
        return joined.of(np.nonzero(joined.promise < below)[0])

    def _place(self, batch: _Batch, i: int, d: int, after: Ints, seconds: Floats, *, brought: bool) -> _Batch:
        """All labels with a step on one device; ``seconds`` are those of its moves and of running it."""
        step = self.frontier.steps[i]
        run, clock, queue, free = float(step.seconds[d]), batch.clock + seconds, batch.queue, batch.free
        need, kept = batch.need.copy(), batch.kept - self.reserved[:, i, None]
        need[d] = np.maximum(need[d], self.needs[d, i])
        kept[d] += self.nbytes[i] - self.movable[i] if brought else self.nbytes[i]
        copying = float(self.fixed[d, i]) + (float(self.copying[d, i]) if brought else 0.0)
        if copying:
            queue, free = queue.copy(), free.copy()
            # the slot that has been free for the longest time
            queue[d] = np.maximum(queue[d], free[d, self.slots[d] - 1]) + copying
            rest = run - float(self.before[d, i])
            clock = np.maximum(clock - rest, queue[d]) + rest
            free[d] = np.concatenate([clock[None, :] - self.after[d, i], free[d, :-1]])
        count = len(clock)
        choice = np.full(count, 2 * d + brought, dtype=np.int64)
        return _Batch(after, clock, queue, free, kept, need, clock, np.arange(count), choice)

    def _lead(self, batch: _Batch) -> Floats:
        """(devices, labels) seconds by which each queue is ahead of the clock, as far as a ring lets it."""
        queue = np.maximum(batch.queue, batch.clock[None, :] - self.ahead[:, None])
        queue = np.maximum(queue, batch.free[np.arange(self.count), self.slots - 1])
        return np.asarray(batch.clock[None, :] - queue)

    def _promise(self, batch: _Batch, planes: Planes, step: int, lead: Floats) -> Floats:
        """(labels,) seconds at the end at least, but for moves."""
        queue = batch.clock[None, :] - lead
        left = self.capacity[:, None] - batch.kept - np.maximum(batch.need, self.least_need[:, None])
        found = planes.clock[:, None] * batch.clock[None, :] + planes.queue @ queue - planes.room @ left
        return np.asarray((found + planes.rest[:, step, None]).max(axis=0))

    def _haste(self, batch: _Batch, planes: Planes, step: int) -> Floats:
        """(labels,) seconds that the bytes are worth by which devices are fuller than evenly."""
        room = self.fluid.work.room
        left = self.capacity[:, None] - batch.kept - np.maximum(batch.need, self.least_need[:, None])
        ahead = np.maximum((1.0 - self.passed[step]) * room[:, None] - left, 0.0)
        return np.asarray(planes.room.max(axis=0) @ np.where(self.ahead[:, None] > 0, ahead, 0.0))

    def _way(self, batch: _Batch, trail: list[tuple[Ints, Ints]]) -> Way:
        row = int(batch.clock.argmin())
        seconds, chosen = float(batch.clock[row]), list[int]()
        left = self.capacity - batch.kept[:, row] - batch.need[:, row]
        for parent, choice in reversed(trail):
            chosen.append(int(choice[row]))
            row = int(parent[row])
        placed = list(zip(self.variables, reversed(chosen), strict=True))
        devices = {variable: self.frontier.devices[choice // 2] for variable, choice in placed}
        return Way(devices, frozenset(variable for variable, choice in placed if choice % 2), seconds, left)


def _most_promising(batch: _Batch, width: int) -> Ints:
    """The labels that go on: of those alike in state and bytes, one, as far as many are looked at."""
    mixed = batch.state * _MIX[0]
    for kept in batch.kept:
        mixed = (mixed ^ (mixed >> 31)) * _MIX[1] + kept.astype(np.int64)
    order = np.lexsort((batch.clock, batch.promise))
    order = order[: _AMONG * width]
    _, first = np.unique(mixed[order], return_index=True)
    order = order[np.sort(first)]
    return np.sort(order[:width])
