"""What is open between two operations of an order: which devices hold the values that are still to be read.

Operations are placed one after the other. What matters of those placed before is small: where each open
value is, which devices have been used, and how many bytes each keeps. All but the bytes is a *state* here:
a number with a bit for each device in use, one for each in heavy use (see ``Step``), and one for each
device that holds an open value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceKey
from graphplan.passes.shares import Shares

__all__ = ["Frontier", "Meeting", "Step", "Touch"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_BITS = 62  # of a state
_HEAVY = 0.01  # of the most that an operation of a unit reads, up to which another is not waited for
_NEGLIGIBLE = 2e-3  # share of the room: of less than that a state says nothing
_WINDOWS = 24  # pieces of the order, each of which needs some bytes for activations


@dataclass(slots=True)
class _Value:
    """Something that is made once and read, at a cost for each device that reads but did not make it."""

    maker: int  # variable, or -1 for the caller
    readers: list[int]
    seconds: Floats  # (devices,)
    first: int = 0
    last: int = 0

    @property
    def dearest(self) -> float:
        """Seconds to the device where it costs most."""
        return float(self.seconds[np.isfinite(self.seconds)].max(initial=0.0))


@dataclass(slots=True)
class _Meet:
    """Steps (in order) that need so many bytes (devices,) together on one device."""

    places: list[int]
    needs: Ints

    def join(self, other: _Meet) -> None:
        """Keep the needier of two with the same ends."""
        if (other.needs > self.needs).any():
            self.places, self.needs = other.places, other.needs


@dataclass(frozen=True, slots=True)
class Touch:
    """A value that is made or read by the variable of a step.

    Attributes:
        shift: where its bits begin in a state.
        made: (devices, masks) seconds for the copies to those who have read it before, if it is made here.
        read: (devices,) seconds where it has not arrived yet; None where nobody has made it yet.
    """

    shift: int
    made: Floats | None
    read: Floats | None


@dataclass(frozen=True, slots=True)
class Meeting:
    """Units that need more bytes together on one device, one of which a step places.

    Attributes:
        shift: where the bits begin of the device that has had all of them so far.
        first: whether this is the first of them.
        needs: (devices,) bytes when all are there; None but for the last of them.
    """

    shift: int
    first: bool
    needs: Ints | None


@dataclass(slots=True)
class Step:
    """Placing one variable: a unit of operations, or a weight that several of them read.

    Attributes:
        variable: index among the items of ``shares``.
        seconds: (devices,) on each device, infinite where it may not be.
        nbytes: of weights.
        needs: (devices,) bytes beside the weights while it runs.
        heavy: bits of the devices where that is as much as every piece of the order needs somewhere.
        touches: values made or read.
        closed: bits of values that nobody reads later.
        open: where the bits of open values begin, from the cheapest to the dearest.
        meetings: of units that need more bytes together.
        waiting: bits of meetings that are not over.
    """

    variable: int
    seconds: Floats
    nbytes: int
    needs: Ints
    heavy: int = 0
    touches: list[Touch] = field(default_factory=list)
    closed: int = 0
    open: list[int] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    waiting: int = 0

    @property
    def signature(self) -> Hashable:
        """Equal for steps that lead from the same states to the same ones, in the same time."""
        touches = [(t.shift, _content(t.made), _content(t.read)) for t in self.touches]
        return self.seconds.tobytes(), self.heavy, tuple(touches), self.closed, tuple(self.open)

    def without(self, forgotten: int) -> Step:
        """The same when the values with these bits cost nothing."""
        touches = [touch for touch in self.touches if not forgotten >> touch.shift & 1]
        return self if len(touches) == len(self.touches) else replace(self, touches=touches)


class Frontier:
    """The steps of a problem.

    Args:
        shares: costs and sizes.

    Attributes:
        devices: that can run anything.
        count: of devices.
        room: (devices,) bytes for weights and activations.
        least: (devices,) bytes that any step leaves free for activations.
        heavy: (devices,) bytes that heavy use needs beyond these.
        alike: (devices,) devices with one number are of one kind.
        bits: (devices,) of a device in use.
        steps: in order.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        pairs = [(row, key) for row, kind in enumerate(shares.kinds) if shares.runs[row] for key in kind.keys]
        self.devices: list[DeviceKey] = [key for _, key in pairs]
        self.alike = np.array([row for row, _ in pairs], dtype=np.int64)
        self.count = len(pairs)
        self.room = shares.room[self.alike]
        # a device is used after those before it that are like it
        self._before = [(d, d - 1) for d in range(1, self.count) if self.alike[d] == self.alike[d - 1]]
        self._all = (1 << self.count) - 1
        self.bits = np.left_shift(np.int64(1), np.arange(self.count, dtype=np.int64))
        self.steps = self._make_steps()
        # a device that only keeps a shared weight needs nothing beside it
        self.least = np.array([step.needs for step in self.steps]).min(axis=0)
        self.heavy = self._mark_heavy()

    def _make_steps(self) -> list[Step]:
        shares = self.shares
        values, kept = self._values()
        earlier: dict[int, list[int]] = defaultdict(list)
        for item, readers in kept.items():
            earlier[min(readers)].append(item)
        order = [v for unit in range(shares.units) for v in (*earlier[unit], unit)]
        place = {variable: i for i, variable in enumerate(order)}
        steps = [self._step(variable) for variable in order]
        touched: dict[int, list[_Value]] = defaultdict(list)
        for value in values:
            known = {place[v] for v in (value.maker, *value.readers) if v >= 0}
            value.first, value.last = min(known), max(known)
            for i in known:
                touched[i].append(value)
        self._give_bits(steps, touched, place, self._crowds(place))
        return steps

    def _step(self, variable: int) -> Step:
        shares, rows = self.shares, self.alike
        nbytes = int(shares.nbytes[variable])
        if variable < shares.units:
            return Step(variable, shares.clock[rows, variable], nbytes, shares.working[rows, variable])
        return Step(variable, np.zeros(self.count), nbytes, np.zeros(self.count, dtype=np.int64))

    def _values(self) -> tuple[list[_Value], dict[int, list[int]]]:
        """What is read; and the weights that several units read, with their readers."""
        shares, rows = self.shares, self.alike
        readers: dict[int, list[int]] = defaultdict(list)
        for reader, item in shares.needs:
            readers[item].append(reader)
        values, made = list[_Value](), set[int]()
        for (maker, item), table in shares.tables.items():
            made.add(item)
            read_by = [item] if item < shares.units else readers[item]
            values.append(_Value(maker, read_by, table[rows, 0, 1]))
        kept: dict[int, list[int]] = {}
        for item, read_by in readers.items():
            if shares.nbytes[item]:
                kept[item] = read_by
                values.append(_Value(item, read_by, shares.aside.clock[rows, item]))
            elif item not in made:
                values.append(_Value(-1, read_by, shares.clock[rows, item]))
        return values, kept

    def _crowds(self, place: dict[int, int]) -> dict[int, list[_Meet]]:
        """By first place: what needs more bytes together than most of the order needs somewhere anyway."""
        rows = self.alike
        needs = self.shares.working[rows]
        usual = np.min([piece.max(axis=1) for piece in _pieces(needs, axis=1)], axis=0)
        known: dict[tuple[int, ...], _Meet] = {}
        for crowd in self.shares.crowds:
            places = sorted(place[unit] for unit in crowd.units)
            meet = _Meet(places, crowd.nbytes[rows])
            alone = needs[:, list(crowd.units)].max(axis=1)
            if (meet.needs > np.maximum(usual, alone)).any():
                known.setdefault((places[0], places[-1]), meet).join(meet)
        found: dict[int, list[_Meet]] = defaultdict(list)
        for (first, _), meet in known.items():
            found[first].append(meet)
        return found

    def _give_bits(
        self,
        steps: list[Step],
        touched: dict[int, list[_Value]],
        place: dict[int, int],
        crowds: dict[int, list[_Meet]],
    ) -> None:
        """Bits of the state for each value while it is open; one for which none are left costs nothing.

        Likewise for what needs more bytes together.
        """
        free = list(range(_BITS // self.count - 1, 1, -1))
        shifts: dict[int, int] = {}
        dearest: dict[int, float] = {}
        waiting: list[tuple[_Meet, int]] = []
        for i, step in enumerate(steps):
            for value in sorted(touched[i], key=lambda v: -v.dearest):
                if value.first == i and free:
                    shift = shifts[id(value)] = free.pop() * self.count
                    dearest[shift] = value.dearest
                if id(value) in shifts:
                    step.touches.append(self._touch(value, i, shifts[id(value)], place))
            begun = crowds.get(i, [])[: len(free)]
            waiting += [(meet, free.pop() * self.count) for meet in begun]
            for meet, shift in waiting:
                if i in meet.places:
                    last = i == meet.places[-1]
                    step.meetings.append(Meeting(shift, i == meet.places[0], meet.needs if last else None))
                    step.closed |= self._all << shift if last else 0
            for value in touched[i]:
                if value.last == i and id(value) in shifts:
                    shift = shifts.pop(id(value))
                    step.closed |= self._all << shift
                    free.append(shift // self.count)
                    del dearest[shift]
            free += [shift // self.count for meet, shift in waiting if meet.places[-1] == i]
            waiting = [(meet, shift) for meet, shift in waiting if meet.places[-1] > i]
            step.waiting = sum(self._all << shift for _, shift in waiting)
            step.open = sorted(dearest, key=lambda shift: (dearest[shift], shift))

    def _touch(self, value: _Value, i: int, shift: int, place: dict[int, int]) -> Touch:
        maker = -1 if value.maker < 0 else place[value.maker]
        if maker < i:
            return Touch(shift, None, value.seconds)
        if maker > i:
            return Touch(shift, None, None)
        there = np.arange(self._all + 1)[None, :] >> np.arange(self.count)[:, None] & 1
        each = np.where(there > 0, value.seconds[:, None], 0.0)
        others = [np.delete(each, device, axis=0).sum(axis=0) for device in range(self.count)]
        return Touch(shift, np.array(others), None)

    def _mark_heavy(self) -> Ints:
        """(devices,) bytes that every piece of the order needs somewhere, beyond the least."""
        needs = np.array([step.needs for step in self.steps])
        level = np.min([piece.max(axis=0) for piece in _pieces(needs, axis=0)], axis=0)
        extra = np.where(level - self.least > _NEGLIGIBLE * self.room, level - self.least, 0)
        for step in self.steps:
            step.heavy = sum(1 << d for d in range(self.count) if extra[d] and step.needs[d] >= level[d])
        return np.asarray(extra, dtype=np.int64)

    @cached_property
    def beside(self) -> tuple[Floats, Floats]:
        """(devices, steps) seconds of a step before what reads its weights begins, and after its end."""
        before, after = np.zeros((2, self.count, len(self.steps)))
        for i, step in enumerate(self.steps):
            heavy = self._heavy_members(step.variable)
            if heavy is None:
                continue
            for d, row in enumerate(self.alike):
                seconds = self._member_seconds(step.variable, row)
                before[d, i], after[d, i] = sum(seconds[: heavy.start]), sum(seconds[heavy.stop :])
        return before, after

    def _heavy_members(self, variable: int) -> range | None:
        """From the first to the last operation of a unit that reads much; None if none reads weights."""
        graph, members = self.shares.graph, self.shares.items[variable].members
        if len(members) < 2:
            return None
        nbytes = [sum(graph.weights[w].nbytes for w in graph.weights_read(name)) for name in members]
        heavy = [k for k, size in enumerate(nbytes) if size > _HEAVY * max(nbytes)]
        return range(heavy[0], heavy[-1] + 1) if heavy else None

    def _member_seconds(self, variable: int, row: int) -> list[float]:
        shares, spec = self.shares, self.shares.kinds[row].spec
        members = shares.items[variable].members
        return [shares.problem.seconds(shares.graph.operations[name], spec) for name in members]

    def evenly(self, values: Floats) -> Floats:
        """(devices,) the mean over devices that are alike."""
        return np.array([values[self.alike == kind].mean() for kind in self.alike])

    def extend(self, step: Step, states: Ints) -> tuple[Ints, Floats]:
        """(devices, states) the states after a step on each device, and the seconds it takes."""
        bits = self.bits[:, None]
        after = states[None, :] | (bits | (bits & step.heavy) << self.count)
        seconds = np.repeat(step.seconds[:, None], len(states), axis=1)
        for device, before in self._before:
            seconds[device, (states & self.bits[before]) == 0] = np.inf
        for touch in step.touches:
            if touch.made is not None:
                seconds += touch.made[:, (states >> touch.shift) & self._all]
            elif touch.read is not None and touch.read.any():
                there = (states[None, :] >> touch.shift) & bits
                seconds += np.where(there > 0, 0.0, touch.read[:, None])
            after |= bits << touch.shift
        if step.closed:
            after &= ~np.int64(step.closed)
        return after, seconds

    def meet(self, step: Step, states: Ints, after: Ints) -> Ints:
        """(devices, states) the same states with the bits of meetings, and bytes that come of them.

        Args:
            step: the one that ``after`` comes of.
            states: (states,) before it.
            after: (devices, states) as ``extend`` has them; changed in place.

        Returns:
            (devices, states) bytes that are needed beside the weights.
        """
        bits = self.bits[:, None]
        needs = np.zeros(after.shape, dtype=np.int64)
        for meeting in step.meetings:
            there = bits if meeting.first else (states[None, :] >> meeting.shift) & bits
            if meeting.needs is not None:
                np.maximum(needs, np.where(there > 0, meeting.needs[:, None], 0), out=needs)
                continue
            after &= ~np.int64(self._all << meeting.shift)
            after |= there << meeting.shift
        return needs


def _content(array: Floats | None) -> bytes | None:
    return None if array is None else array.tobytes()


def _pieces(needs: Ints, axis: int) -> list[Ints]:
    """Pieces of the order."""
    return [piece for piece in np.array_split(needs, _WINDOWS, axis=axis) if piece.size]
