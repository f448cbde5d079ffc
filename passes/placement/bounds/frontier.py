"""The frontier of live values: the states of partial placements, for dynamic programming.

Macro-operations are placed in order. The home of a shared weight is a variable too, placed before its first
reader. Between two steps a *state* says which devices hold each value that is still to be read and, where
links differ, which device made it; and which devices are in use. Two partial placements of one state have the
same continuations at the same cost, apart from bytes, so dynamic programming over states is exact.

A state is a word of 62 bits. If these are too few, or there are too many states, the cheapest values are
relaxed: their copies cost nothing, and the result stays a lower bound. Exchangeable devices are used in turn.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator, Set
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from graphplan.passes.placement.arrays import Arrays, Bools, Floats, Ints
from graphplan.passes.placement.bounds.symmetry import device_classes
from graphplan.passes.placement.params import PARAMS, Effort

_WORD = 62  # bits of a state, without the sign


@dataclass(slots=True)
class CopiedValue:
    """Tensors or weights with one maker and the same readers, which are copied together.

    Attributes:
        maker: the variable that makes it; -1 for a fixed source.
        readers: the variables that read it.
        seconds: (devices, devices) seconds of a copy from row to column; equal rows for a fixed source.
        first: the first step that makes or reads it.
        last: the last such step.
    """

    maker: int
    readers: tuple[int, ...]
    seconds: Floats
    first: int = 0
    last: int = 0

    @property
    def max_seconds(self) -> float:
        """The seconds of the slowest copy that is possible."""
        finite = self.seconds[np.isfinite(self.seconds)]
        return float(finite.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Access:
    """A step's access to a value, which its variable makes or reads.

    Attributes:
        slot: position of its bits in the state.
        makes: whether the step makes the value, else reads it.
        seconds: (devices, devices) seconds of a copy, one row if the source does not matter; None if nothing
            is copied yet: the value is made and was not read before, or is read and was not made before.
    """

    slot: int
    makes: bool
    seconds: Floats | None


@dataclass(slots=True)
class Step:
    """The step that places one variable: a macro-operation, or the home of a shared weight.

    Attributes:
        variable: number of the macro-operation; numbers beyond these are shared weights.
        seconds: (devices,) seconds, infinite where the variable may not be placed.
        nbytes: bytes of the weights that reside with it.
        movable: those of these bytes that may be streamed instead.
        copied: bytes of a copy of the movable weights.
        needs: (devices,) bytes of activations and workspace while it runs.
        accesses: values that it makes or reads.
        closed: slots of values that no later step reads.
        open: slots of values that are live after it, the cheapest first.
    """

    variable: int
    seconds: Floats
    nbytes: float
    movable: float
    copied: float
    needs: Floats
    accesses: list[Access] = field(default_factory=list)
    closed: tuple[int, ...] = ()
    open: tuple[int, ...] = ()

    @property
    def signature(self) -> Hashable:
        """A key that is equal for steps with the same transitions from equal states."""
        accesses = tuple(
            (a.slot, a.makes, None if a.seconds is None else a.seconds.tobytes()) for a in self.accesses
        )
        return self.seconds.tobytes(), accesses, self.closed, self.open


class Frontier:
    """The steps of a problem.

    Args:
        arrays: arrays of the problem.
        streaming: whether accelerators may read weights from CPU memory through prefetch buffers.
        guide: price copies of shared weights from CPU memory as if they overlapped with nothing, and forbid
            large ones; False for a lower bound, for which these copies cost nothing.
        first: a shared weight (index into ``shared``) whose home is placed before everything else.

    Attributes:
        devices: number of devices that compute.
        classes: classes of exchangeable devices.
        shared: items that are weights with several readers and no fixed home.
        clock: (devices, macro-operations) seconds, with the copies that depend on this step alone.
        fixed_queue: (devices, macro-operations) seconds of copying weights that are fixed in CPU memory.
        constant: seconds of copies that do not depend on the placement.
        values: values that one step makes and others read, or that several read.
        steps: the steps in order.
    """

    def __init__(
        self, arrays: Arrays, *, streaming: bool = False, guide: bool = False, first: int | None = None
    ) -> None:
        self.arrays, self.streaming, self.guide = arrays, streaming, guide
        self.devices, self.units = arrays.computing, len(arrays.units)
        self.accelerators, self.cpu = np.flatnonzero(arrays.accelerates).tolist(), arrays.cpu
        self.readers, self.shared = arrays.readers, arrays.shared
        self.unit_weights: list[list[int]] = [[] for _ in arrays.units]
        for item, readers in sorted(self.readers.items()):
            if item >= arrays.values and arrays.fixed[item] < 0 and len(readers) == 1:
                self.unit_weights[readers[0]].append(item)
        self._first, self.values = first, self._read_values()
        self.needs_home = any(self._depends_on_source(value) for value in self.values)
        self.width = self.devices * (2 if self.needs_home else 1)
        self.classes = device_classes(arrays)
        self.use_order = [(b, a) for members in self.classes for a, b in pairwise(members)]
        if self.devices > _WORD:  # no bits for the devices in use
            self.use_order = []

    # -- reading the problem -------------------------------------------------------------------------

    def is_streamable(self, item: int) -> bool:
        """Whether accelerators may read a weight through their prefetch buffers."""
        weight, problem = self.arrays.weights[item - self.arrays.values], self.arrays.problem
        return (
            self.streaming
            and (problem.offload or self.arrays.fixed[item] == self.cpu or self._is_read_on_cpu_only(item))
            and self.cpu is not None
            and self.arrays.stored_bytes([item]) > 0
            and weight.name in self.arrays.graph.streamable
        )

    def _is_read_on_cpu_only(self, item: int) -> bool:
        """Whether some reader of a weight runs on the CPU only, so that the weight may reside there."""
        readers = [i for unit in self.readers.get(item, ()) for i in self.arrays.units[unit]]
        return not np.isfinite(self.arrays.compute[self.accelerators][:, readers]).any(axis=0).all()

    def _read_values(self) -> list[CopiedValue]:
        """Return the values between steps; copies that depend on one step alone are added to its clock."""
        arrays, count = self.arrays, self.devices
        returned = set(arrays.item[arrays.reader == arrays.count].tolist())
        summed: dict[tuple[int, tuple[int, ...]], Floats] = {}
        self.clock = arrays.unit_seconds()
        self.fixed_queue = np.zeros((count, self.units))
        self.constant = 0.0
        for item in range(len(arrays.names)):
            seconds = self._copy_seconds(item)
            maker = self._maker(item)
            if item in returned:
                self._charge_return(item, maker, seconds[:, arrays.host])
                seconds[:, arrays.host] = 0.0
            if maker is None:  # a weight that resides with its only reader
                continue
            readers = tuple(unit for unit in self.readers.get(item, ()) if unit != maker)
            if not readers:
                continue
            if maker < 0:
                seconds = np.repeat(seconds[arrays.fixed[item]][None, :], len(seconds), axis=0)
                if len(readers) == 1:
                    self.clock[:, readers[0]] += seconds[0, :count]
                    continue
            key = maker, readers
            summed[key] = seconds[:count, :count] + summed.get(key, 0.0)
        return [CopiedValue(*key, seconds) for key, seconds in summed.items() if seconds.any()]

    def _maker(self, item: int) -> int | None:
        """Return the variable that makes an item; -1 for a fixed source, None for its reader's own weight."""
        arrays = self.arrays
        if item in self.shared:
            return self.units + self.shared.index(item)
        if arrays.fixed[item] >= 0:
            return -1
        return int(arrays.unit_of[arrays.source[item]]) if item < arrays.values else None

    def _charge_return(self, item: int, maker: int | None, seconds: Floats) -> None:
        """Charge the copy of a result to the caller, (devices,) seconds, to its maker or to all."""
        if maker is not None and 0 <= maker < self.units:
            self.clock[:, maker] += seconds[: self.devices]
        elif item in self.arrays.returned_weights:  # a bound takes its fastest copy
            self.constant += float(seconds[: self.devices].min())
        elif maker == -1:
            self.constant += seconds[self.arrays.fixed[item]]

    def _copy_seconds(self, item: int) -> Floats:
        """(devices, devices) seconds of a copy; 0 for streaming from the CPU, unless a guide prices it."""
        arrays = self.arrays
        seconds = arrays.copy_seconds(item)
        if item >= arrays.values and self.is_streamable(item) and arrays.problem.streaming:
            readers, cpu_fixed = self.readers.get(item, ()), arrays.fixed[item] == self.cpu
            if cpu_fixed and len(readers) == 1:
                queue = arrays.nbytes[item] * arrays.per_byte[self.cpu, self.accelerators]
                self.fixed_queue[self.accelerators, readers[0]] += queue
            if not self.guide or cpu_fixed:
                seconds[self.cpu, self.accelerators] = 0.0
            elif item in arrays.large_shared:
                seconds[self.cpu, self.accelerators] = np.inf
        return seconds

    def _depends_on_source(self, value: CopiedValue) -> bool:
        """Whether a copy to some device costs more from one device than from another."""
        if value.maker < 0:
            return False
        makers = np.array(self._makers(value))
        seconds, same = value.seconds[makers, : self.devices], makers[:, None] == np.arange(self.devices)
        low = np.where(same, np.inf, seconds).min(axis=0, initial=np.inf)
        high = np.where(same, -np.inf, seconds).max(axis=0, initial=-np.inf)
        return bool((low < high).any())

    # -- steps ---------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> list[Step]:
        """The steps in order; lazy, since only label searches and relaxations need them."""
        first = self._first
        earlier: dict[int, list[int]] = defaultdict(list)
        front = [] if first is None else [self.units + first]
        for k, item in enumerate(self.shared):
            if k != first:
                earlier[min(self.readers[item])].append(self.units + k)
        order = front + [v for unit in range(self.units) for v in (*earlier[unit], unit)]
        step_of = {variable: i for i, variable in enumerate(order)}
        steps = [self._step(variable) for variable in order]
        accessed: dict[int, list[CopiedValue]] = defaultdict(list)
        for value in self.values:
            indices = {step_of[v] for v in (value.maker, *value.readers) if v >= 0}
            value.first, value.last = min(indices), max(indices)
            for i in indices:
                accessed[i].append(value)
        self._assign_slots(steps, accessed, step_of)
        return steps

    def _step(self, variable: int) -> Step:
        arrays = self.arrays
        if variable >= self.units:
            item = self.shared[variable - self.units]
            seconds = np.zeros(self.devices)
            if not self.streaming and not self._is_read_on_cpu_only(item):
                seconds[~arrays.accelerates] = np.inf
            nbytes = arrays.stored_bytes([item])
            needs = np.zeros(self.devices)
            return Step(variable, seconds, nbytes, movable=0.0, copied=0.0, needs=needs)
        movable = self.movable(variable)
        return Step(
            variable=variable,
            seconds=self.clock[:, variable].copy(),
            nbytes=arrays.stored_bytes(self.unit_weights[variable]),
            movable=arrays.stored_bytes(movable),
            copied=float(sum(arrays.nbytes[item] * arrays.copies[item - arrays.values] for item in movable)),
            needs=arrays.working_sets[:, variable],
        )

    def movable(self, unit: int) -> list[int]:
        """Return the own weights of a macro-operation that may be streamed; a guide leaves out small ones."""
        nbytes = self.arrays.nbytes
        items = [item for item in self.unit_weights[unit] if self.is_streamable(item)]
        if not self.guide:  # a bound must allow all of them
            return items
        by_size = sorted(items, key=lambda item: nbytes[item])
        total = np.cumsum(nbytes[by_size])
        negligible = PARAMS.negligible * nbytes[items].sum()
        small = set(by_size[: np.searchsorted(total, negligible, side="right")])
        return [item for item in items if item not in small]

    def _assign_slots(
        self, steps: list[Step], accessed: dict[int, list[CopiedValue]], step_of: dict[int, int]
    ) -> None:
        """Assign a slot to each value while it is live; slot 0 holds the devices in use."""
        # the lowest first, so that equal layers have equal slots
        free = list(range(1, _WORD // self.width))
        slots: dict[int, int] = {}
        cost: dict[int, float] = {}
        for i, step in enumerate(steps):
            closed = []
            for value in sorted(accessed[i], key=lambda v: -v.max_seconds):
                if value.first == i and free:
                    slot = slots[id(value)] = heapq.heappop(free)
                    cost[slot] = value.max_seconds
                if id(value) not in slots:
                    continue
                step.accesses.append(self._access(value, i, slots[id(value)], step_of))
                if value.last == i:
                    closed.append(slots[id(value)])
            for slot in closed:
                del cost[slot]
                heapq.heappush(free, slot)
            step.closed = tuple(sorted(closed))
            step.open = tuple(sorted(cost, key=lambda slot: (cost[slot], slot)))

    def _access(self, value: CopiedValue, i: int, slot: int, step_of: dict[int, int]) -> Access:
        maker = -1 if value.maker < 0 else step_of[value.maker]
        if maker == i:
            return Access(slot, makes=True, seconds=value.seconds if value.first < i else None)
        if maker > i:
            return Access(slot, makes=False, seconds=None)
        seconds = value.seconds if self.needs_home else self._source_independent_seconds(value)
        return Access(slot, makes=False, seconds=seconds)

    def _source_independent_seconds(self, value: CopiedValue) -> Floats:
        """(1, devices) seconds of a copy if they do not depend on its source."""
        if value.maker < 0:
            return value.seconds[:1]
        makers = np.array(self._makers(value))
        seconds = value.seconds[makers].copy()
        seconds[np.arange(len(makers)), makers] = -np.inf
        return np.asarray(np.maximum(seconds.max(axis=0, initial=0.0), 0.0)[None, :])

    def _makers(self, value: CopiedValue) -> list[int]:
        if value.maker >= self.units:
            return list(range(self.devices))
        return np.flatnonzero(np.isfinite(self.clock[:, value.maker])).tolist()

    def with_first_home(self, device: int) -> Frontier:
        """Return the frontier with the home of the first step, a shared weight, fixed to a device."""
        fixed = copy(self)
        seconds = np.full(self.devices, np.inf)
        seconds[device] = 0.0
        fixed.steps = [replace(self.steps[0], seconds=seconds), *self.steps[1:]]
        return fixed

    # -- states --------------------------------------------------------------------------------------

    def start(self) -> Ints:
        """(1,) the state before the first step."""
        return np.zeros(1, dtype=np.int64)

    def extend(self, step: Step, states: Ints, relaxed: Set[int] = frozenset()) -> tuple[Ints, Floats]:
        """Extend states by a step on each device.

        Args:
            step: the step to place.
            states: (states,) states before it.
            relaxed: slots of values whose copies cost nothing.

        Returns:
            (devices, states) states after it, and (devices, states) its seconds.
        """
        after = np.repeat(states[None], self.devices, axis=0)
        seconds = np.repeat(step.seconds[:, None], len(states), axis=1)
        bits = np.left_shift(np.int64(1), np.arange(self.devices) % _WORD)[:, None]
        if self.use_order:
            for device, earlier in self.use_order:
                seconds[device, (states >> earlier & 1) == 0] = np.inf
            after |= bits
        for access in step.accesses:
            if access.slot in relaxed:
                continue
            shift = access.slot * self.width
            if access.seconds is not None:
                holders = self._holders(states, access.slot)
                if access.makes:  # copies to devices that have read it before
                    for reader, cost in enumerate(access.seconds.T):
                        seconds += np.where(holders[reader], cost[:, None], 0.0)
                else:
                    seconds += np.where(holders, 0.0, self._arrival(access.seconds, states, shift))
            after |= bits << shift
            if access.makes and self.needs_home:
                after |= bits << (shift + self.devices)
        return self.without(after, frozenset(step.closed)), seconds

    def _holders(self, states: Ints, slot: int) -> Bools:
        """(devices, states) whether a device holds the value of a slot."""
        positions = slot * self.width + np.arange(self.devices)[:, None]
        holders: Bools = (states >> positions & 1).astype(bool)
        return holders

    def _arrival(self, seconds: Floats, states: Ints, shift: int) -> Floats:
        """(devices, states) seconds of a copy from the device that made the value."""
        if not self.needs_home:
            return np.asarray(seconds[0][:, None])
        home = states >> (shift + self.devices) & ((1 << self.devices) - 1)
        made = np.frexp(np.maximum(home, 1).astype(float))[1] - 1  # index of the only set bit
        return np.asarray(np.where(home[None, :] > 0, seconds[made].T, seconds[0][:, None]))

    def without(self, states: Ints, slots: Set[int]) -> Ints:
        """(states,) states with the bits of these slots cleared."""
        bits = sum((1 << self.width) - 1 << slot * self.width for slot in slots)
        return states & ~np.int64(bits)


@dataclass(frozen=True, slots=True)
class DpStage:
    """The states after a step, and the transitions to them.

    Attributes:
        states: (states,) in ascending order.
        next_state: (devices, states before) index of the state after.
        seconds: (devices, states before) seconds, infinite where the variable may not be placed.
        relaxed: slots of values that are relaxed after the step.
    """

    states: Ints
    next_state: npt.NDArray[np.int32]
    seconds: Floats
    relaxed: frozenset[int]

    def find(self, frontier: Frontier, states: Ints) -> Ints:
        """(states,) indices of the states that these exact states are relaxed to."""
        return np.searchsorted(self.states, frontier.without(states, self.relaxed))


def make_stages(frontier: Frontier, effort: Effort) -> list[DpStage]:
    """Return a stage for each step; equal layers mostly share their stages."""
    stages: list[DpStage] = []
    cache: dict[Hashable, DpStage] = {}
    states, relaxed = frontier.start(), frozenset[int]()
    for step in frontier.steps:
        key = step.signature, relaxed, states.tobytes()
        stage = cache.get(key)
        if stage is None:
            stage = cache[key] = _make_stage(frontier, step, states, relaxed, effort)
        stages.append(stage)
        states, relaxed = stage.states, stage.relaxed
    return stages


def frontiers_by_home(
    arrays: Arrays, effort: Effort, *, streaming: bool = False, guide: bool = False
) -> Iterator[tuple[Frontier, list[DpStage]]]:
    """Yield a frontier with its stages; if a shared weight is large, one for each home of the largest.

    One home of each device class is enough. The arguments are those of :class:`Frontier`.
    """
    sizes = {item: arrays.stored_bytes([item]) for item in arrays.large_shared}
    largest = max(sizes, key=sizes.__getitem__, default=None)
    first = None if largest is None else arrays.shared.index(largest)
    frontier = Frontier(arrays, streaming=streaming, guide=guide, first=first)
    if largest is None:
        yield frontier, make_stages(frontier, effort)
        return
    for home, *_ in frontier.classes:
        if np.isfinite(frontier.steps[0].seconds[home]) and sizes[largest] <= arrays.room[home]:
            fixed = frontier.with_first_home(home)
            yield fixed, make_stages(fixed, effort)


def _make_stage(
    frontier: Frontier, step: Step, states: Ints, relaxed: frozenset[int], effort: Effort
) -> DpStage:
    after, seconds = frontier.extend(step, states, relaxed)
    effort.charge(2000.0 + after.size)
    unique, relaxed = np.unique(after[np.isfinite(seconds)]), relaxed - set(step.closed)
    for slot in step.open:
        if len(unique) * frontier.devices <= PARAMS.relaxed_states:
            break
        relaxed |= {slot}
        unique = np.unique(frontier.without(unique, {slot}))
    # the index of an unreachable state is arbitrary: seconds are infinite there
    next_state = np.searchsorted(unique, frontier.without(after, relaxed)).clip(max=max(0, len(unique) - 1))
    return DpStage(unique, next_state.astype(np.int32), seconds, relaxed)
