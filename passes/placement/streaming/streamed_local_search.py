"""Iterated local search over placements with streaming; the evaluator judges every move.

Moves are the smallest there are: one slot more or fewer, or weights in place of one, one weight resident or
streamed, two weights exchanged, one macro-operation on another device, another home for a shared weight; with
a disk, one weight from the CPU to disk or back. Where none helps, the incumbent is perturbed (some operations
move at random) and climbed from, until restarts have not helped for some time (Lourenço, Martin and Stützle,
"Iterated local search", 2003).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace

from graphplan.devices.topology import DISK, DeviceKey
from graphplan.ir.schedule import Assignment, PrefetchBuffer
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds.frontier import Frontier
from graphplan.passes.placement.evaluate import Evaluation, evaluate_filled
from graphplan.passes.placement.params import PARAMS, ROUNDING, Effort


def _is_better(new: Evaluation, old: Evaluation) -> bool:
    """Whether a new placement is better: fewer bytes over the budgets, then seconds, then streamed bytes."""
    if new.seconds > _seconds_to_beat(old):
        return False  # decided without measuring memory
    new_excess, old_excess = sum(new.excess.values()), sum(old.excess.values())
    if new_excess != old_excess:
        return new_excess < old_excess
    if abs(new.seconds - old.seconds) > ROUNDING * old.seconds:
        return new.seconds < old.seconds
    return _streamed_bytes(new) < _streamed_bytes(old)


def _seconds_to_beat(evaluation: Evaluation) -> float:
    """Return the seconds that no better placement exceeds; infinite if this one exceeds a budget."""
    return math.inf if evaluation.excess else evaluation.seconds * (1 + ROUNDING)


def _streamed_bytes(evaluation: Evaluation) -> tuple[int, int]:
    """Return the bytes that are streamed, and the bytes of the prefetch buffers."""
    prefetch_buffers = evaluation.schedule.prefetch_buffers
    return sum(s.nbytes for buffer in prefetch_buffers for s in buffer.segments), sum(
        buffer.nbytes for buffer in prefetch_buffers
    )


def climb_streamed(
    arrays: Arrays, start: Evaluation, effort: Effort, bound: float = 0.0, *, mappable: Set[str] = frozenset()
) -> Evaluation:
    """Return a placement at least as good as ``start``, by bytes over the budgets, then by seconds.

    It ends within ``sufficient_gap`` of ``bound``, a lower bound in seconds. With ``mappable`` weights, which
    may be on disk, ``arrays`` may be those of the problem in which the disk is part of the CPU's memory.
    """
    return _Climb(arrays, start, effort, mappable).run(bound)


class _Climb:
    """Climbs from a placement ``now``. A move is an assignment that holds only its changes."""

    def __init__(
        self, arrays: Arrays, start: Evaluation, effort: Effort, mappable: Set[str] = frozenset()
    ) -> None:
        self.arrays, self.now, self.effort, self.mappable = arrays, start, effort, mappable
        # unread weights stay on disk if they are there
        self.problem, self.unread = (start.problem, []) if mappable else (arrays.problem, arrays.unread)
        self.frontier = Frontier(arrays, streaming=True)
        assert self.frontier.cpu is not None
        self.cpu = arrays.keys[self.frontier.cpu]
        names, streamable = arrays.names, self.frontier.is_streamable
        self.own_weights = [[names[i] for i in items] for items in self.frontier.unit_weights]
        self.movable = [[names[i] for i in items if streamable(i)] for items in self.frontier.unit_weights]
        self.streamable: dict[str, Sequence[int]] = {
            name: (unit,) for unit, weights in enumerate(self.movable) for name in weights
        }
        self.streamable |= {names[i]: self.frontier.readers[i] for i in self.frontier.shared if streamable(i)}
        self.members = [[arrays.operations[i].name for i in unit] for unit in arrays.units]
        self._neighbourhoods = [self._slots, self._residences, self._devices, self._homes, self._exchanges]
        if mappable:
            self._neighbourhoods.insert(0, self._memories)

    def run(self, bound: float) -> Evaluation:
        draw = random.Random(0)
        idle, max_idle = 0, PARAMS.restarts * self.effort.total / PARAMS.visits(self.arrays.count)
        self._climb()
        best, target_seconds = self.now, bound / (1 - PARAMS.sufficient_gap)
        while idle < max_idle and not self.effort.over and _seconds_to_beat(best) > target_seconds:
            self.now = best
            self.now = self._evaluate(self._perturbed(draw))
            self._climb(draw)
            idle += 1
            if _is_better(self.now, best):
                best, idle = self.now, 0
        return best

    def _climb(self, draw: random.Random | None = None) -> None:
        """Apply moves that help; in random order if ``draw`` is given, to end at other local optima."""
        improved = True
        while improved:
            improved = False
            for moves in self._neighbourhoods:
                for move in moves() if draw is None else _shuffled(moves(), draw):
                    if self.effort.over:
                        return
                    evaluation = self._evaluate(move, _seconds_to_beat(self.now))
                    if _is_better(evaluation, self.now):
                        self.now, improved = evaluation, True

    def _evaluate(self, change: Assignment, max_seconds: float = math.inf) -> Evaluation:
        self.effort.charge_evaluation(self.arrays.count)
        changed = _changed(self.now.assignment, change)
        return evaluate_filled(self.problem, changed, self.unread, max_seconds)

    def _perturbed(self, draw: random.Random) -> Assignment:
        """Return a perturbed assignment: once or twice, a run of operations moves to a random device.

        The device then streams some of its weights.
        """
        perturbed = self.now.assignment
        for _ in range(draw.randint(1, 2)):
            d = draw.randrange(self.arrays.computing)
            key = self.arrays.keys[d]
            units = [unit for unit in self._random_run(draw) if self.frontier.clock[d, unit] < float("inf")]
            perturbed = _changed(perturbed, self._moved(units, key))
            if self.arrays.accelerates[d]:
                share, operations = draw.random(), perturbed.operations
                read = [
                    name
                    for name, units in self.streamable.items()
                    if any(operations[self.members[unit][0]] == key for unit in units)
                ]
                streamed = {name: self._streaming_homes(name)[-1] for name in read if draw.random() < share}
                perturbed = _changed(perturbed, Assignment({}, streamed, {key: draw.choice((1, 2))}))
            else:
                moved = [name for unit in units for name in self.own_weights[unit] if name in self.mappable]
                perturbed = _changed(perturbed, Assignment({}, dict.fromkeys(moved, DISK)))
        return perturbed

    def _random_run(self, draw: random.Random) -> Sequence[int]:
        """Return a random run of macro-operations, or the readers of a shared weight."""
        count, shared = len(self.members), self.frontier.shared
        start = draw.randrange(count + len(shared))
        if start >= count:
            return self.frontier.readers[shared[start - count]]
        end = start + 1
        while end < count and draw.random() < 0.5:
            end += 1
        return range(start, end)

    def _moved(self, units: Iterable[int], key: DeviceKey) -> Assignment:
        operations = {name: key for unit in units for name in self.members[unit]}
        return Assignment(operations, {name: key for unit in units for name in self.own_weights[unit]})

    def _slots(self) -> Iterator[Assignment]:
        """Yield other numbers of slots; with fewer, also with weights in the bytes that are freed."""
        for buffer in self.now.schedule.prefetch_buffers:
            count = len(buffer.slots)
            for slots in (count + 1, count - 1):
                if 0 < slots <= len(buffer.segments):
                    yield Assignment({}, {}, {buffer.device: slots})
            if count > 1 and (filling := self._filling(buffer)):
                yield Assignment({}, filling, {buffer.device: count - 1})

    def _filling(self, buffer: PrefetchBuffer) -> dict[str, DeviceKey]:
        """Return streamed weights that fit the device of a buffer with one slot fewer, and that device."""
        key, filling = buffer.device, dict[str, DeviceKey]()
        spare = self.problem.topology[key].room - self.now.peak(key).nbytes + buffer.slots[-1]
        for device, name in self._streamed():
            if device == key and self._nbytes(name) <= spare:
                filling[name] = key
                spare -= self._nbytes(name)
        return filling

    def _residences(self) -> Iterator[Assignment]:
        """Yield moves of streamed weights to where they are read, the largest first."""
        for device, name in self._streamed():
            yield Assignment({}, {name: device})

    def _streamed(self) -> list[tuple[DeviceKey, str]]:
        """Return the streamed weights that one macro-operation reads, with its device, the largest first."""
        movable = [(self._device(unit), name) for unit, names in enumerate(self.movable) for name in names]
        streamed = [
            pair for pair in movable if self._home(pair[1]) in (self.cpu, DISK) and pair[0] != self.cpu
        ]
        return sorted(streamed, key=lambda pair: -self._nbytes(pair[1]))

    def _exchanges(self) -> Iterator[Assignment]:
        """Yield moves that stream a resident weight, alone or in exchange for another of its device."""
        movable = [(self._device(u), name) for u, names in enumerate(self.movable) for name in names]
        for device, name in movable:
            if self._home(name) != device or device == self.cpu:
                continue
            for home in self._streaming_homes(name):
                yield Assignment({}, {name: home})
            for other_device, other in movable:
                if other_device == device and (home := self._home(other)) in self._streaming_homes(name):
                    yield Assignment({}, {name: home, other: device})

    def _memories(self) -> Iterator[Assignment]:
        """Yield moves of weights from the CPU to disk or back, alone or in exchange for another."""
        for name in self.mappable:
            home = self._home(name)
            if home == self.cpu:
                yield Assignment({}, {name: DISK})
            elif home == DISK:
                yield Assignment({}, {name: self.cpu})
                for other in self.mappable:
                    if self._home(other) == self.cpu:
                        yield Assignment({}, {name: self.cpu, other: DISK})

    def _devices(self) -> Iterator[Assignment]:
        """Yield moves of a macro-operation to another device, with its weights resident there or streamed."""
        for unit in range(len(self.members)):
            for d, key in enumerate(self.arrays.keys[: self.arrays.computing]):
                if key == self._device(unit) or self.frontier.clock[d, unit] == float("inf"):
                    continue
                move = self._moved([unit], key)
                yield move
                if self.arrays.accelerates[d] and self.movable[unit]:
                    streamed = dict.fromkeys(self.movable[unit], self.cpu)
                    yield replace(move, weights={**move.weights, **streamed})
                if on_disk := [name for name in self.own_weights[unit] if name in self.mappable]:
                    yield replace(move, weights={**move.weights, **dict.fromkeys(on_disk, DISK)})

    def _homes(self) -> Iterator[Assignment]:
        """Yield moves of a shared weight to another of its readers, or to CPU memory."""
        for item in self.frontier.shared:
            name = self.arrays.names[item]
            keys = dict.fromkeys(self._device(unit) for unit in self.frontier.readers[item])
            homes = [*keys]
            if self.frontier.is_streamable(item):
                homes += self._streaming_homes(name)
            for key in homes:
                if key != self._home(name):
                    yield Assignment({}, {name: key})

    def _streaming_homes(self, name: str) -> list[DeviceKey]:
        """Return the devices where a weight may reside while it is streamed."""
        return [self.cpu, DISK] if name in self.mappable else [self.cpu]

    def _device(self, unit: int) -> DeviceKey:
        return self.now.assignment.operations[self.members[unit][0]]

    def _home(self, name: str) -> DeviceKey:
        return self.now.assignment.weights[name]

    def _nbytes(self, name: str) -> int:
        return self.arrays.graph.weights[name].nbytes


def _changed(now: Assignment, change: Assignment) -> Assignment:
    return Assignment(
        {**now.operations, **change.operations},
        {**now.weights, **change.weights},
        {**now.slots, **change.slots},
    )


def _shuffled(moves: Iterable[Assignment], draw: random.Random) -> list[Assignment]:
    shuffled = list(moves)
    draw.shuffle(shuffled)
    return shuffled
