"""A lower bound from the numbers of operations of each class on each device: a small mixed-integer program.

Operations are of one class if everything that the program reads of them is equal: seconds on each device,
own weights one by one, needs, shared weights, copies of fixed weights, window of the order. A stack of equal
layers has few classes. The program decides how many of each class run on each device and how many weights are
streamed, through how large buffers. Each row holds for every placement, so its optimum is a lower bound. The
rows, with their proofs, are in docs/planner.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from graphplan.passes.placement.arrays import Arrays, Floats, Ints
from graphplan.passes.placement.bounds.frontier import Frontier
from graphplan.passes.placement.bounds.linear_program import LinearProgram, Terms, branch_and_bound
from graphplan.passes.placement.params import PARAMS, Effort
from graphplan.passes.schedule.prefetch_segments import SMALL

BY_CLASSES = "integer program over operation classes"  # the proof of these bounds


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of macro-operations that are equal to the program.

    Attributes:
        units: the macro-operations.
        window: their window of the order; -1 if they span several.
        sizes: streamable own weights of each: bytes of a copy, bytes where it resides, number of them.
        nbytes: bytes of all own weights of each, where they reside.
        read: bytes of copies of all weights that each reads.
        shared: large shared weights that each reads.
    """

    units: tuple[int, ...]
    window: int
    sizes: tuple[tuple[float, float, int], ...]
    nbytes: float
    read: float
    shared: tuple[int, ...]


@dataclass(slots=True)
class _Place:
    """A device, or several exchangeable ones: the variables of what happens there, and terms of its rows.

    Attributes:
        devices: their indices.
        runs: for each class, how many of its operations run there.
        slots: for each slot size, how many of the devices have one of at least this size; none on the CPU.
        homes: large shared weight -> whether it resides there.
        memory: terms of resident bytes, in scaled units.
        queue: window -> terms of seconds of copying.
    """

    devices: list[int]
    runs: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    homes: dict[int, int] = field(default_factory=dict)
    memory: Terms = field(default_factory=list)
    queue: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))

    @property
    def first(self) -> int:
        """The device that stands for all."""
        return self.devices[0]


def bound_by_classes(arrays: Arrays, enough: float, effort: Effort, *, streaming: bool) -> float:
    """Return a lower bound in seconds for every placement; a known one takes ``enough``.

    ``streaming``: whether weights may be streamed, and shared weights reside in CPU memory.
    """
    return _Program(arrays, enough, streaming=streaming).solve(effort)


class _Program:
    def __init__(self, arrays: Arrays, upper: float, *, streaming: bool) -> None:
        self.arrays, self.frontier = arrays, Frontier(arrays, streaming=streaming)
        self.scale = max(upper, 1e-12)
        self.program = LinearProgram()
        self.cpu = self.frontier.cpu
        self.needs = arrays.working_sets
        self.classes = self._classify()
        self.windows = 1 + max(0, *(c.window for c in self.classes)) if self.classes else 1
        self.places = self._places()
        prefetch_bytes = arrays.problem.prefetch_bytes
        # existing prefetch buffers are counted in rows of their own
        self.room = arrays.room - arrays.fixed_bytes
        self.room += np.array([float(prefetch_bytes.get(spec.key, 0)) for spec in arrays.specs])
        room = float(self.room[arrays.accelerates].max(initial=0.0))
        self.byte_scale = max(1.0, float(arrays.weight_bytes.max(initial=1.0)), 0.01 * room)
        self._build()

    # -- classes and places --------------------------------------------------------------------------

    def _classify(self) -> list[_Class]:
        classes = self._group(self._windows(1))
        most_differ = 2 * len(classes) > self.frontier.units
        if self.frontier.streaming and most_differ:
            classes = self._group(self._windows(PARAMS.milp_windows))
        return classes

    def _group(self, window: Ints) -> list[_Class]:
        arrays, frontier = self.arrays, self.frontier
        shared: dict[int, list[int]] = defaultdict(list)
        read = np.array([sum(map(arrays.slot_bytes, own)) for own in frontier.unit_weights], dtype=float)
        for item in range(arrays.values, len(arrays.names)):
            for unit in frontier.readers.get(item, ()):
                if item in arrays.large_shared:
                    shared[unit].append(item)
                if item in frontier.shared or arrays.fixed[item] >= 0:
                    read[unit] += arrays.slot_bytes(item)
        groups: dict[tuple[_Class, Hashable, Hashable], list[int]] = defaultdict(list)
        for unit, own in enumerate(frontier.unit_weights):
            streamed = Counter(self._both_sizes(i) for i in own if frontier.is_streamable(i))
            sizes = tuple((*both, times) for both, times in sorted(streamed.items()))
            nbytes = arrays.stored_bytes(own)
            each = _Class((), int(window[unit]), sizes, nbytes, float(read[unit]), tuple(shared[unit]))
            columns = (frontier.clock, frontier.fixed_queue, self.needs)
            seen = tuple(column[:, unit].tobytes() for column in columns)
            groups[each, seen, tuple(sorted(map(self._both_sizes, own)))].append(unit)
        return [replace(each, units=tuple(units)) for (each, *_), units in groups.items()]

    def _both_sizes(self, item: int) -> tuple[float, float]:
        """Return the bytes of a weight's copy, and where it resides: training keeps more beside it."""
        return self.arrays.slot_bytes(item), self.arrays.stored_bytes([item])

    def _windows(self, count: int) -> Ints:
        """(macro-operations,) windows, cut at readers of large shared weights too; -1 for several."""
        members, arrays = self.arrays.units, self.arrays
        first, last = np.array([unit[0] for unit in members]), np.array([unit[-1] for unit in members])
        large = [unit for item in arrays.large_shared for unit in arrays.readers[item]]
        streamed = np.flatnonzero([bool(own) for own in self.frontier.unit_weights])
        marks = np.sort(first[streamed]) if len(streamed) else np.sort(first)
        parts = [part[0] for part in np.array_split(marks, count) if len(part)]
        starts = np.unique(np.concatenate([parts, first[large], last[large] + 1]))
        starts = starts[starts > first.min()]
        begun = np.searchsorted(starts, first, side="right")
        return np.where(begun == np.searchsorted(starts, last, side="right"), begun, -1)

    def _places(self) -> list[_Place]:
        """Return each device as a place; or each device class, if there are many variables."""
        if len(self.classes) * self.frontier.devices <= PARAMS.milp_variables:
            return [_Place([d]) for d in range(self.frontier.devices)]
        return list(map(_Place, self.frontier.classes))

    # -- rows ----------------------------------------------------------------------------------------

    def _build(self) -> None:
        program = self.program
        self.makespan = program.variable(10.0)
        self.elapsed = [program.variable(10.0) for _ in range(self.windows)]
        self.clock: dict[int, Terms] = defaultdict(list)
        self.on_cpu: Terms = []  # bytes in CPU memory, in scaled units
        shared = sorted({item for each in self.classes for item in each.shared})
        # slot sizes that streamed weights may need
        own = {size for each in self.classes for size, *_ in each.sizes}
        self.sizes = sorted(own | set(map(self.arrays.slot_bytes, shared)))
        for item in shared:
            for place in self.places:
                place.homes[item] = program.variable(1.0, integer=True)
            program.equal([(place.homes[item], 1.0) for place in self.places], 1.0)
        for place in self.places:
            self._add_place(place)
        for place in self.places:
            room = self.room[place.first] * len(place.devices) / self.byte_scale
            if self.cpu in place.devices:
                place.memory += self.on_cpu
            program.at_most(place.memory, room)
            if len(place.devices) == 1:
                self._working_sets(place, room)
        for index, each in enumerate(self.classes):
            program.equal([(place.runs[index], 1.0) for place in self.places], float(len(each.units)))
        self._moves()
        for window, elapsed in enumerate(self.elapsed):
            program.at_most([*self.clock[window], (elapsed, -1.0)], 0.0)
        everything = [term for terms in self.clock.values() for term in terms]
        constant = self.frontier.constant / self.scale
        program.at_most([*everything, *((elapsed, -1.0) for elapsed in self.elapsed)], -constant)
        program.at_most([*((elapsed, 1.0) for elapsed in self.elapsed), (self.makespan, -1.0)], 0.0)

    def _add_place(self, place: _Place) -> None:
        """Add the variables of what runs on a place and is streamed to it, with their rows."""
        program, frontier, d = self.program, self.frontier, place.first
        accelerates = self.arrays.accelerates[d]
        if accelerates:
            count = float(len(place.devices))
            place.slots = [program.variable(count, integer=True) for _ in self.sizes]
        for narrower, wider in pairwise(place.slots):
            program.at_most([(wider, 1.0), (narrower, -1.0)], 0.0)
        for each in self.classes:
            units, unit = len(each.units), each.units[0]
            able = bool(np.isfinite(frontier.clock[d, unit]))
            running = program.variable(float(units) if able else 0.0, integer=True)
            place.runs.append(running)
            if able and frontier.clock[d, unit]:
                self.clock[each.window].append((running, frontier.clock[d, unit] / self.scale))
            if frontier.fixed_queue[d, unit]:
                place.queue[each.window].append((running, frontier.fixed_queue[d, unit] / self.scale))
            place.memory.append((running, each.nbytes / self.byte_scale))
            for size, held, times in each.sizes if accelerates and able and self.cpu is not None else ():
                streamed = program.variable(float(units * times), integer=True)
                program.at_most([(streamed, 1.0), (running, -float(times))], 0.0)
                place.memory.append((streamed, -held / self.byte_scale))
                self.on_cpu.append((streamed, held / self.byte_scale))
                seconds = self._copy_seconds(d, size, each.read)
                self._stream(place, each.window, streamed, float(units * times), size, seconds)
        self._shared(place)
        if accelerates:
            buffers = self._buffers(place)
            place.memory.append((buffers, 1.0))
            if place.queue:
                self._in_time(place, buffers)

    def _copy_seconds(self, d: int, nbytes: float, read: float) -> float:
        """Return the queue seconds of a weight: small weights of a segment share one latency."""
        arrays, cpu = self.arrays, self.cpu
        assert cpu is not None
        latency, per_byte = float(arrays.latency[cpu, d]), float(arrays.per_byte[cpu, d])
        joined = max(read, SMALL * latency / per_byte)
        # ``nbytes`` is rounded up to whole 512s; a copy is not
        exact = max(0.0, nbytes - 511.0)
        return exact * per_byte + latency * exact / max(joined, 1.0)

    def _stream(
        self, place: _Place, window: int, streamed: int, most: float, size: float, seconds: float
    ) -> None:
        """Charge each of ``streamed`` weights to the copy queue, with a slot of its size, or to the clock."""
        term = streamed, seconds / self.scale
        if self.arrays.problem.streaming:
            place.queue[window].append(term)
            slot = place.slots[self.sizes.index(size)]
            self.program.at_most([(streamed, 1.0), (slot, -most)], 0.0)
        else:  # copied one by one, without overlap, into memory that is free again after
            self.clock[window].append(term)

    def _buffers(self, place: _Place) -> int:
        """Return the variable of prefetch buffer bytes, with the row of at least the largest slot."""
        problem, keys = self.arrays.problem, [self.arrays.keys[d] for d in place.devices]
        there = sum(problem.prefetch_bytes.get(key, 0) for key in keys)
        room = float(max(self.room[place.first], 0.0))
        most = len(keys) * min(room, max(problem.prefetch_limits.get(key, room) for key in keys))
        variable = self.program.variable(max(most, there) / self.byte_scale, low=there / self.byte_scale)
        steps = np.diff([0.0, *self.sizes]) / self.byte_scale
        terms = [(slot, -float(step)) for slot, step in zip(place.slots, steps, strict=True)]
        self.program.at_least([(variable, 1.0), *terms], 0.0)
        return variable

    def _in_time(self, place: _Place, buffers: int) -> None:
        """Add the rows that what windows read is loaded while they last, or is in the buffers before."""
        program, count, queue = self.program, float(len(place.devices)), place.queue
        everything = [term for terms in queue.values() for term in terms]
        program.at_most([*everything, (self.makespan, -count)], 0.0)
        assert self.cpu is not None
        per_byte = float(self.arrays.per_byte[self.cpu, place.first])
        credit = buffers, -self.byte_scale * per_byte * (1 + 1 / SMALL) / self.scale
        for start in range(self.windows):
            terms: Terms = [] if start == 0 else [credit]
            for window in range(start, self.windows):
                terms += [*queue.get(window, ()), (self.elapsed[window], -count)]
                if queue.get(window):
                    program.at_most(list(terms), 0.0)

    def _shared(self, place: _Place) -> None:
        """Add the rows of large shared weights, copied to where they are read."""
        program, arrays, d = self.program, self.arrays, place.first
        for item, home in place.homes.items():
            size, held = self._both_sizes(item)
            place.memory.append((home, held / self.byte_scale))
            taken = program.variable(1.0)
            for each, running in zip(self.classes, place.runs, strict=True):
                if item in each.shared:  # a device of the place reads it if a member of the class runs there
                    program.at_least([(taken, float(len(each.units))), (running, -1.0)], 0.0)
            moved = program.variable(1.0)
            terms = [(taken, 1.0), (home, -1.0), (moved, -1.0)]
            copies = arrays.copy_seconds(item)[: self.frontier.devices, d]
            alone = len(place.devices) == 1
            seconds = min((s for h, s in enumerate(copies) if h != d or not alone), default=0.0)
            self.clock[-1].append((moved, float(seconds) / self.scale))
            if place.slots and self.frontier.is_streamable(item) and self.cpu is not None:
                streamed = program.variable(1.0)
                terms.append((streamed, -1.0))
                at_cpu = next(other for other in self.places if self.cpu in other.devices)
                program.at_most([(streamed, 1.0), (at_cpu.homes[item], -1.0)], 0.0)
                copying = float(arrays.nbytes[item] * arrays.per_byte[self.cpu, d])
                self._stream(place, -1, streamed, 1.0, size, copying)
            program.at_most(terms, 0.0)

    def _working_sets(self, place: _Place, room: float) -> None:
        """Add the rows that weights leave room for the needs of each class while it runs."""
        for each, running in zip(self.classes, place.runs, strict=True):
            needs = float(self.needs[place.first, each.units[0]] / self.byte_scale)
            if needs > PARAMS.negligible * room:
                there = self.program.variable(1.0, integer=True)
                self.program.at_least([(there, float(len(each.units))), (running, -1.0)], 0.0)
                self.program.at_most([*place.memory, (there, needs)], room)

    def _moves(self) -> None:
        """Add the rows of copies: values read on a device and not made there must arrive."""
        class_of = {unit: index for index, c in enumerate(self.classes) for unit in c.units}
        values: dict[tuple[int, ...], list[tuple[int, tuple[int, ...], Floats]]] = defaultdict(list)
        for value in self.frontier.values:
            if 0 <= value.maker < self.frontier.units:
                key = class_of[value.maker], *sorted(class_of[unit] for unit in value.readers)
                values[key].append((value.maker, value.readers, value.seconds))
        for (maker, *others), equal in values.items():
            makers, readers = [each[0] for each in equal], [unit for each in equal for unit in each[1]]
            if len(set(makers)) < len(makers) or len(set(readers)) < len(readers):
                continue  # an operation reads or makes two of these: counts prove nothing
            for place in self.places:
                d, runs = place.first, place.runs
                costs = [each[2][h, d] for each in equal for h in range(self.frontier.devices) if h != d]
                seconds = min(costs, default=0.0)
                if not np.isfinite(seconds) or seconds <= 0:
                    continue
                arrived = self.program.variable(float(len(equal)))
                self.clock[-1].append((arrived, float(seconds) / self.scale))
                for reader, each in Counter(others).items():
                    beside = len(self.classes[reader].units) - each * len(equal)  # readers of none of these
                    terms = [(arrived, float(each)), (runs[reader], -1.0), (runs[maker], float(each))]
                    self.program.at_least(terms, -float(beside))

    def solve(self, effort: Effort) -> float:
        enough = 1.0 - PARAMS.sufficient_gap / 2
        bound = branch_and_bound(self.program, self.makespan, enough, effort)
        return bound * self.scale
