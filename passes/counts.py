"""How many operations of each sort each device computes with, and how many it streams the weights of.

A stack of equal layers has few sorts of operations, so a small mixed-integer program settles what the best
division of the work is when little is asked about order and moves: what each device keeps, what its copy
queue brings meanwhile and through how large a ring, and what the CPU computes. What it cannot go below no
placement goes below. Where most operations are of a sort of their own, the order counts too: what is read
in one window of it must have been copied by then, and before the window no more than the ring holds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceKey
from graphplan.passes.branch_and_bound import least
from graphplan.passes.rows import Rows
from graphplan.passes.segments import SMALL
from graphplan.passes.shares import Shares
from graphplan.passes.sorts import Arrival, bytes_read, find_arrivals, make_windows, sort_units

__all__ = ["count_units"]

Floats = npt.NDArray[np.float64]
_Terms = dict[int, list[tuple[int, float]]]  # window -> variables and their seconds

_STACKED = 5  # times more units than sorts, from which the order hardly counts
_SINGLE_DEVICES = 6  # up to which devices that nothing tells apart are counted one by one
_RINGS = 16  # sizes of rings that are told apart
_WINDOWS = 12  # of the order, in which copies have to be done
_NEEDY = 12  # sorts whose working set is counted on each device
_LATEST = 10.0  # times the seconds of a known placement, which no window of a better one reaches


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


@dataclass(frozen=True, slots=True)
class _Tie:
    """A weight that several sorts read, on one place.

    Attributes:
        place: where it is.
        kept: variables and their signs; their sum is how many are kept there.
        peer: how many are brought from another accelerator; None where that cannot be.
    """

    place: _Place
    kept: list[tuple[int, float]]
    peer: int | None


def count_units(
    shares: Shares,
    *,
    upper: float,
    gap: float,
    programs: int,
    patience: int | None = None,
    deadline: float | None = None,
) -> tuple[float, int]:
    """Seconds that no placement goes below, and how many sorts of operations there are.

    Args:
        shares: costs and sizes.
        upper: seconds of a known placement.
        gap: relative gap at which to stop.
        programs: linear programs to solve at most.
        patience: as in :func:`graphplan.passes.branch_and_bound.least`.
        deadline: ``time.monotonic()`` at which to stop, or None.
    """
    program = _Program(shares, upper)
    return program.solve(gap, programs, patience, deadline), len(program.sorts)


class _Program:
    """The variables and rows of one problem; ``upper`` are the seconds of a known placement."""

    def __init__(self, shares: Shares, upper: float) -> None:
        self.shares, self.upper, self.scale = shares, upper, max(upper, 1e-12)
        self.read = bytes_read(shares)
        self.sorts = sort_units(shares, make_windows(shares, 1))
        if len(self.sorts) * _STACKED > shares.units:
            self.sorts = sort_units(shares, make_windows(shares, _WINDOWS))
        self.windows = max(sort.window for sort in self.sorts) + 1
        self.places = _places(shares)
        # so that neither a weight nor the seconds that a ring's bytes take are lost beside the others
        rooms = [kind.spec.room for kind in shares.kinds if kind.spec.is_accelerator]
        self.memory_scale = max(1.0, float(shares.nbytes.max(initial=1)), 0.01 * max(rooms, default=0))
        self.high: list[float] = []
        self.integer: list[bool] = []
        self.makespan = self._new(_LATEST, integer=False)
        self.rows = Rows()
        self.elapsed = [self._new(_LATEST, integer=False) for _ in range(self.windows)]
        self.clock: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self.ties: dict[int, list[_Tie]] = defaultdict(list)
        self.rings = _ring_sizes(shares)
        self.x: list[list[int]] = []
        for place in self.places:
            self._add_place(place)
        for index, sort in enumerate(self.sorts):
            self.rows.add([(x[index], 1.0) for x in self.x], len(sort.units), len(sort.units))
        for ties in self.ties.values():
            self._keep_once(ties)
        for arrival in find_arrivals(shares, self.sorts):
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
        room = float(self.shares.room[place.row])
        there = sum(problem.rings.get(key, 0) for key in place.keys)
        most = place.count * min(room, max(problem.growth.get(key, room) for key in place.keys))
        ring = self._new(max(most, there) / self.memory_scale, integer=False)
        sizes = np.diff([0, *self.rings]) / self.memory_scale
        terms = [(slot, -size) for slot, size in zip(slots, sizes.tolist(), strict=True)]
        self.rows.add([(ring, 1.0), *terms], 0.0, np.inf)
        self.rows.add([(ring, 1.0)], there / self.memory_scale, np.inf)
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

    def _move(self, arrival: Arrival) -> None:
        """Where more are read than made, so many have to arrive."""
        for place, x in zip(self.places, self.x, strict=True):
            seconds = float(arrival.seconds[place.row])
            if seconds <= 0:
                continue
            arrived = self._new(arrival.count, integer=False)
            self.clock[-1].append((arrived, seconds / self.scale))
            for reader, each in arrival.readers:
                others = len(self.sorts[reader].units) - each * arrival.count  # which do not read these
                terms = [(arrived, float(each)), (x[reader], -1.0), (x[arrival.maker], float(each))]
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
            together = max(float(self.read[unit]) for index in sorts for unit in self.sorts[index].units)
            aside = self._bring(queue, place, _Bringing(taken, item, most, together, -1), slots)
            if aside is not None:
                self.integer[aside] = False
            peer = self._from_peer(place, item, most)
            brought = [variable for variable in (aside, peer) if variable is not None]
            if peer is not None:  # ``aside`` alone is below what is taken already
                self.rows.add([*((v, 1.0) for v in brought), (taken, -1.0)], -np.inf, 0.0)
            here = [(taken, 1.0), *((variable, -1.0) for variable in brought)]
            self.ties[item].append(_Tie(place, here, peer))
            size = float(shares.nbytes[item]) / self.memory_scale
            kept += [(variable, sign * size) for variable, sign in here]
        return kept

    def _from_peer(self, place: _Place, item: int, most: float) -> int | None:
        """A count of those that another accelerator has, and no ring takes."""
        seconds = self.shares.peer_seconds(item, place.row)
        if not np.isfinite(seconds):
            return None
        peer = self._new(most, integer=False)
        self.clock[-1].append((peer, seconds / self.scale))
        return peer

    def _keep_once(self, ties: list[_Tie]) -> None:
        """One device keeps it, and what comes from another accelerator is kept by one."""
        self.rows.add([term for tie in ties for term in tie.kept], -np.inf, 1.0)
        for tie in ties:
            if tie.peer is None:
                continue
            others = [
                (variable, -sign * tie.place.count)
                for other in ties
                if self._is_accelerator(other.place) and (other is not tie or tie.place.count > 1)
                for variable, sign in other.kept
            ]
            self.rows.add([(tie.peer, 1.0), *others], -np.inf, 0.0)

    def _is_accelerator(self, place: _Place) -> bool:
        return self.shares.kinds[place.row].spec.is_accelerator

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

    def solve(self, gap: float, programs: int, patience: int | None, deadline: float | None) -> float:
        """Seconds that no placement goes below."""
        whole = np.array(self.integer)
        found = least(
            self.rows,
            self.makespan,
            np.array(self.high),
            whole,
            enough=self.upper * (1 - gap) / self.scale,
            programs=programs,
            patience=patience,
            deadline=deadline,
        )
        return min(self.upper, found * self.scale)


def _places(shares: Shares) -> list[_Place]:
    devices = [(row, key) for row, kind in enumerate(shares.kinds) for key in kind.keys]
    if len(devices) <= _SINGLE_DEVICES:
        return [_Place(row, (key,)) for row, key in devices]
    return [_Place(row, kind.keys) for row, kind in enumerate(shares.kinds)]


def _ring_sizes(shares: Shares) -> list[int]:
    """Sizes that a ring may have, in growing order; where weights have many, some that are far apart."""
    able = np.isfinite(shares.aside.queue) & (shares.aside.queue > 0)
    sizes = np.unique(shares.nbytes[able.any(axis=0)])
    if len(sizes) > _RINGS:
        steps = np.geomspace(sizes[0], sizes[-1], _RINGS)
        sizes = sizes[np.unique(np.searchsorted(sizes, steps * (1 - 1e-9)))]
    return [int(size) for size in sizes]
