"""How many operations of each sort each device computes with, and how many it streams the weights of.

A stack of equal layers has few sorts of operations, so a small mixed-integer program settles what the best
division of the work is when nothing is asked about order and moves: what each device keeps, what its copy
queue brings meanwhile and through how large a ring, and what the CPU computes. Its dual bound is a lower
bound of every placement. Where most operations are of a sort of their
own, the order counts too: what is read in one window of it must have been copied by then, and before the
window no more than the ring holds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceKey
from graphplan.passes.rows import Rows
from graphplan.passes.segments import SMALL
from graphplan.passes.shares import Shares

__all__ = ["count_units"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_Terms = dict[int, list[tuple[int, float]]]  # window -> variables and their seconds

_STACKED = 5  # times more units than sorts, from which the order hardly counts
_SINGLE_DEVICES = 6  # up to which devices that nothing tells apart are counted one by one
_RINGS = 16  # sizes of rings that are told apart
_LARGEST = 4  # operations at which the order is cut in any case, if there are no more of these
_LARGE = 0.02  # of all weights that such an operation reads at least
_WINDOWS = 12  # of the order, in which copies have to be done
_NEEDY = 12  # sorts whose working set is counted on each device
_MOST = 400  # counts of a program that are whole
_EFFORT = 20_000  # counts times branches, where nobody asked for time
_TELLING = 0.002  # share of all weights from which one that several operations read is followed


@dataclass(frozen=True, slots=True)
class _Sort:
    """Operations that nothing tells apart.

    Attributes:
        window: of the order; -1 for one that belongs to no single window.
        units: of ``shares``, in their order.
        own: items that are weights which only the first of them reads; the others have the like.
        read: items that are weights which others read too.
    """

    window: int
    units: tuple[int, ...]
    own: tuple[int, ...]
    read: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """A device, or several that nothing tells apart."""

    row: int
    keys: tuple[DeviceKey, ...]

    @property
    def count(self) -> int:
        return len(self.keys)

    @property
    def key(self) -> DeviceKey:
        return self.keys[0]


@dataclass(frozen=True, slots=True)
class _Bringing:
    """A weight that may be brought at every call.

    Attributes:
        variable: how many are there, kept or brought.
        item: the weight, or one like it.
        count: how many there are at most.
        together: bytes of all weights that the same operation reads.
        window: in which it is read.
    """

    variable: int
    item: int
    count: float
    together: float
    window: int


def count_units(
    shares: Shares, *, upper: float, gap: float, nodes: int, seconds: float | None
) -> tuple[float, int]:
    """Seconds that no placement goes below, and how many sorts of operations there are.

    Args:
        shares: costs and sizes.
        upper: seconds of a known placement.
        gap: relative gap at which to stop.
        nodes: branches to look at.
        seconds: of clock, or None.
    """
    program = _Program(shares, upper)
    return program.solve(gap, nodes, seconds), len(program.sorts)


class _Program:
    """The variables and rows of one problem; ``upper`` are the seconds of a known placement."""

    def __init__(self, shares: Shares, upper: float) -> None:
        self.shares, self.upper, self.scale = shares, upper, max(upper, 1e-12)
        self.read = _bytes_read(shares)
        self.sorts = _sort(shares, _windows(shares, 1))
        if len(self.sorts) * _STACKED > shares.units:
            self.sorts = _sort(shares, _windows(shares, _WINDOWS))
        self.windows = max(sort.window for sort in self.sorts) + 1
        self.places = _places(shares)
        # so that neither a weight nor the seconds that a ring's bytes take are lost beside the others
        rooms = [kind.spec.room for kind in shares.kinds if kind.spec.is_accelerator]
        self.memory_scale = max(1.0, float(shares.nbytes.max(initial=1)), 0.01 * max(rooms, default=0))
        self.high: list[float] = []
        self.integer: list[bool] = []
        self.makespan = self._new(np.inf, integer=False)
        self.rows = Rows()
        self.elapsed = [self._new(np.inf, integer=False) for _ in range(self.windows)]
        self.clock: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self.kept_ties: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self.rings = _ring_sizes(shares)
        self.x: list[list[int]] = []
        for place in self.places:
            self._add_place(place)
        for index, sort in enumerate(self.sorts):
            self.rows.add([(x[index], 1.0) for x in self.x], len(sort.units), len(sort.units))
        for terms in self.kept_ties.values():
            self.rows.add(terms, -np.inf, 1.0)
        for arrival in _arrivals(shares, self.sorts):
            self._move(arrival)
        for window, elapsed in enumerate(self.elapsed):
            self.rows.add([*self.clock[window], (elapsed, -1.0)], -np.inf, 0.0)
        # what belongs to no single window is in any of them
        everything = [term for terms in self.clock.values() for term in terms]
        self.rows.add([*everything, *((elapsed, -1.0) for elapsed in self.elapsed)], -np.inf, 0.0)
        elapsed_terms = [(elapsed, 1.0) for elapsed in self.elapsed]
        self.rows.add([*elapsed_terms, (self.makespan, -1.0)], -np.inf, 0.0)

    def _new(self, high: float, *, integer: bool = True) -> int:
        self.high.append(high)
        self.integer.append(integer)
        return len(self.high) - 1

    def _add_place(self, place: _Place) -> None:
        shares, row = self.shares, place.row
        kept: list[tuple[int, float]] = []
        queue: _Terms = defaultdict(list)
        slots = [self._new(place.count) for _ in self.rings]
        for wider, narrower in zip(slots[1:], slots, strict=False):
            self.rows.add([(wider, 1.0), (narrower, -1.0)], -np.inf, 0.0)
        x: list[int] = []
        for sort in self.sorts:
            count, first = len(sort.units), sort.units[0]
            variable = self._new(count if np.isfinite(shares.clock[row, first]) else 0.0)
            x.append(variable)
            for item in dict.fromkeys((first, *sort.own)):
                self._pay(queue, row, variable, item, sort.window)
            for item in sort.own:
                size = float(shares.nbytes[item]) / self.memory_scale
                kept.append((variable, size))
                bringing = _Bringing(variable, item, count, float(self.read[first]), sort.window)
                aside = self._bring(queue, place, bringing, slots)
                if aside is not None:
                    kept.append((aside, -size))
        kept += self._ties(place, x, slots, queue)
        self.x.append(x)
        ring = self._ring(place, slots)
        kept.append((ring, 1.0))
        room = float(shares.room[row]) * place.count / self.memory_scale
        self.rows.add(kept, -np.inf, room)
        if place.count == 1:
            self._working(place, kept, x, room)
        if queue:
            self._in_time(place, queue, ring)

    def _ring(self, place: _Place, slots: list[int]) -> int:
        """Its bytes: no less than the largest weight that it brings."""
        problem = self.shares.problem
        most = max((problem.growth.get(key, np.inf) for key in place.keys), default=np.inf)
        ring = self._new(place.count * most / self.memory_scale, integer=False)
        sizes = np.diff([0, *self.rings]) / self.memory_scale
        terms = [(slot, -size) for slot, size in zip(slots, sizes.tolist(), strict=True)]
        self.rows.add([(ring, 1.0), *terms], 0.0, np.inf)
        there = sum(problem.rings.get(key, 0) for key in place.keys) / self.memory_scale
        self.rows.add([(ring, 1.0)], there, np.inf)
        return ring

    def _in_time(self, place: _Place, queue: _Terms, ring: int) -> None:
        """What windows read is copied while they last, but for what the ring holds before."""
        everything = [term for terms in queue.values() for term in terms]
        self.rows.add([*everything, (self.makespan, -float(place.count))], -np.inf, 0.0)
        shares = self.shares
        assert shares.cpu is not None
        bandwidth = shares.topology.link(shares.cpu.key, place.key).bandwidth
        # what is in the ring has paid for its latency before
        rate = self.memory_scale / bandwidth / self.scale * (1 + 1 / SMALL)
        credit = (ring, -rate)
        for start in range(self.windows):
            terms: list[tuple[int, float]] = [] if start == 0 else [credit]
            for window in range(start, self.windows):
                terms += [*queue.get(window, ()), (self.elapsed[window], -float(place.count))]
                if queue.get(window):
                    self.rows.add(list(terms), -np.inf, 0.0)

    def _move(self, arrival: _Arrival) -> None:
        """Where more are read than made, so many have to arrive."""
        for place, x in zip(self.places, self.x, strict=True):
            seconds = float(arrival.seconds[place.row])
            if seconds <= 0:
                continue
            arrived = self._new(np.inf, integer=False)
            self.clock[-1].append((arrived, seconds / self.scale))
            for reader in arrival.readers:
                others = len(self.sorts[reader].units) - arrival.count  # which do not read these
                terms = [(arrived, 1.0), (x[reader], -1.0), (x[arrival.maker], 1.0)]
                self.rows.add(terms, -float(others), np.inf)

    def _pay(self, queue: _Terms, row: int, variable: int, item: int, window: int) -> None:
        """What an item costs wherever it is kept."""
        clock, copying = self.shares.clock[row, item], self.shares.queue[row, item]
        if np.isfinite(clock) and clock:
            self.clock[window].append((variable, float(clock) / self.scale))
        if np.isfinite(copying) and copying:
            queue[window].append((variable, float(copying) / self.scale))

    def _bring(self, queue: _Terms, place: _Place, bringing: _Bringing, slots: list[int]) -> int | None:
        """A count of those whose weight is brought; None where that cannot be."""
        shares, row, item = self.shares, place.row, bringing.item
        clock, copying = shares.aside.clock[row, item], shares.aside.queue[row, item]
        if not np.isfinite(clock + copying) or not shares.nbytes[item]:
            return None
        aside = self._new(bringing.count)
        self.rows.add([(aside, 1.0), (bringing.variable, -1.0)], -np.inf, 0.0)
        if clock:
            self.clock[bringing.window].append((aside, float(clock) / self.scale))
        if copying:
            copying += self._latency(place, item, bringing.together)
            queue[bringing.window].append((aside, float(copying) / self.scale))
            # the largest ring size that this weight is not smaller than
            size = np.searchsorted(self.rings, shares.nbytes[item], side="right") - 1
            if size >= 0:
                self.rows.add([(aside, 1.0), (slots[size], -bringing.count)], -np.inf, 0.0)
        return aside

    def _latency(self, place: _Place, item: int, together: float) -> float:
        """Of a copy, the part of a weight: small ones share a copy, one operation's do."""
        shares = self.shares
        assert shares.cpu is not None
        link = shares.topology.link(shares.cpu.key, place.key)
        least = max(together, SMALL * link.latency * link.bandwidth)
        return link.latency * float(shares.nbytes[item]) / least

    def _ties(self, place: _Place, x: list[int], slots: list[int], queue: _Terms) -> list[tuple[int, float]]:
        """Weights that several sorts read: kept once in all."""
        shares, kept = self.shares, list[tuple[int, float]]()
        readers: dict[int, list[int]] = defaultdict(list)
        for index, sort in enumerate(self.sorts):
            for item in sort.read:
                readers[item].append(index)
        for item, sorts in readers.items():
            most = float(place.count)
            taken = self._new(most, integer=False)
            for index in sorts:
                part = min(1.0, most) / len(self.sorts[index].units)
                self.rows.add([(taken, 1.0), (x[index], -part)], 0.0, np.inf)
            self._pay(queue, place.row, taken, item, -1)
            size = float(shares.nbytes[item]) / self.memory_scale
            kept.append((taken, size))
            self.kept_ties[item].append((taken, 1.0))
            together = max(float(self.read[unit]) for index in sorts for unit in self.sorts[index].units)
            bringing = _Bringing(taken, item, most, together, -1)
            aside = self._bring(queue, place, bringing, slots)
            if aside is not None:
                self.integer[aside] = False
                kept.append((aside, -size))
                self.kept_ties[item].append((aside, -1.0))
            seconds = shares.peer_seconds(item, place.row)
            if np.isfinite(seconds):  # or it comes from another accelerator, and no ring takes it
                peer = self._new(most, integer=False)
                others = [] if aside is None else [(aside, 1.0)]
                self.rows.add([(peer, 1.0), *others, (taken, -1.0)], -np.inf, 0.0)
                self.clock[-1].append((peer, seconds / self.scale))
                kept.append((peer, -size))
                self.kept_ties[item].append((peer, -1.0))
        return kept

    def _working(self, place: _Place, kept: list[tuple[int, float]], x: list[int], room: float) -> None:
        """Weights leave room for what the neediest operations use while they run."""
        needs = np.array([self.shares.working[place.row, list(sort.units)].min() for sort in self.sorts])
        for index in np.argsort(-needs, kind="stable")[:_NEEDY]:
            extra = float(needs[index]) / self.memory_scale
            if extra <= 1e-3 * room:
                continue
            there, count = self._new(1.0), len(self.sorts[index].units)
            self.rows.add([(there, float(count)), (x[index], -1.0)], 0.0, np.inf)
            self.rows.add([*kept, (there, extra)], -np.inf, room)

    def solve(self, gap: float, nodes: int, seconds: float | None) -> float:
        """Run HiGHS for its bound."""
        high = np.array(self.high)
        high[self.makespan] = self.upper * (1 + 1e-6) / self.scale
        integer = np.array(self.integer, dtype=float)
        counts = int(integer.sum())
        if counts > _MOST:  # fractions of counts bound, too
            integer[:] = 0.0
        if seconds is None:
            nodes = min(nodes, max(1, _EFFORT // max(1, counts)))
        found, least = self.rows.minimize(self.makespan, high, integer, gap=gap, nodes=nodes, seconds=seconds)
        return self.upper if found.status == 2 else least * self.scale  # 2: nothing below the known placement


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Values that operations of one sort make, one each, and operations of others read, one each.

    Attributes:
        count: of values.
        maker: index of the sort that makes them.
        readers: those that read them.
        seconds: (kinds,) of a copy, at least.
    """

    count: int
    maker: int
    readers: tuple[int, ...]
    seconds: Floats


def _arrivals(shares: Shares, sorts: list[_Sort]) -> list[_Arrival]:
    sort_of = {unit: index for index, sort in enumerate(sorts) for unit in sort.units}
    readers: dict[int, list[int]] = defaultdict(list)
    for unit, item in shares.needs:
        readers[item].append(unit)
    alike: dict[tuple[int, ...], list[tuple[int, list[int], Floats]]] = defaultdict(list)
    for (maker, item), table in shares.tables.items():
        read_by = [item] if item < shares.units else readers[item]
        if maker in sort_of:
            key = (sort_of[maker], *sorted(sort_of[unit] for unit in read_by))
            alike[key].append((maker, read_by, table[:, 0, 1]))
    found = []
    for (maker, *others), values in alike.items():
        made = {one for one, _, _ in values}
        read = [unit for _, units, _ in values for unit in units]
        once = len(set(others)) == len(others) and len(set(read)) == len(read) and len(made) == len(values)
        if once:
            least = np.min([seconds for *_, seconds in values], axis=0)
            found.append(_Arrival(len(values), maker, tuple(others), least))
    return found


def _places(shares: Shares) -> list[_Place]:
    devices = [(row, key) for row, kind in enumerate(shares.kinds) for key in kind.keys]
    if len(devices) <= _SINGLE_DEVICES:
        return [_Place(row, (key,)) for row, key in devices]
    return [_Place(row, kind.keys) for row, kind in enumerate(shares.kinds)]


def _windows(shares: Shares, count: int) -> Ints:
    """(units,) windows with as many units that may be streamed, cut at the largest weights as well.

    -1 for a unit of more than one window.
    """
    at = {name: index for index, name in enumerate(shares.graph.operations)}
    first = np.array([at[shares.items[unit].members[0]] for unit in range(shares.units)])
    last = np.array([at[shares.items[unit].members[-1]] for unit in range(shares.units)])
    parts = [part for part in np.array_split(np.sort(first[_copied(shares)]), count) if len(part)]
    large = np.nonzero(_bytes_read(shares) >= _LARGE * shares.nbytes.sum())[0]
    large = large[: _LARGEST * (len(large) <= _LARGEST)]  # many are a stack of their own
    starts = np.unique([*(part[0] for part in parts), *first[large], *(last[large] + 1)])
    starts = starts[starts > first.min()]
    begun = np.searchsorted(starts, first, side="right")
    return np.where(begun == np.searchsorted(starts, last, side="right"), begun, -1)


def _bytes_read(shares: Shares) -> Ints:
    """(units,) bytes of the weights that each reads."""
    found = shares.nbytes[: shares.units].copy()
    for unit, item in shares.needs:
        found[unit] += shares.nbytes[item]
    return found


def _copied(shares: Shares) -> Bools:
    """(units,) whether weights may be copied for it beside other operations."""
    brought = np.isfinite(shares.aside.queue) & (shares.aside.queue > 0)
    able: Bools = np.any(brought | (shares.queue > 0), axis=0)
    found = able[: shares.units].copy()
    for unit, item in shares.needs:
        found[unit] |= able[item]
    return found


def _sort(shares: Shares, window: Ints) -> list[_Sort]:
    """Units by their window, and by what they cost, need and read."""
    readers: dict[int, int] = defaultdict(int)
    items: dict[int, list[int]] = defaultdict(list)
    for unit, item in shares.needs:
        readers[item] += 1
        items[unit].append(item)
    least = _TELLING * float(shares.nbytes.sum())
    sorts: dict[object, list[int]] = defaultdict(list)
    parts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for unit in range(shares.units):
        own = [item for item in items[unit] if readers[item] == 1]
        own = [item for item in [unit, *own] if shares.nbytes[item]]
        read = tuple(i for i in items[unit] if readers[i] > 1 and shares.nbytes[i] >= least)
        parts[unit] = tuple(own), read
        looks = sorted(_look(shares, item) for item in own)
        working = shares.working[:, unit].tobytes()
        sorts[int(window[unit]), int(shares.group[unit]), tuple(looks), read, working].append(unit)
    return [_Sort(int(window[units[0]]), tuple(units), *parts[units[0]]) for units in sorts.values()]


def _look(shares: Shares, item: int) -> tuple[float | bytes, ...]:
    arrays = (shares.clock, shares.queue, shares.aside.clock, shares.aside.queue)
    columns = (np.ascontiguousarray(array[:, item].round(12)).tobytes() for array in arrays)
    return (float(shares.nbytes[item]), *columns)


def _ring_sizes(shares: Shares) -> list[int]:
    """Sizes that a ring may have, in growing order; where weights have many, some that are far apart."""
    able = np.isfinite(shares.aside.queue) & (shares.aside.queue > 0)
    sizes = np.unique(shares.nbytes[able.any(axis=0)])
    if len(sizes) > _RINGS:
        steps = np.geomspace(sizes[0], sizes[-1], _RINGS)
        sizes = sizes[np.unique(np.searchsorted(sizes, steps * (1 - 1e-9)))]
    return [int(size) for size in sizes]
