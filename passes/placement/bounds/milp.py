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

from graphplan.passes.placement.arrays import Arrays, Ints
from graphplan.passes.placement.bounds.frontier import CopiedValue, Frontier
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
class _DeviceGroup:
    """A device, or several exchangeable ones, with its variables and the terms of its rows.

    Attributes:
        devices: indices of the devices.
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


def bound_by_classes(arrays: Arrays, incumbent_seconds: float, effort: Effort, *, streaming: bool) -> float:
    """Return a lower bound in seconds for every placement; the best known one takes ``incumbent_seconds``.

    ``streaming``: whether weights may be streamed, and shared weights reside in CPU memory.
    """
    return _PlacementProgram(arrays, incumbent_seconds, streaming=streaming).solve(effort)


class _PlacementProgram:
    def __init__(self, arrays: Arrays, incumbent_seconds: float, *, streaming: bool) -> None:
        self.arrays, self.frontier = arrays, Frontier(arrays, streaming=streaming)
        self.scale = max(incumbent_seconds, 1e-12)
        self.program = LinearProgram()
        self.cpu = self.frontier.cpu
        self.needs = arrays.working_sets
        self.classes = self._classify()
        self.windows = 1 + max(0, *(c.window for c in self.classes)) if self.classes else 1
        self.groups = self._device_groups()
        # existing prefetch buffers are counted in rows of their own
        self.room = arrays.room - arrays.fixed_bytes + arrays.allocated_buffers
        room = float(self.room[arrays.accelerates].max(initial=0.0))
        self.byte_scale = max(1.0, float(arrays.weight_bytes.max(initial=1.0)), 0.01 * room)
        self._build()

    # -- classes and groups --------------------------------------------------------------------------

    def _classify(self) -> list[_Class]:
        classes = self._group(self._windows(1))
        many_classes = 2 * len(classes) > self.frontier.units
        if self.frontier.streaming and many_classes:
            classes = self._group(self._windows(PARAMS.milp_windows))
        return classes

    def _group(self, window: Ints) -> list[_Class]:
        arrays, frontier = self.arrays, self.frontier
        shared: dict[int, list[int]] = defaultdict(list)
        read = np.array([sum(map(arrays.slot_bytes, items)) for items in frontier.unit_weights], dtype=float)
        for item in range(arrays.values, len(arrays.names)):
            for unit in frontier.readers.get(item, ()):
                if item in arrays.large_shared:
                    shared[unit].append(item)
                if item in frontier.shared or arrays.fixed[item] >= 0:
                    read[unit] += arrays.slot_bytes(item)
        groups: dict[tuple[_Class, Hashable, Hashable], list[int]] = defaultdict(list)
        for unit, items in enumerate(frontier.unit_weights):
            streamed = Counter(self._both_sizes(i) for i in items if frontier.is_streamable(i))
            sizes = tuple((*both, times) for both, times in sorted(streamed.items()))
            nbytes = arrays.stored_bytes(items)
            empty_class = _Class(
                units=(),
                window=int(window[unit]),
                sizes=sizes,
                nbytes=nbytes,
                read=float(read[unit]),
                shared=tuple(shared[unit]),
            )
            columns = (frontier.clock, frontier.fixed_queue, self.needs)
            costs = tuple(column[:, unit].tobytes() for column in columns)
            groups[empty_class, costs, tuple(sorted(map(self._both_sizes, items)))].append(unit)
        return [replace(empty_class, units=tuple(units)) for (empty_class, *_), units in groups.items()]

    def _both_sizes(self, item: int) -> tuple[float, float]:
        """Return the bytes of a weight's copy, and of the weight with what training keeps for it."""
        return self.arrays.slot_bytes(item), self.arrays.stored_bytes([item])

    def _windows(self, count: int) -> Ints:
        """(macro-operations,) windows, cut at readers of large shared weights too; -1 for several."""
        members, arrays = self.arrays.units, self.arrays
        first, last = np.array([unit[0] for unit in members]), np.array([unit[-1] for unit in members])
        large = [unit for item in arrays.large_shared for unit in arrays.readers[item]]
        streamed = np.flatnonzero([bool(items) for items in self.frontier.unit_weights])
        marks = np.sort(first[streamed]) if len(streamed) else np.sort(first)
        cuts = [window[0] for window in np.array_split(marks, count) if len(window)]
        starts = np.unique(np.concatenate([cuts, first[large], last[large] + 1]))
        starts = starts[starts > first.min()]
        windows = np.searchsorted(starts, first, side="right")
        return np.where(windows == np.searchsorted(starts, last, side="right"), windows, -1)

    def _device_groups(self) -> list[_DeviceGroup]:
        """Return a group for each device; or for each device class, if there are many variables."""
        if len(self.classes) * self.frontier.devices <= PARAMS.milp_variables:
            return [_DeviceGroup([d]) for d in range(self.frontier.devices)]
        return list(map(_DeviceGroup, self.frontier.classes))

    # -- rows ----------------------------------------------------------------------------------------

    def _build(self) -> None:
        program = self.program
        self.makespan = program.variable(10.0)
        self.elapsed = [program.variable(10.0) for _ in range(self.windows)]
        self.clock: dict[int, Terms] = defaultdict(list)
        self.on_cpu: Terms = []  # bytes in CPU memory, in scaled units
        shared = sorted({item for members in self.classes for item in members.shared})
        # slot sizes that streamed weights may need
        own_sizes = {size for members in self.classes for size, *_ in members.sizes}
        self.sizes = sorted(own_sizes | set(map(self.arrays.slot_bytes, shared)))
        for item in shared:
            for group in self.groups:
                group.homes[item] = program.variable(1.0, integer=True)
            program.equal([(group.homes[item], 1.0) for group in self.groups], 1.0)
        for group in self.groups:
            self._add_group(group)
        for group in self.groups:
            room = self.room[group.first] * len(group.devices) / self.byte_scale
            if self.cpu in group.devices:
                group.memory += self.on_cpu
            program.at_most(group.memory, room)
            if len(group.devices) == 1:
                self._add_working_set_rows(group, room)
        for index, members in enumerate(self.classes):
            program.equal([(group.runs[index], 1.0) for group in self.groups], float(len(members.units)))
        self._add_transfer_rows()
        for window, elapsed in enumerate(self.elapsed):
            program.at_most([*self.clock[window], (elapsed, -1.0)], 0.0)
        everything = [term for terms in self.clock.values() for term in terms]
        constant = self.frontier.constant / self.scale
        program.at_most([*everything, *((elapsed, -1.0) for elapsed in self.elapsed)], -constant)
        program.at_most([*((elapsed, 1.0) for elapsed in self.elapsed), (self.makespan, -1.0)], 0.0)

    def _add_group(self, group: _DeviceGroup) -> None:
        """Add the variables of a group: the operations that run there, the weights streamed to it."""
        program, frontier, d = self.program, self.frontier, group.first
        accelerates = self.arrays.accelerates[d]
        if accelerates:
            count = float(len(group.devices))
            group.slots = [program.variable(count, integer=True) for _ in self.sizes]
        for narrower, wider in pairwise(group.slots):
            program.at_most([(wider, 1.0), (narrower, -1.0)], 0.0)
        for members in self.classes:
            units, unit = len(members.units), members.units[0]
            able = bool(np.isfinite(frontier.clock[d, unit]))
            running = program.variable(float(units) if able else 0.0, integer=True)
            group.runs.append(running)
            if able and frontier.clock[d, unit]:
                self.clock[members.window].append((running, frontier.clock[d, unit] / self.scale))
            if frontier.fixed_queue[d, unit]:
                group.queue[members.window].append((running, frontier.fixed_queue[d, unit] / self.scale))
            group.memory.append((running, members.nbytes / self.byte_scale))
            if not (accelerates and able and self.cpu is not None):
                continue
            for size, held, times in members.sizes:
                streamed = program.variable(float(units * times), integer=True)
                program.at_most([(streamed, 1.0), (running, -float(times))], 0.0)
                group.memory.append((streamed, -held / self.byte_scale))
                self.on_cpu.append((streamed, held / self.byte_scale))
                seconds = self._copy_seconds(d, size, members.read)
                self._charge_streaming(
                    group,
                    members.window,
                    streamed,
                    max_streamed=float(units * times),
                    size=size,
                    seconds=seconds,
                )
        self._add_shared_weight_rows(group)
        if accelerates:
            buffers = self._add_buffer_variable(group)
            group.memory.append((buffers, 1.0))
            if group.queue:
                self._add_window_rows(group, buffers)

    def _copy_seconds(self, d: int, nbytes: float, read: float) -> float:
        """Return the queue seconds of a weight: small weights of a segment share one latency."""
        arrays, cpu = self.arrays, self.cpu
        assert cpu is not None
        latency, per_byte = float(arrays.latency[cpu, d]), float(arrays.per_byte[cpu, d])
        joined = max(read, SMALL * latency / per_byte)
        # ``nbytes`` is rounded up to whole 512s; a copy is not
        exact = max(0.0, nbytes - 511.0)
        return exact * per_byte + latency * exact / max(joined, 1.0)

    def _charge_streaming(
        self,
        group: _DeviceGroup,
        window: int,
        streamed: int,
        max_streamed: float,
        size: float,
        seconds: float,
    ) -> None:
        """Charge each of ``streamed`` weights to the copy queue, with a slot of its size, or to the clock."""
        term = streamed, seconds / self.scale
        if self.arrays.problem.streaming:
            group.queue[window].append(term)
            slot = group.slots[self.sizes.index(size)]
            self.program.at_most([(streamed, 1.0), (slot, -max_streamed)], 0.0)
        else:  # copied one by one, without overlap, into memory that is free again after
            self.clock[window].append(term)

    def _add_buffer_variable(self, group: _DeviceGroup) -> int:
        """Return the variable of prefetch buffer bytes, with the row of at least the largest slot."""
        problem, keys = self.arrays.problem, [self.arrays.keys[d] for d in group.devices]
        existing = sum(problem.prefetch_bytes.get(key, 0) for key in keys)
        room = float(max(self.room[group.first], 0.0))
        limit = len(keys) * min(room, max(problem.prefetch_limits.get(key, room) for key in keys))
        high, low = max(limit, existing) / self.byte_scale, existing / self.byte_scale
        variable = self.program.variable(high, low=low)
        steps = np.diff([0.0, *self.sizes]) / self.byte_scale
        terms = [(slot, -float(step)) for slot, step in zip(group.slots, steps, strict=True)]
        self.program.at_least([(variable, 1.0), *terms], 0.0)
        return variable

    def _add_window_rows(self, group: _DeviceGroup, buffers: int) -> None:
        """Add the rows that the weights of a window are loaded during it, or are in the buffers before."""
        program, count, queue = self.program, float(len(group.devices)), group.queue
        everything = [term for terms in queue.values() for term in terms]
        program.at_most([*everything, (self.makespan, -count)], 0.0)
        assert self.cpu is not None
        per_byte = float(self.arrays.per_byte[self.cpu, group.first])
        credit = buffers, -self.byte_scale * per_byte * (1 + 1 / SMALL) / self.scale
        for start in range(self.windows):
            terms: Terms = [] if start == 0 else [credit]
            for window in range(start, self.windows):
                terms += [*queue.get(window, ()), (self.elapsed[window], -count)]
                if queue.get(window):
                    program.at_most(list(terms), 0.0)

    def _add_shared_weight_rows(self, group: _DeviceGroup) -> None:
        """Add the rows of large shared weights, copied to where they are read."""
        program, arrays, d = self.program, self.arrays, group.first
        for item, home in group.homes.items():
            size, held = self._both_sizes(item)
            group.memory.append((home, held / self.byte_scale))
            reading = program.variable(1.0)
            for members, running in zip(self.classes, group.runs, strict=True):
                if item in members.shared:  # where a member of the class runs, the item is read
                    program.at_least([(reading, float(len(members.units))), (running, -1.0)], 0.0)
            copied = program.variable(1.0)
            terms = [(reading, 1.0), (home, -1.0), (copied, -1.0)]
            copies = arrays.copy_seconds(item)[: self.frontier.devices, d]
            single = len(group.devices) == 1
            seconds = min((s for h, s in enumerate(copies) if h != d or not single), default=0.0)
            self.clock[-1].append((copied, float(seconds) / self.scale))
            if group.slots and self.frontier.is_streamable(item) and self.cpu is not None:
                streamed = program.variable(1.0)
                terms.append((streamed, -1.0))
                cpu_group = next(other for other in self.groups if self.cpu in other.devices)
                program.at_most([(streamed, 1.0), (cpu_group.homes[item], -1.0)], 0.0)
                copying = float(arrays.nbytes[item] * arrays.per_byte[self.cpu, d])
                self._charge_streaming(group, -1, streamed, max_streamed=1.0, size=size, seconds=copying)
            program.at_most(terms, 0.0)

    def _add_working_set_rows(self, group: _DeviceGroup, room: float) -> None:
        """Add the rows that weights leave room for the needs of each class while it runs."""
        for members, running in zip(self.classes, group.runs, strict=True):
            needs = float(self.needs[group.first, members.units[0]] / self.byte_scale)
            if needs > PARAMS.negligible * room:
                runs_any = self.program.variable(1.0, integer=True)
                self.program.at_least([(runs_any, float(len(members.units))), (running, -1.0)], 0.0)
                self.program.at_most([*group.memory, (runs_any, needs)], room)

    def _add_transfer_rows(self) -> None:
        """Add the rows of copies: values read on a device and not made there must arrive."""
        class_of = {unit: index for index, c in enumerate(self.classes) for unit in c.units}
        values: dict[tuple[int, ...], list[CopiedValue]] = defaultdict(list)
        for value in self.frontier.values:
            if 0 <= value.maker < self.frontier.units:
                key = class_of[value.maker], *sorted(class_of[unit] for unit in value.readers)
                values[key].append(value)
        for (maker, *reader_classes), equal in values.items():
            makers = [value.maker for value in equal]
            readers = [unit for value in equal for unit in value.readers]
            if len(set(makers)) < len(makers) or len(set(readers)) < len(readers):
                continue  # an operation reads or makes two of these: counts prove nothing
            for group in self.groups:
                d, runs = group.first, group.runs
                others = [h for h in range(self.frontier.devices) if h != d]
                seconds = min((value.seconds[h, d] for value in equal for h in others), default=0.0)
                if not np.isfinite(seconds) or seconds <= 0:
                    continue
                arrived = self.program.variable(float(len(equal)))
                self.clock[-1].append((arrived, float(seconds) / self.scale))
                for reader, copies_per_value in Counter(reader_classes).items():
                    copies = float(copies_per_value)
                    non_readers = len(self.classes[reader].units) - copies_per_value * len(equal)
                    terms = [(arrived, copies), (runs[reader], -1.0), (runs[maker], copies)]
                    self.program.at_least(terms, -float(non_readers))

    def solve(self, effort: Effort) -> float:
        target_bound = 1.0 - PARAMS.sufficient_gap / 2
        bound = branch_and_bound(self.program, self.makespan, target_bound, effort)
        return bound * self.scale
