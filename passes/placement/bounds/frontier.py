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
class _Value:
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
    def highest(self) -> float:
        finite = self.seconds[np.isfinite(self.seconds)]
        return float(finite.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Touch:
    """A value that the variable of a step makes or reads.

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
        seconds: (devices,) seconds, infinite where it may not be.
        nbytes: bytes of the weights that reside with it.
        movable: bytes of those of them that may be streamed instead.
        copied: bytes of a copy of the movable weights.
        needs: (devices,) bytes of activations and workspace while it runs.
        touches: values that it makes or reads.
        closed: slots of values that no later step reads.
        open: slots of values that are live after it, the cheapest first.
    """

    variable: int
    seconds: Floats
    nbytes: float
    movable: float
    copied: float
    needs: Floats
    touches: list[Touch] = field(default_factory=list)
    closed: tuple[int, ...] = ()
    open: tuple[int, ...] = ()

    @property
    def signature(self) -> Hashable:
        """A key that is equal for steps with the same transitions from equal states."""
        touches = tuple(
            (t.slot, t.makes, None if t.seconds is None else t.seconds.tobytes()) for t in self.touches
        )
        return self.seconds.tobytes(), touches, self.closed, self.open


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
        self.before = [(b, a) for members in self.classes for a, b in pairwise(members)]
        if self.devices > _WORD:  # no bits for the devices in use
            self.before = []

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

    def _read_values(self) -> list[_Value]:
        """Return the values between steps; copies that depend on one step alone are added to its clock."""
        arrays, count = self.arrays, self.devices
        returned = set(arrays.item[arrays.reader == arrays.count].tolist())
        summed: dict[tuple[int, tuple[int, ...]], Floats] = {}
        self.clock = np.array([arrays.compute[:, members].sum(axis=1) for members in arrays.units]).T
        self.clock = self.clock.reshape(count, self.units)
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
            before = summed.get(key)
            summed[key] = seconds[:count, :count] + (0.0 if before is None else before)
        return [_Value(*key, seconds) for key, seconds in summed.items() if seconds.any()]

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

    def _depends_on_source(self, value: _Value) -> bool:
        """Whether a copy to some device costs more from one device than from another."""
        if value.maker < 0:
            return False
        makers = np.array(self._makers(value))
        seconds, own = value.seconds[makers, : self.devices], makers[:, None] == np.arange(self.devices)
        least = np.where(own, np.inf, seconds).min(axis=0, initial=np.inf)
        most = np.where(own, -np.inf, seconds).max(axis=0, initial=-np.inf)
        return bool((least < most).any())

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
        place = {variable: i for i, variable in enumerate(order)}
        steps = [self._step(variable) for variable in order]
        touched: dict[int, list[_Value]] = defaultdict(list)
        for value in self.values:
            places = {place[v] for v in (value.maker, *value.readers) if v >= 0}
            value.first, value.last = min(places), max(places)
            for i in places:
                touched[i].append(value)
        self._give_slots(steps, touched, place)
        return steps

    def _step(self, variable: int) -> Step:
        arrays = self.arrays
        if variable >= self.units:
            item = self.shared[variable - self.units]
            seconds = np.zeros(self.devices)
            if not self.streaming and not self._is_read_on_cpu_only(item):
                seconds[~arrays.accelerates] = np.inf
            nbytes = arrays.stored_bytes([item])
            nothing = np.zeros(self.devices)
            return Step(variable, seconds, nbytes, 0.0, 0.0, nothing)
        movable = self.movable(variable)
        return Step(
            variable,
            self.clock[:, variable].copy(),
            arrays.stored_bytes(self.unit_weights[variable]),
            arrays.stored_bytes(movable),
            float(sum(arrays.nbytes[item] * arrays.copies[item - arrays.values] for item in movable)),
            arrays.working_sets[:, variable],
        )

    def movable(self, unit: int) -> list[int]:
        """Return the own weights of a macro-operation that may be streamed; a guide leaves out small ones."""
        nbytes = self.arrays.nbytes
        items = [item for item in self.unit_weights[unit] if self.is_streamable(item)]
        if not self.guide:  # a bound must allow all of them
            return items
        by_size = sorted(items, key=lambda item: nbytes[item])
        total = np.cumsum(nbytes[by_size])
        least = PARAMS.negligible * nbytes[items].sum()
        small = set(by_size[: np.searchsorted(total, least, side="right")])
        return [item for item in items if item not in small]

    def _give_slots(self, steps: list[Step], touched: dict[int, list[_Value]], place: dict[int, int]) -> None:
        """Assign a slot to each value while it is live; slot 0 holds the devices in use."""
        # the lowest first, so that equal layers have equal slots
        free = list(range(1, _WORD // self.width))
        slots: dict[int, int] = {}
        cost: dict[int, float] = {}
        for i, step in enumerate(steps):
            closed = []
            for value in sorted(touched[i], key=lambda v: -v.highest):
                if value.first == i and free:
                    slot = slots[id(value)] = heapq.heappop(free)
                    cost[slot] = value.highest
                if id(value) not in slots:
                    continue
                step.touches.append(self._touch(value, i, slots[id(value)], place))
                if value.last == i:
                    closed.append(slots[id(value)])
            for slot in closed:
                del cost[slot]
                heapq.heappush(free, slot)
            step.closed = tuple(sorted(closed))
            step.open = tuple(sorted(cost, key=lambda slot: (cost[slot], slot)))

    def _touch(self, value: _Value, i: int, slot: int, place: dict[int, int]) -> Touch:
        maker = -1 if value.maker < 0 else place[value.maker]
        if maker == i:
            return Touch(slot, makes=True, seconds=value.seconds if value.first < i else None)
        if maker > i:
            return Touch(slot, makes=False, seconds=None)
        seconds = value.seconds if self.needs_home else self._same_from_all(value)
        return Touch(slot, makes=False, seconds=seconds)

    def _same_from_all(self, value: _Value) -> Floats:
        """(1, devices) seconds of a copy if they do not depend on its source."""
        if value.maker < 0:
            return value.seconds[:1]
        makers = np.array(self._makers(value))
        seconds = value.seconds[makers].copy()
        seconds[np.arange(len(makers)), makers] = -np.inf
        return np.asarray(np.maximum(seconds.max(axis=0, initial=0.0), 0.0)[None, :])

    def _makers(self, value: _Value) -> list[int]:
        if value.maker >= self.units:
            return list(range(self.devices))
        return np.flatnonzero(np.isfinite(self.clock[:, value.maker])).tolist()

    def with_first(self, device: int) -> Frontier:
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
        if self.before:
            for device, other in self.before:
                seconds[device, (states >> other & 1) == 0] = np.inf
            after |= bits
        for touch in step.touches:
            if touch.slot in relaxed:
                continue
            shift = touch.slot * self.width
            if touch.seconds is not None:
                held = self._held(states, touch.slot)
                if touch.makes:  # copies to devices that have read it before
                    for reader, cost in enumerate(touch.seconds.T):
                        seconds += np.where(held[reader], cost[:, None], 0.0)
                else:
                    seconds += np.where(held, 0.0, self._arrival(touch.seconds, states, shift))
            after |= bits << shift
            if touch.makes and self.needs_home:
                after |= bits << (shift + self.devices)
        return self.without(after, frozenset(step.closed)), seconds

    def _held(self, states: Ints, slot: int) -> Bools:
        """(devices, states) whether a device holds the value of a slot."""
        places = slot * self.width + np.arange(self.devices)[:, None]
        held: Bools = (states >> places & 1).astype(bool)
        return held

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
        seconds: (devices, states before) seconds, infinite where the variable may not be.
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


def settled_frontiers(
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
            settled = frontier.with_first(home)
            yield settled, make_stages(settled, effort)


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
