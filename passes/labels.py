"""Search placements operation by operation, keeping those whose bound leaves hope: a label-setting search.

A label is a way to place the operations so far: its state (see ``frontier``), the bytes on each device and
the seconds. Of labels alike in state and bytes only the fastest goes on. What is left to pay, as ``onward``
has it, bounds what a label can become: labels that cannot beat the best known are dropped, and, where there
are too many, those that promise least. The lowest bound of a label so dropped, or the best that reaches the
end, bounds all placements.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceKey
from graphplan.passes.frontier import Step
from graphplan.passes.onward import Onward
from graphplan.passes.states import Stage

__all__ = ["Found", "Labels"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_FIELD = 31  # bits for the bytes of one device
_ALIGNMENT = 512  # bytes of which every weight takes a multiple
_LEVELS = 7  # of bytes that a device must leave free for what runs on it
_LEVEL_BITS = 3
_PIECES = 24  # of the order
_KEPT = 40  # placements that a search returns
_MIX = np.array([-7046029254386353131, -4417276706812531889, 2862933555777941757, 3202034522624059733])
_STIR = np.int64(3935559000370003845)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Attributes:
        bound: seconds that no placement can go below, or those asked to be beaten, where that is less.
        seconds: of the fastest placement, as the search counts them; infinite where it found none.
        placements: item (unit or weight) -> device, the fastest first.
        labels: how many were made.
    """

    bound: float
    seconds: float
    placements: list[dict[int, DeviceKey]]
    labels: int

    @property
    def devices(self) -> dict[int, DeviceKey]:
        """The fastest placement; empty where none was found."""
        return self.placements[0] if self.placements else {}


@dataclass(slots=True)
class _Batch:
    """Labels after a step; arrays over them."""

    state: Ints
    index: npt.NDArray[np.int32]  # of the state among those of the stage
    held: Ints  # (words, labels) units of bytes, two devices to a word
    level: Ints
    seconds: Floats  # with priced bytes
    rest: Floats  # from here to the end
    parent: npt.NDArray[np.int32]
    device: npt.NDArray[np.int8]

    def of(self, chosen: Ints) -> _Batch:
        """Some of them."""
        return _Batch(
            self.state[chosen],
            self.index[chosen],
            self.held[:, chosen],
            self.level[chosen],
            self.seconds[chosen],
            self.rest[chosen],
            self.parent[chosen],
            self.device[chosen],
        )


class Labels:
    """The search over one frontier, prepared once for several widths.

    Args:
        onward: what is left to pay.
        margin: (devices,) bytes that are left free beyond what must be; bounds are none then.
    """

    def __init__(self, onward: Onward, margin: Floats | None = None) -> None:
        self.onward, self.frontier = onward, onward.frontier
        count = self.frontier.count
        room = self.frontier.room - (0.0 if margin is None else margin)
        largest = max(float(room.max(initial=1.0)), float(sum(step.nbytes for step in self.frontier.steps)))
        self.unit = _ALIGNMENT
        while largest / self.unit >= 1 << (_FIELD - 1):
            self.unit *= 2
        self.words = (count + 1) // 2
        needs = np.array([step.needs for step in self.frontier.steps])
        weights = np.array([step.nbytes for step in self.frontier.steps], dtype=float)
        meetings = [m.needs for step in self.frontier.steps for m in step.meetings if m.needs is not None]
        together = np.array(meetings, dtype=np.int64).reshape(len(meetings), count)
        floors = self.floors = [_floors(needs[:, d], weights, together[:, d]) for d in range(count)]
        self.level = np.array(
            [np.searchsorted(floors[d], needs[:, d], side="right") - 1 for d in range(count)]
        )
        self.capacity = np.full((count, 1 << _LEVEL_BITS), -1, dtype=np.int64)
        for d in range(count):
            self.capacity[d, : len(floors[d])] = np.floor((room[d] - floors[d]) / self.unit)

    def search(self, *, below: float, width: int, deadline: float | None = None) -> Found | None:
        """Look for a placement of less than ``below`` seconds; None where time ran out.

        Args:
            below: seconds to be beaten.
            width: labels that are kept between two steps.
            deadline: ``time.monotonic()`` at which to stop, or None.
        """
        onward = self.onward
        dropped, made = below, 0
        batch = self._first()
        trail: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int8]]] = []
        for i, (step, stage) in enumerate(zip(self.frontier.steps, onward.stages, strict=True)):
            if deadline is not None and time.monotonic() > deadline:
                return None
            batch = self._extend(batch, i, step, stage, below)
            made += len(batch.state)
            batch = batch.of(_fastest(batch))
            promise = batch.seconds + batch.rest
            if len(promise) > width:
                order = np.argpartition(promise, width)
                dropped = min(dropped, float(promise[order[width:]].min()))
                batch = batch.of(np.sort(order[:width]))
            trail.append((batch.parent, batch.device))
            if not len(batch.state):
                return Found(dropped, np.inf, [], made)
        return self._found(batch, trail, dropped, made)

    def _found(
        self,
        batch: _Batch,
        trail: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int8]]],
        dropped: float,
        made: int,
    ) -> Found:
        """The placements of complete labels, from the fastest on."""
        seconds = self._unpriced(batch)
        rows = np.argsort(seconds, kind="stable")[:_KEPT].astype(np.int32)
        least = float(seconds[rows[0]])
        chosen = np.empty((len(rows), len(trail)), dtype=np.int64)
        for i in range(len(trail) - 1, -1, -1):
            parent, device = trail[i]
            chosen[:, i] = device[rows]
            rows = parent[rows]
        variables = [step.variable for step in self.frontier.steps]
        keys = self.frontier.devices
        placements = [{v: keys[d] for v, d in zip(variables, row, strict=True)} for row in chosen.tolist()]
        return Found(min(dropped, least), least, placements, made)

    def _first(self) -> _Batch:
        nothing = np.zeros(1, dtype=np.int64)
        return _Batch(
            nothing,
            nothing.astype(np.int32),
            np.zeros((self.words, 1), dtype=np.int64),
            nothing,
            np.full(1, -float(self.onward.prices @ self.onward.spare)),
            np.zeros(1),
            np.zeros(1, dtype=np.int32),
            np.zeros(1, dtype=np.int8),
        )

    def _extend(self, batch: _Batch, i: int, step: Step, stage: Stage, below: float) -> _Batch:
        """Every label on every device, but those without room or hope."""
        after, seconds = self.frontier.extend(step, batch.state)
        seconds += (self.onward.prices * step.nbytes)[:, None] + batch.seconds[None, :]
        index = stage.onward[:, batch.index]
        rest = self.onward.rest[i + 1][index]
        device, parent = np.nonzero(seconds + rest < below)
        word, shift = device // 2, _FIELD * (device % 2)
        held = batch.held[word, parent] + (step.nbytes // self.unit << shift)
        before = batch.level[parent] >> (_LEVEL_BITS * device) & ((1 << _LEVEL_BITS) - 1)
        level = np.maximum(before, self.level[device, i])
        if step.meetings:
            needs = self.frontier.meet(step, batch.state, after)[device, parent]
            for d, floors in enumerate(self.floors):
                mine = np.nonzero((device == d) & (needs > 0))[0]
                reached = np.searchsorted(floors, needs[mine], side="right") - 1
                level[mine] = np.maximum(level[mine], reached)
        fits = np.nonzero((held >> shift & ((1 << _FIELD) - 1)) <= self.capacity[device, level])[0]
        device, parent = device[fits], parent[fits]
        both = batch.held[:, parent]
        both[word[fits], np.arange(len(fits))] = held[fits]
        return _Batch(
            stage.ordered(after[device, parent]),
            index[device, parent],
            both,
            batch.level[parent] + ((level - before)[fits] << (_LEVEL_BITS * device)),
            seconds[device, parent],
            rest[device, parent],
            parent.astype(np.int32),
            device.astype(np.int8),
        )

    def _unpriced(self, batch: _Batch) -> Floats:
        """Seconds of complete labels, without what their bytes were charged."""
        prices, spare = self.onward.prices, self.onward.spare
        if self.unit != _ALIGNMENT:  # not known exactly: what fits is worth no more than the room
            return batch.seconds
        mask = (1 << _FIELD) - 1
        held = [batch.held[d // 2] >> (_FIELD * (d % 2)) & mask for d in range(self.frontier.count)]
        paid = prices @ (np.array(held) * float(self.unit))
        return batch.seconds + float(prices @ spare) - paid


def _floors(needs: Ints, weights: Floats, together: Ints) -> Ints:
    """A few of the bytes needed; others are rounded down.

    What meetings need, what pieces of the order need at their fullest moments, and what the steps need that
    carry most weights.
    """
    different, which = np.unique(needs, return_inverse=True)
    carried = np.bincount(which.reshape(-1), weights=weights)
    heavy = different[np.argsort(-carried, kind="stable")]
    peaks = np.sort([piece.max() for piece in np.array_split(needs, _PIECES) if len(piece)])
    often, counts = np.unique(together, return_counts=True)
    meetings = often[np.argsort(-counts, kind="stable")][:2]
    wanted = [different[0], *meetings, peaks[0], peaks[len(peaks) // 2], peaks[-1], *heavy]
    return np.unique(list(dict.fromkeys(int(level) for level in wanted))[:_LEVELS])


def _fastest(batch: _Batch) -> Ints:
    """Of labels alike in state, bytes and level, the fastest; in an order of their own."""
    mixed = (batch.state ^ (batch.level << 40)) * _STIR
    for word, held in enumerate(batch.held):
        mixed = mixed * _STIR + held * _MIX[word % len(_MIX)]
    order = np.lexsort((batch.seconds, mixed))
    one, other = order[:-1], order[1:]
    maybe = np.nonzero(mixed[one] == mixed[other])[0]
    one, other = one[maybe], other[maybe]
    same = (batch.state[one] == batch.state[other]) & (batch.level[one] == batch.level[other])
    same &= (batch.held[:, one] == batch.held[:, other]).all(axis=0)
    keep = np.ones(len(order), dtype=bool)
    keep[1:][maybe[same]] = False
    return order[keep]
