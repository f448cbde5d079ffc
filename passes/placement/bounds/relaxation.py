"""The Lagrangian relaxation: prices on bytes and on seconds of copying replace their limits.

With prices ``price[d] >= 0`` per byte and ``share[d] >= 0`` of the clock, ``sum(share) <= 1``, every
placement within the budgets takes at least::

    min over all placements of  (1 - sum(share)) * clock + sum over d of share[d] * queue[d]
                                + price[d] * (bytes[d] - room[d])

since it takes at least its clock and at least each device's copying, and exceeds no room. The minimum is a
shortest path over the frontier's states; their cost-to-go guides the label-setting search. The best prices
are found by cutting planes (Kelley, "The cutting-plane method for solving convex programs", 1960), from the
duals of a linear program that divides operation classes over devices in fractions, without copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sparse
from scipy.optimize import linprog

from graphplan.passes.placement.arrays import Arrays, Bools, Floats, Ints
from graphplan.passes.placement.bounds.frontier import DpStage, Frontier, frontiers_by_home
from graphplan.passes.placement.certificate import Bound, Scope
from graphplan.passes.placement.params import PARAMS, ROUNDING, Effort


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory of the accelerators that is reserved before a search.

    Attributes:
        slots: (devices,) number of prefetch slots; 0 where nothing is streamed.
        nbytes: (devices,) bytes of each slot.
        activation_bytes: (devices,) bytes for activations, where more than the least needy operation takes.
    """

    slots: Ints
    nbytes: Floats
    activation_bytes: Floats

    @classmethod
    def none(cls, devices: int) -> Buffers:
        """Return buffers that reserve nothing."""
        return cls(np.zeros(devices, dtype=np.int64), np.zeros(devices), np.zeros(devices))

    @property
    def total(self) -> Floats:
        """(devices,) bytes of all slots."""
        return self.slots * self.nbytes

    @property
    def key(self) -> tuple[float, ...]:
        """Number and bytes of the slots of each device."""
        return (*self.slots.tolist(), *self.nbytes.tolist())


@dataclass(frozen=True, slots=True)
class Prices:
    """(devices,) seconds per byte, and (devices,) share of the clock that weighs the copy queue."""

    per_byte: Floats
    queue: Floats


class Relaxation:
    """The Lagrangian relaxation of a frontier with a memory configuration.

    Args:
        frontier: the frontier whose steps are placed.
        stages: the stages of the frontier.
        buffers: reserved prefetch buffers; None for a bound that holds for buffers of any size.

    Attributes:
        activation_reserve: (devices,) bytes that are reserved for activations.
        room: (devices,) most bytes of weights.
        prefetch_slack: (devices,) the seconds to fill all slots; infinite if their sizes are open.
        on_clock: whether copies overlap with nothing.
        stream_seconds: (devices, steps) seconds of streaming the movable weights; infinite where impossible.
        bound: the highest lower bound so far, seconds.
        proof: the method that found it.
        prices: the prices of that bound.
        cost_to_go: for each step, and after the last: (states,) seconds to the end at these prices.
        possible: whether a placement may exist.
    """

    def __init__(self, frontier: Frontier, stages: list[DpStage], buffers: Buffers | None) -> None:
        self.frontier, self.stages = frontier, stages
        steps, count = frontier.steps, frontier.devices
        self.nbytes = np.array([step.nbytes for step in steps])
        self.movable = np.array([step.movable for step in steps])
        self.copied = np.array([step.copied for step in steps])
        self.needs = np.array([step.needs for step in steps]).T
        self.fixed_queue = np.zeros((count, len(steps)))
        for i, step in enumerate(steps):
            if step.variable < frontier.units:
                self.fixed_queue[:, i] = frontier.fixed_queue[:, step.variable]
        self.seconds = np.array([step.seconds for step in steps]).T
        self.cpu = frontier.cpu if frontier.streaming else None
        self.buffers = buffers
        has_room = self._set_room()
        self._set_copies()
        self.bound, self.proof = 0.0, "Lagrangian relaxation"
        self.cost_to_go: list[Floats] = []
        self.prices = Prices(np.zeros(count), np.zeros(count))
        self.possible = has_room and all(len(stage.states) for stage in stages)

    @property
    def reserved(self) -> Buffers:
        """The reserved prefetch buffers."""
        assert self.buffers is not None
        return self.buffers

    def _set_room(self) -> bool:
        """Set the room for weights; return whether the prefetch buffers fit."""
        arrays = self.frontier.arrays
        # a device with weights of its operations runs at least the least needy one
        runs = np.array([step.variable < self.frontier.units for step in self.frontier.steps])
        needs = np.where(np.isfinite(self.seconds) & runs, self.needs, np.inf)
        reserve = needs.min(axis=1, initial=np.inf)
        reserve = np.where(np.isfinite(reserve), reserve, 0.0)
        if self.cpu is not None:  # the CPU may hold streamed weights and run nothing
            reserve[self.cpu] = 0.0
        # one that runs nothing may hold shared weights
        unreserved = arrays.room - arrays.fixed_bytes
        reserve = np.minimum(reserve, np.maximum(unreserved - arrays.stored_bytes(arrays.shared), 0.0))
        if self.buffers is not None:
            reserve = np.maximum(reserve, self.buffers.activation_bytes)
        room = unreserved - reserve
        total = np.zeros(len(room)) if self.buffers is None else self.buffers.total
        reserved = np.maximum(total - arrays.allocated_buffers, 0.0)  # these are in the fixed bytes
        # a device without room is not used, and then holds no bytes
        self.activation_reserve, self.room = reserve, np.maximum(room - reserved, 0.0)
        # a budget above all bytes is no limit: it does not steer the prices
        np.minimum(self.room, self.nbytes.sum() + self.needs.max(axis=1, initial=0.0), out=self.room)
        return bool((room >= reserved)[total > 0].all())

    def _set_copies(self) -> None:
        arrays = self.frontier.arrays
        self.stream_seconds = np.full(self.seconds.shape, np.inf)
        self.prefetch_slack = np.full(self.frontier.devices, np.inf)
        self.on_clock = not arrays.problem.streaming  # weights are copied one by one
        if self.cpu is None:
            return
        per_byte = arrays.per_byte[self.cpu, : self.frontier.devices]
        latency = arrays.latency[self.cpu, : self.frontier.devices]
        for d in self.frontier.accelerators:
            able = (self.movable > 0) & np.isfinite(self.seconds[d])
            seconds = self.copied * per_byte[d]
            if self.on_clock:
                seconds = seconds + latency[d]
            elif self.buffers is not None:
                able &= (self.movable <= self.buffers.nbytes[d]) & (self.buffers.slots[d] > 0)
                seconds = seconds + latency[d]
                if self.buffers.slots[d] == 1:  # the next copy waits for the reader of this one
                    seconds = seconds + np.where(np.isfinite(self.seconds[d]), self.seconds[d], 0.0)
                self.prefetch_slack[d] = self.buffers.total[d] * per_byte[d]
            self.stream_seconds[d] = np.where(able, seconds, np.inf)

    @cached_property
    def streams(self) -> bool:
        """Whether anything may be streamed through the reserved buffers."""
        streamed = np.isfinite(self.stream_seconds).any() or self.fixed_queue.any()
        return bool(self.buffers is not None and streamed and not self.on_clock)

    # -- prices --------------------------------------------------------------------------------------

    def improve(self, target_bound: float, effort: Effort, rounds: int | None = None) -> None:
        """Raise the bound up to ``target_bound`` seconds, by prices from ``rounds`` cutting planes."""
        if not self.possible:
            self.bound = np.inf
            return
        point = self._as_point(self.prices) if self.cost_to_go else self._first_prices()
        cuts: list[tuple[float, Floats]] = []
        for _ in range(PARAMS.price_rounds if rounds is None else rounds):
            prices = self._as_prices(point)
            point = self._as_point(prices)
            bound, cost_to_go, slope = self._dual(prices)
            slope = self._class_means(slope)
            effort.charge(sum(100.0 + 0.2 * stage.seconds.size for stage in self.stages))
            if not np.isfinite(bound):
                self.possible, self.bound = False, np.inf
                return
            cuts.append((float(bound - slope @ point), slope))
            if not self.cost_to_go or bound > self.bound:
                self.bound, self.prices, self.cost_to_go = max(bound, 0.0), prices, cost_to_go
            if self.bound >= target_bound or effort.over:
                return
            highest, proposed = self._highest(cuts)
            if highest - self.bound < PARAMS.sufficient_gap / 2 * abs(self.bound):
                return
            point = (self._as_point(self.prices) + proposed) / 2

    @property
    def _scale(self) -> Floats:
        """(devices,) bytes of each device; a point holds prices of all of its bytes."""
        most = max(1.0, float(self.nbytes.sum()))
        return np.asarray(np.clip(self.frontier.arrays.room, 1.0, most))

    def _as_point(self, prices: Prices) -> Floats:
        return np.concatenate([prices.per_byte * self._scale, prices.queue])

    def _class_means(self, point: Floats) -> Floats:
        """Return the mean over each class: symmetry breaking needs equal prices, and the dual is concave."""
        count, means = self.frontier.devices, point.copy()
        for members in self.frontier.classes:
            for offset in (0, count):
                means[[m + offset for m in members]] = point[[m + offset for m in members]].mean()
        return means

    def _as_prices(self, point: Floats) -> Prices:
        count, means = self.frontier.devices, self._class_means(point)
        queue = np.clip(means[count:], 0.0, 1.0) * self._has_queue
        return Prices(np.maximum(means[:count], 0.0) / self._scale, queue / max(1.0, float(queue.sum())))

    @property
    def _has_queue(self) -> Bools:
        """(devices,) whether its copy queue may be used."""
        able = np.isfinite(self.stream_seconds) & (not self.on_clock)
        return np.asarray((able | (self.fixed_queue > 0)).any(axis=1))

    def _highest(self, cuts: list[tuple[float, Floats]]) -> tuple[float, Floats]:
        """Return the highest bound that the cutting planes allow, and its point."""
        count = self.frontier.devices
        unit = max(self.bound, 1e-12)  # scales for HiGHS, whose tolerances are absolute
        # no useful price of all bytes of a device is above the seconds of the slowest forward pass
        highest = float(np.where(np.isfinite(self.seconds), self.seconds, 0.0).max(axis=0).sum()) / unit
        slopes = np.array([slope for _, slope in cuts])
        slopes[:, count:] /= unit
        rows = np.hstack([np.ones((len(cuts), 1)), -slopes])
        share_row = np.concatenate([[0.0], np.zeros(count), np.ones(count)])
        solution = linprog(
            np.concatenate([[-1.0], np.zeros(2 * count)]),
            A_ub=np.vstack([rows, share_row]),
            b_ub=np.append([height / unit for height, _ in cuts], 1.0),
            bounds=[
                (None, 4.0),
                *[(0.0, max(highest, 1.0))] * count,
                *[(0.0, float(w)) for w in self._has_queue],
            ],
            method="highs",
        )
        if solution.x is None:
            return self.bound, self._as_point(self.prices)
        proposed = np.asarray(solution.x[1:])
        proposed[:count] *= unit
        return -float(solution.fun) * unit, proposed

    def _options(self, prices: Prices) -> tuple[Floats, Floats]:
        """(devices, steps) priced bytes and copying of weights: all resident; the movable ones streamed."""
        per_byte, queue = prices.per_byte[:, None], prices.queue[:, None]
        resident = per_byte * self.nbytes + queue * self.fixed_queue
        weight = np.ones_like(queue) if self.on_clock else queue
        possible = np.isfinite(self.stream_seconds)
        streamed = resident - per_byte * self.movable + weight * np.where(possible, self.stream_seconds, 0.0)
        if self.cpu is not None:
            streamed = streamed + prices.per_byte[self.cpu] * self.movable
        return resident, np.where(possible, streamed, np.inf)

    def _clock(self, stage: DpStage, prices: Prices) -> Floats:
        """(devices, states) seconds of a step, less the weighed copying that they hide."""
        possible = np.isfinite(stage.seconds)
        seconds = np.where(possible, stage.seconds, 0.0)
        hidden = sum(
            w * np.minimum(seconds, slack)
            for w, slack in zip(prices.queue, self.prefetch_slack, strict=True)
            if w
        )
        return np.where(possible, seconds - hidden, np.inf)

    def _dual(self, prices: Prices) -> tuple[float, list[Floats], Floats]:
        """Return the bound at these prices, the cost-to-go of all states, and the slope of the bound."""
        resident, streamed = self._options(prices)
        extra = np.minimum(resident, streamed)
        clocks: dict[int, Floats] = {}
        cost_to_go = [np.zeros(len(self.stages[-1].states))]
        weighed = bool(prices.queue.any())
        for i in range(len(self.stages) - 1, -1, -1):
            stage = self.stages[i]
            clock = stage.seconds
            if weighed:
                if id(stage) not in clocks:
                    clocks[id(stage)] = self._clock(stage, prices)
                clock = clocks[id(stage)]
            by_device = cost_to_go[-1][stage.next_state]
            by_device += clock
            by_device += extra[:, i : i + 1]
            cost_to_go.append(by_device.min(axis=0))
        cost_to_go.reverse()
        nbytes, queue, clock_sum = np.zeros((3, len(self.room)))
        state = 0
        for i, stage in enumerate(self.stages):
            next_state = stage.next_state[:, state]
            clock = clocks[id(stage)][:, state] if weighed else stage.seconds[:, state]
            d = int((clock + extra[:, i] + cost_to_go[i + 1][next_state]).argmin())
            seconds = stage.seconds[d, state]
            if not np.isfinite(seconds):
                break
            copying = self.fixed_queue[d, i]
            nbytes[d] += self.nbytes[i]
            if streamed[d, i] < resident[d, i]:
                nbytes[d] -= self.movable[i]
                if self.cpu is not None:
                    nbytes[self.cpu] += self.movable[i]
                if not self.on_clock:
                    copying = copying + self.stream_seconds[d, i]
            queue[d] += copying
            clock_sum += np.minimum(seconds, self.prefetch_slack)
            state = int(next_state[d])
        slope = np.concatenate([(nbytes - self.room) / self._scale, queue - clock_sum])
        constant = (1.0 - float(prices.queue.sum())) * self.frontier.constant
        return float(cost_to_go[0][0] - prices.per_byte @ self.room) + constant, cost_to_go, slope

    def _first_prices(self) -> Floats:
        """Return the duals of the linear program over operation classes; zeros if it is not solved."""
        count = self.frontier.devices
        columns = np.vstack([self.seconds, self.nbytes, self.movable, self.fixed_queue, self.stream_seconds])
        _, first, members = np.unique(columns.T.round(12), axis=0, return_index=True, return_counts=True)
        classes = len(first)
        nbytes, movable = self.nbytes[first][:, None], self.movable[first][:, None]
        queue = self.fixed_queue[:, first].T
        can_run = np.isfinite(self.seconds[:, first].T)
        seconds = np.where(can_run, self.seconds[:, first].T, 0.0)
        can_stream = np.isfinite(self.stream_seconds[:, first].T)
        copying = np.where(can_stream, self.stream_seconds[:, first].T, 0.0)
        on_clock, on_queue = (copying, 0.0) if self.on_clock else (0.0, copying)

        def row(resident: Floats, streamed: Floats, makespan: float) -> Floats:
            return np.concatenate([resident.ravel(), streamed.ravel(), [makespan]])

        clock = row(seconds, seconds + on_clock, -1.0)
        queues = [row(queue * unit, (queue + on_queue) * unit, -1.0) for unit in np.eye(count)]
        memory = []
        for d, unit in enumerate(np.eye(count)):
            streamed = (nbytes - movable) * unit + (movable if d == self.cpu else 0.0)
            memory.append(row(nbytes * unit, streamed, 0.0) / self._scale[d])
        class_sums = sparse.kron(sparse.identity(classes), np.ones((1, count)))
        upper_limits = row(np.where(can_run, np.inf, 0.0), np.where(can_stream, np.inf, 0.0), np.inf)
        solution = linprog(
            np.arange(len(upper_limits)) == len(upper_limits) - 1,
            A_ub=sparse.csr_matrix(np.array([clock, *queues, *memory])),
            b_ub=np.concatenate([np.zeros(1 + count), self.room / self._scale]),
            A_eq=sparse.hstack([class_sums, class_sums, sparse.csr_matrix((classes, 1))]),
            b_eq=members,
            bounds=np.column_stack([np.zeros(len(upper_limits)), upper_limits]),
            method="highs",
        )
        if solution.x is None:  # start without prices
            return np.zeros(2 * count)
        duals = np.maximum(-solution.ineqlin.marginals, 0.0)
        return np.concatenate([duals[1 + count :], duals[1 : 1 + count]])


def least_seconds(arrays: Arrays) -> Bound:
    """Return the bound of zero prices and free copies: each operation on its fastest device."""
    seconds = float(arrays.compute.min(axis=0, initial=np.inf).sum())
    return Bound(seconds * (1 - ROUNDING), "least seconds of each operation", Scope.ANY)


def relax(
    arrays: Arrays, target_bound: float, effort: Effort, *, streaming: bool = False
) -> list[Relaxation]:
    """Return a relaxation for each home of the largest shared weight; the least bound is that of the problem.

    A bound of ``target_bound`` seconds is not raised further.
    """
    frontiers = frontiers_by_home(arrays, effort, streaming=streaming)
    relaxations = [Relaxation(frontier, stages, None) for frontier, stages in frontiers]
    for done, relaxation in enumerate(relaxations):
        with effort.fraction(1 / (len(relaxations) - done)) as sub_effort:
            relaxation.improve(target_bound, sub_effort)
    return relaxations
