"""Local search over placements without streaming: moves of runs of operations and of shared weights' homes.

A move is priced by the copies that it changes; its exact peaks are computed only if it helps. There are three
objectives: fewer seconds, fewer bytes over the budgets (repair), and more head-room on the fullest device at
the same seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from graphplan.passes.placement.arrays import Arrays, Bools, Floats, Ints
from graphplan.passes.placement.params import PARAMS, ROUNDING, Effort


@dataclass(frozen=True, slots=True)
class _RunMove:
    """Move operations ``start .. start + length - 1``, and those tied to them, to a device."""

    seconds: float
    start: int
    length: int
    device: int


class LocalSearch:
    """A placement that is improved in place.

    Args:
        arrays: arrays of the problem.
        devices: (operations,) the devices to start from.
        effort: the effort to charge.
        chosen: (items,) decided homes of shared weights, else -1; None for none.
    """

    def __init__(self, arrays: Arrays, devices: Ints, effort: Effort, chosen: Ints | None = None) -> None:
        self.arrays, self.effort = arrays, effort
        self.devices = devices.copy()
        self.chosen = np.full(len(arrays.names), -1) if chosen is None else chosen.copy()
        self._index()
        self._reset()

    def _index(self) -> None:
        arrays = self.arrays
        self.reads: list[list[int]] = [[] for _ in range(arrays.count + 1)]
        for item, reader in zip(arrays.item.tolist(), arrays.reader.tolist(), strict=True):
            self.reads[reader].append(item)
        self.makes: list[list[int]] = [[] for _ in range(arrays.count)]
        for item, source in enumerate(arrays.source.tolist()):
            if source >= 0 and arrays.fixed[item] < 0:
                self.makes[source].append(item)
        self.gradients: dict[int, list[int]] = {}
        for item, parameter in zip(arrays.gradient.tolist(), arrays.parameter.tolist(), strict=True):
            self.gradients.setdefault(parameter, []).append(item)
        self.unit = arrays.unit_of.tolist()
        weights = np.arange(arrays.values, len(arrays.names))
        weights = weights[(arrays.source[weights] >= 0) & (arrays.fixed[weights] < 0)]
        weights = np.setdiff1d(weights, arrays.shared)
        self.own_bytes = np.bincount(arrays.source[weights], arrays.nbytes[weights], arrays.count)
        self.nbytes: list[float] = arrays.nbytes.tolist()
        self.latency: list[list[float]] = arrays.latency.tolist()
        self.per_byte: list[list[float]] = arrays.per_byte.tolist()

    def _reset(self) -> None:
        arrays = self.arrays
        self.where = [*self.devices.tolist(), arrays.host]
        self.home = arrays.homes(self.devices, self.chosen).tolist()
        self.readers = [[0] * len(arrays.keys) for _ in arrays.names]
        for item, reader in zip(arrays.item.tolist(), arrays.reader.tolist(), strict=True):
            self.readers[item][self.where[reader]] += 1
        for parameter, items in self.gradients.items():
            for item in items:
                self.readers[item][self.home[parameter]] += 1
        self.seconds = arrays.seconds(self.devices, self.chosen)
        self.peaks = arrays.peaks(self.devices, self.chosen)

    @property
    def excess(self) -> float:
        """The sum of bytes over the budgets."""
        return self._over(self.peaks)

    def _over(self, peaks: Floats) -> float:
        return float(np.maximum(peaks - self.arrays.room, 0.0).sum())

    @property
    def fullness(self) -> float:
        """The largest share of its budget that an accelerator uses."""
        return float(_used(self.arrays, self.peaks).max())

    # -- goals ---------------------------------------------------------------------------------------

    def climb(self) -> None:
        """Apply moves that save seconds and keep the budgets, until none does."""
        improved = True
        while improved and not self.effort.over:
            improved = False
            for move in sorted(self._moves(), key=lambda m: m.seconds):
                if self.effort.over:
                    return
                improved |= self._try(move, self._fits, -ROUNDING * self.seconds)

    def repair(self) -> bool:
        """Reduce the bytes over the budgets at any cost in seconds; return whether all budgets are kept.

        One move that suffices is tried first, in the order of the weights that would not fit after it.
        """
        over, half = self.peaks > self.arrays.room, self.effort.visits / 2
        for move in sorted(self._moves(sources=over), key=self._weights_over_after):
            if self.effort.visits < half or self._try(move, self._fits, math.inf):
                break
        if self.excess:
            self._exchange(lambda *_: 0.0)
        return not self.excess

    def _weights_over_after(self, move: _RunMove) -> float:
        """Estimate the bytes over the budgets after a move, as if it moved nothing but weights."""
        run = slice(move.start, move.start + move.length)
        moved = np.bincount(self.devices[run], self.own_bytes[run], self.arrays.computing)
        peaks = self.peaks - moved
        peaks[move.device] += moved.sum()
        return self._over(peaks)

    def exchange(self) -> None:
        """Save seconds by exchanges of two runs, where no single move keeps the budgets."""
        self._exchange(self.arrays.seconds)

    def _exchange(self, seconds: Callable[[Ints, Ints], float]) -> None:
        """Stochastic hill climbing on the bytes over the budgets, then on seconds; equal is accepted.

        Moves are shifts and swaps of the generalised assignment problem (Osman 1995), off devices over their
        budget if there are any. It ends after ``retries`` draws of each variable and device without progress.
        """
        arrays, draw = self.arrays, random.Random(0)
        variables = len(arrays.units) + len(arrays.shared)
        patience = left = PARAMS.retries * variables * arrays.computing
        over, best = self.excess, seconds(self.devices, self.chosen)
        while (over or best) and left and arrays.computing > 1 and not self.effort.over:
            left -= 1
            devices, chosen = self._shift_or_swap(draw)
            self.effort.charge(1000.0 + 2.0 * arrays.count)
            trial = seconds(devices, chosen)
            if trial > best and not over:
                continue
            self.effort.charge(1000.0 + 4.0 * arrays.count)
            peaks = arrays.peaks(devices, chosen)
            if (self._over(peaks), trial) > (over, best):
                continue
            if (self._over(peaks), trial) < (over, best * (1 - ROUNDING)):
                left = patience
            self.devices, self.chosen, self.peaks = devices, chosen, peaks
            over, best = self._over(peaks), trial
        self._reset()

    def _shift_or_swap(self, draw: random.Random) -> tuple[Ints, Ints]:
        """Return devices and homes after a group has moved to another device, or two have been swapped."""
        arrays, devices, chosen = self.arrays, self.devices.copy(), self.chosen.copy()
        full = self.peaks > arrays.room
        sources = np.flatnonzero(full if full.any() else np.bincount(devices)).tolist()
        source = draw.choice(sources)
        target = draw.choice([d for d in range(arrays.computing) if d != source])
        bits = len(arrays.units).bit_length()
        lengths = (bits + 1) // 2 if full.any() else bits  # a long run rarely fits anywhere
        moves = [(source, target), (target, source)][: draw.randint(1, 2)]
        groups = [self._draw_group(draw, start, lengths) for start, _ in moves]
        for (_, d), (operations, weights) in zip(moves[::-1], groups[::-1], strict=True):
            devices[operations & arrays.can_run[d, arrays.unit_of]] = d
            if arrays.accelerates[d] or not arrays.accelerates.any():
                chosen[weights] = d
        return devices, chosen

    def _draw_group(self, draw: random.Random, device: int, lengths: int) -> tuple[Bools, list[int]]:
        """Return an (operations,) mask and shared weights that move together.

        They are a run of one of ``lengths`` (1, 2, 4, ...), partly on ``device``; a shared weight with its
        readers; or a shared weight alone.
        """
        arrays, unit = self.arrays, self.arrays.unit_of
        kind = draw.randrange(lengths + (2 if arrays.shared else 0))
        if kind >= lengths:
            item = draw.choice(arrays.shared)
            return np.isin(unit, arrays.readers[item] if kind == lengths else ()), [item]
        heads = unit[(self.devices == device) & (unit >= 0)]
        middle = int(heads[draw.randrange(len(heads))]) if len(heads) else draw.randrange(len(arrays.units))
        first = middle - draw.randrange(1 << kind)
        return np.asarray((unit >= max(first, 0)) & (unit < first + (1 << kind))), []

    def balance(self, max_seconds: float) -> None:
        """Apply moves that free memory on the fullest accelerator, while seconds are at most ``max_seconds``.

        A gain of less than ``negligible`` of the budget is not worth separating operations.
        """
        improved = True
        while improved and not self.effort.over:
            improved = False
            full = np.zeros(self.arrays.computing, dtype=bool)
            full[_used(self.arrays, self.peaks).argmax()] = True
            moves = sorted(self._moves(sources=full), key=lambda m: -m.length)
            for move in moves:
                if full[move.device] or self.effort.over:
                    continue
                if self._try(move, self._adds_head_room, max_seconds - self.seconds):
                    improved = True
                    break

    def _fits(self, peaks: Floats) -> bool:
        return bool((peaks <= self.arrays.room).all())

    def _adds_head_room(self, peaks: Floats) -> bool:
        limit = self.fullness - PARAMS.negligible
        return self._fits(peaks) and float(_used(self.arrays, peaks).max()) <= limit

    # -- moves ---------------------------------------------------------------------------------------

    def _moves(self, sources: Bools | None = None) -> Iterator[_RunMove]:
        """Yield moves of 1, 2, 4, ... operations, long ones to a neighbour's device, with compute seconds.

        ``sources`` is a (devices,) mask of the devices on which a move must start or end.
        """
        arrays, count = self.arrays, self.arrays.count
        current = arrays.compute[self.devices, np.arange(count)]
        with np.errstate(invalid="ignore"):
            change = np.where(np.isfinite(arrays.compute), arrays.compute - current, np.inf)
        forbidden = _summed_before(np.isinf(change))
        total = _summed_before(np.where(np.isinf(change), 0.0, change))
        saved = _summed_before(self._copy_seconds_by_operation())
        free_bytes = arrays.room - arrays.resident(np.array(self.home))
        elsewhere = self.devices != np.arange(arrays.computing)[:, None]
        added = _summed_before(np.where(elsewhere, self.own_bytes, 0.0))
        padded = np.concatenate([[-1], self.devices, [-1]])
        length = 1
        while length <= count:
            starts = np.arange(count - length + 1)
            starts = starts[:: max(1, len(starts) // 2048)]
            self.effort.charge(arrays.computing * len(starts))
            ends = starts + length
            first, last = self.devices[starts], self.devices[ends - 1]
            for device in range(arrays.computing):
                seconds = total[device, ends] - total[device, starts]
                allowed = forbidden[device, ends] == forbidden[device, starts]
                allowed &= added[device, ends] - added[device, starts] <= free_bytes[device]
                joins = (padded[starts] == device) | (padded[ends + 1] == device) | (length <= 2)
                if sources is None:  # a move saves at most the copies that its operations read and make
                    allowed &= seconds < saved[ends] - saved[starts]
                    allowed &= (first != device) | (last != device)
                    allowed &= joins
                else:
                    allowed &= (sources[first] | sources[last]) & (joins | (starts % length == 0))
                for index in np.flatnonzero(allowed).tolist():
                    yield _RunMove(float(seconds[index]), int(starts[index]), length, device)
            length *= 2

    def _copy_seconds_by_operation(self) -> Floats:
        """(operations,) seconds of the copies of the tensors and weights that each reads and makes."""
        arrays = self.arrays
        where, home = np.append(self.devices, arrays.host), np.array(self.home)
        target, source = where[arrays.reader], home[arrays.item]
        seconds = (
            arrays.latency[source, target] + arrays.nbytes[arrays.item] * arrays.per_byte[source, target]
        )
        seconds = np.where(source == target, 0.0, seconds)
        total = np.bincount(arrays.reader, seconds, arrays.count + 1)[:-1]
        made = arrays.source[arrays.item]
        total += np.bincount(made[made >= 0], seconds[made >= 0], arrays.count)
        return np.asarray(total)

    def _operations_to_move(self, move: _RunMove) -> list[int]:
        """Return the operations of a move's macro-operations that are not on its device yet."""
        units = dict.fromkeys(self.unit[move.start : move.start + move.length])
        return [
            i for unit in units if unit >= 0 for i in self.arrays.units[unit] if self.where[i] != move.device
        ]

    def _added_seconds(self, operations: list[int], device: int) -> float:
        """Return the seconds that moving these operations adds."""
        compute, where = self.arrays.compute, self.where
        changed: dict[int, list[int]] = {}
        homes: dict[int, int] = {}
        added = 0.0
        for i in operations:
            current = where[i]
            added += compute[device, i] - compute[current, i]
            for item in self.reads[i]:
                counts = changed.get(item)
                if counts is None:
                    counts = changed[item] = self.readers[item].copy()
                counts[current] -= 1
                counts[device] += 1
            for item in self.makes[i]:
                if self.chosen[item] < 0:
                    homes[item] = device
                    changed.setdefault(item, self.readers[item].copy())
                    for gradient in self.gradients.get(item, ()):
                        counts = changed.setdefault(gradient, self.readers[gradient].copy())
                        counts[self.home[item]] -= 1
                        counts[device] += 1
        for item, counts in changed.items():
            home = self.home[item]
            added += self._copy_seconds(item, homes.get(item, home), counts)
            added -= self._copy_seconds(item, home, self.readers[item])
        self.effort.charge(50.0 * len(changed))
        return float(added)

    def _copy_seconds(self, item: int, home: int, counts: list[int]) -> float:
        latency, per_byte, nbytes = self.latency[home], self.per_byte[home], self.nbytes[item]
        return math.fsum(
            latency[d] + nbytes * per_byte[d] for d, count in enumerate(counts) if count and d != home
        )

    def _try(self, move: _RunMove, accepts: Callable[[Floats], bool], max_added_seconds: float) -> bool:
        """Apply a move if it adds fewer seconds and its peaks are accepted; return whether it is applied."""
        operations = self._operations_to_move(move)
        if not operations or not np.isfinite(self.arrays.compute[move.device, operations]).all():
            return False
        if self._added_seconds(operations, move.device) >= max_added_seconds:
            return False
        trial = self.devices.copy()
        trial[operations] = move.device
        self.effort.charge(float(10 * self.arrays.count))
        if not accepts(self.arrays.peaks(trial, self.chosen)):
            return False
        self.devices = trial
        self._reset()
        return True


def _summed_before(amounts: Floats | Bools) -> Floats:
    """(..., operations + 1) sum of the amounts of all operations before each, along the last axis."""
    start = np.zeros((*amounts.shape[:-1], 1))
    return np.concatenate([start, amounts.cumsum(axis=-1)], axis=-1)


def _used(arrays: Arrays, peaks: Floats) -> Floats:
    """(devices,) the share of its budget that each accelerator uses; 0 for others."""
    return np.asarray(peaks / np.maximum(arrays.room, 1.0) * arrays.accelerates)
