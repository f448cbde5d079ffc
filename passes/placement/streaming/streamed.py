"""The search where accelerators do not hold the weights: the CPU computes and keeps, weights are streamed.

Before a search it is settled how much of each accelerator's memory is prefetch buffers, and where the
largest shared weight resides. For each such configuration the Lagrangian relaxation says how fast a
placement may be; in that order they are searched by beams with the clock of every copy queue. What is
found is judged by the evaluator, again with margins where it passes a budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np

from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.arrays import Arrays, Floats, Ints
from graphplan.passes.placement.bounds.frontier import DpStage, Frontier, settled_frontiers
from graphplan.passes.placement.bounds.label_dp import Completion, search_labels, widest
from graphplan.passes.placement.bounds.relaxation import Buffers, Relaxation, relax
from graphplan.passes.placement.bounds.symmetry import device_classes
from graphplan.passes.placement.certificate import Bound
from graphplan.passes.placement.evaluate import Evaluation, evaluate_filled
from graphplan.passes.placement.params import PARAMS, ROUNDING, Effort
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import reside
from graphplan.passes.placement.segment_dp import SegmentDP
from graphplan.passes.placement.streaming.coarsen import coarsen
from graphplan.passes.placement.streaming.round_robin import in_turns
from graphplan.passes.placement.streaming.streamed_local_search import climb_streamed

_ROUNDS = (16, 32, 8, 64, 4)
"""How often accelerators have their turn; what is best for a model shows only when it is tried."""


@dataclass
class StreamedSearch:
    """Places a problem with the CPU and with streaming.

    Attributes:
        problem: what is placed.
        effort: what is charged.
        best: the fastest placement within the budgets; None where there is none.
        bound: on every placement of the problem.
        nearest: of those that pass a budget, the one that does by least.
        beside: frontier, slots and their bytes -> (devices,) bytes that exact peaks took beside weights.
    """

    problem: Problem
    effort: Effort
    best: Evaluation | None = None
    bound: Bound = field(default_factory=Bound)
    nearest: Evaluation | None = None
    arrays: Arrays = field(init=False)
    guide: Frontier = field(init=False)
    beside: dict[tuple[object, ...], Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._search_on(Arrays.of_search(self.problem))

    def _search_on(self, arrays: Arrays) -> None:
        self.arrays = arrays
        for name in ("coarse", "_slot_sizes"):  # those of other arrays
            self.__dict__.pop(name, None)
        self.guide = Frontier(self.arrays, streaming=True, guide=True)

    @cached_property
    def coarse(self) -> Arrays:
        """With pieces of the order tied together: what the beams search."""
        tied = coarsen(self.arrays)
        if tied is self.arrays.problem:
            return self.arrays
        return Arrays(tied, folded=self.arrays.folded)

    @cached_property
    def proving(self) -> Arrays:
        """Of the problem itself: what a bound must hold for."""
        return Arrays(self.problem) if self.arrays.folded else self.arrays

    @property
    def seconds(self) -> float:
        """Of the best placement."""
        return np.inf if self.best is None else self.best.seconds

    @property
    def proven(self) -> bool:
        """Whether the gap is small enough to end."""
        return self.bound.seconds >= self.seconds * (1 - PARAMS.sufficient_gap)

    def _evaluate(self, assignment: Assignment) -> Evaluation:
        return evaluate_filled(self.problem, assignment, self.arrays.unread)

    def offer(self, found: Evaluation) -> bool:
        """Keep a placement if it is the fastest within the budgets; whether it is within them."""
        self.effort.charge(3000.0 + 200.0 * self.arrays.count)
        if not found.feasible:
            over = sum(found.excess.values()) if np.isfinite(found.seconds) else np.inf
            if over < (np.inf if self.nearest is None else sum(self.nearest.excess.values())):
                self.nearest = found
            return False
        if found.seconds < self.seconds * (1 - ROUNDING):
            self.best = found
        return True

    # -- a first placement ---------------------------------------------------------------------------

    def take_turns(self) -> None:
        """Accelerators in turn, with smaller and smaller slots, until these do not pay.

        Slots that too few weights fill come last: those of a head, say, which is larger than all others.
        """
        arrays, ratio = self.arrays, PARAMS.slot_ratio
        able = np.flatnonzero(arrays.accelerates).tolist()
        lacking = arrays.weight_bytes.sum() - arrays.room[able].sum()

        def is_filled_by_few(size: float) -> bool:
            fill = (arrays.weight_bytes <= size) & (arrays.weight_bytes * ratio > size)
            return bool(arrays.weight_bytes[fill].sum() < lacking)

        for size in sorted(self._slot_sizes, key=is_filled_by_few):
            before = self.seconds
            for rounds in _ROUNDS if len(able) > 1 else (1,):
                if self.effort.over:
                    return
                devices = self.coarse.expand(in_turns(self.coarse, rounds))
                self._stream_excess(dict.fromkeys(able, 0.0), devices, size)
            if self.best is not None and self.seconds == before:
                return

    def begin(self, near: Assignment | None = None) -> bool:
        """Segments with streamed excess, everything on one device, the nearest repaired; whether one fits.

        Where a training step does not fit folded, an operation's backward pass may be elsewhere than itself.
        """
        if not self._begin(near) and self.arrays.folded and not self.effort.over:
            self._search_on(self.proving)
            self._begin(near)
        return self.best is not None

    def _begin(self, near: Assignment | None) -> bool:
        if near is not None and (known := self._adopted(near)) is not None:
            self.offer(self._evaluate(known))
        complete = False
        for options in (
            {"streaming": True, "use_cpu": True},
            {"streaming": True, "use_cpu": True, "in_order": True},
            {"use_cpu": True},
            {"streaming": True},
            {"streaming": True, "use_cpu": True, "loose": True},
        ):
            if self.effort.over or (self.best is not None and ("loose" in options or self._spent_much)):
                break
            if "in_order" in options and complete:
                continue
            search = SegmentDP(self.arrays, self.effort, **options)
            complete = search.complete
            self._offer_segments(search)
        for device, *_ in device_classes(self.arrays):
            if self.best is None or not self.arrays.accelerates[device]:
                self._all_on(device)
        self._spread_evenly()
        if self.best is None and self.nearest is not None:
            with self.effort.share(PARAMS.local_share) as part:
                self.offer(climb_streamed(self.arrays, self.nearest, part))
        return self.best is not None

    def _offer_segments(self, search: SegmentDP) -> None:
        for homes in search.homes() if search.classes else ():
            if self.effort.over or (self.best is not None and self._spent_much):
                return
            for segments, devices in search.placements(homes):
                lacking = dict.fromkeys((one.device for one in segments), 0.0)
                for one in segments:
                    lacking[one.device] = max(lacking[one.device], one.excess)
                self._stream_excess(lacking, devices)

    @property
    def _spent_much(self) -> bool:
        return self.effort.visits < 0.8 * self.effort.total

    def _adopted(self, near: Assignment) -> Assignment | None:
        """A known placement with the rules of this problem; None where it parts what must be together."""
        arrays, problem, cpu = self.arrays, self.problem, self.guide.cpu
        if near.operations.keys() != problem.graph.operations.keys():
            return None
        operations = problem.obey(near.operations)
        if any(len({operations[name] for name in group}) > 1 for group in problem.graph.together):
            return None
        streamed = [
            arrays.names[item]
            for item in range(arrays.values, len(arrays.names))
            if cpu is not None and self.guide.is_streamable(item)
            if near.weights.get(arrays.names[item]) == arrays.keys[cpu]
        ]
        homes = {}
        for item in arrays.shared:
            name = arrays.names[item]
            if near.weights.get(name) in {operations[reader] for reader in problem.graph.readers[name]}:
                homes[name] = near.weights[name]
        return replace(reside(problem, operations, streamed, homes), slots=near.slots)

    def _all_on(self, device: int) -> None:
        arrays = self.arrays
        devices = arrays.expand(np.full(len(arrays.units), device))
        self._stream_excess({device: 0.0}, devices)
        if arrays.accelerates[device]:
            self._stream_excess({device: float(arrays.weight_bytes.sum())}, devices)

    def _spread_evenly(self) -> None:
        """For slots of each size: all on one accelerator, and the operations of the best placement."""
        arrays = self.arrays
        able = (device for device, *_ in device_classes(arrays) if arrays.accelerates[device])
        trials = [arrays.expand(np.full(len(arrays.units), device)) for device in able]
        if self.best is not None:
            trials.append(arrays.devices(self.best.assignment))
        for size, devices in product(self._slot_sizes, trials):
            if self.effort.over:
                return
            self._stream_excess(dict.fromkeys(np.unique(devices).tolist(), 0.0), devices, size)

    def _stream_excess(self, lacking: dict[int, float], devices: Ints, slot: float = np.inf) -> None:
        """Judge a placement, with as many weights streamed as devices lack bytes for, spread evenly.

        Args:
            lacking: device -> bytes that it lacks, to begin with.
            devices: of the operations.
            slot: bytes of the largest weight that is streamed.
        """
        operations, tried = self.arrays.named(devices), None
        for _ in range(2 * PARAMS.retries):
            spread = {d: self._spread(devices, d, nbytes, slot) for d, nbytes in lacking.items() if nbytes}
            if spread == tried:
                return  # all that can be streamed is
            tried = spread
            streamed = [self.arrays.names[item] for items in spread.values() for item in items]
            found = self._evaluate(reside(self.problem, operations, streamed))
            if self.offer(found) or not found.excess or found.seconds >= self.seconds:
                return  # what streams more takes no less
            for key, over in found.excess.items():
                d = self.arrays.number[key]
                if self.arrays.accelerates[d]:
                    freed = self.arrays.stored_bytes(spread.get(d, []))
                    lacking[d] = max(lacking.get(d, 0.0), freed) + over

    def _spread(self, devices: Ints, device: int, nbytes: float, slot: float) -> list[int]:
        """Weights read on a device, at equal distances in its order, of so many bytes with two slots.

        They are those that fill a slot, or all that go into it where these are not enough.
        """
        arrays, frontier = self.arrays, self.guide
        units = np.unique(arrays.unit_of[devices == device])
        mine = [item for unit in units[units >= 0].tolist() for item in frontier.movable(unit)]
        mine = [i for i in mine if devices[arrays.source[i]] == device and arrays.nbytes[i] <= slot]
        filling = [i for i in mine if arrays.nbytes[i] * PARAMS.slot_ratio > slot]
        if np.isfinite(slot) and arrays.stored_bytes(filling) >= nbytes + 2.0 * slot:
            mine = filling
        total, found = arrays.stored_bytes(mine), list[int]()
        if nbytes > total:  # own weights are not enough: those that others read too
            for item in arrays.shared:
                here = any(devices[arrays.units[unit][0]] == device for unit in arrays.readers[item])
                if here and frontier.is_streamable(item):
                    found.append(item)
        if not total:
            return found
        wanted = min(total, nbytes + 2.0 * float(arrays.nbytes[mine].max()))
        due = 0.0
        for item in mine:
            size = arrays.stored_bytes([item])
            due += wanted / total * size
            if due >= size * (1 - ROUNDING):
                due -= size
                found.append(item)
        # whole weights are some less: one more
        rest = sorted(set(mine) - set(found), key=arrays.nbytes.__getitem__)
        enough = [item for item in rest if arrays.stored_bytes([item]) >= due] or rest[-1:]
        return found + (enough[:1] if due > ROUNDING * wanted else [])

    # -- beams ---------------------------------------------------------------------------------------

    def improve(self) -> None:
        """Search configurations, the most promising first, then those beside the best."""
        if self.best is None and self.effort.over:
            return  # no bound is asked for
        with self.effort.share(0.25) as part:
            configurations = sorted(self._configurations(part), key=lambda one: one.bound)
        best = configurations[0] if configurations else None
        with self.effort.share(0.35) as part:
            for one in configurations:
                if part.over or one.bound >= self.seconds * (1 - PARAMS.sufficient_gap):
                    break
                best = self._search(one, PARAMS.first_width, part) or best
        if best is not None:
            with self.effort.share(0.3) as part:
                best = self._beside(best, part)
            with self.effort.share(0.8) as part:
                self._widen(best, part)

    def _configurations(self, effort: Effort) -> Iterator[Relaxation]:
        """One for each home of the largest shared weight, number and size of the slots."""
        frontiers = list(settled_frontiers(self.coarse, effort, streaming=True, guide=True))
        trials = [
            (stages, frontier, buffers)
            for slots in (2, 1)
            for size in self._slot_sizes
            for frontier, stages in frontiers
            if (buffers := self._buffers(frontier, slots, size)) is not None
        ]
        for done, (stages, frontier, buffers) in enumerate(trials):
            if effort.over and done:
                return
            with effort.share(1 / (len(trials) - done)) as part:
                found = _relaxed(frontier, stages, buffers, part)
            if found.possible:
                yield found

    @cached_property
    def _slot_sizes(self) -> list[float]:
        """A few sizes of slots: the largest that weights need, and some that are clearly smaller."""
        frontier = Frontier(self.coarse, streaming=True, guide=True)
        movable = np.array([step.movable for step in frontier.steps])
        movable = np.unique(movable[movable > 0])
        room = self.arrays.room[self.arrays.accelerates].max(initial=0.0)
        found, left = list[float](), movable[movable <= room]
        while len(left) and len(found) < PARAMS.slot_sizes:
            found.append(float(left[-1]))
            left = left[left * PARAMS.slot_ratio <= left[-1]]
        return found

    def _buffers(self, frontier: Frontier, slots: int, nbytes: float) -> Buffers | None:
        """Prefetch buffers on each accelerator that holds them beside an operation; the neediest, if it can.

        The others stream nothing; None where no accelerator streams.
        """
        keys, count = self.arrays.keys, frontier.devices
        needs = np.array([step.needs for step in frontier.steps if step.variable < frontier.units])
        left = self.arrays.room - self.arrays.fixed_bytes - slots * nbytes
        limits = np.array([self.problem.prefetch_limits.get(keys[d], np.inf) for d in range(count)])
        streams = self.arrays.accelerates & (left >= needs.min(axis=0)) & (slots * nbytes <= limits)
        if not streams.any():
            return None
        beside = np.where(streams & (left >= needs.max(axis=0)), needs.max(axis=0), 0.0)
        return Buffers(np.where(streams, slots, 0), np.where(streams, nbytes, 0.0), beside)

    def _search(self, relaxation: Relaxation, width: int, effort: Effort) -> Relaxation | None:
        """Search a configuration; the one that improved the best placement, if any did.

        Where exact peaks pass a budget, more is reserved for activations, at prices of their own.
        """
        before, asked = self.seconds, relaxation.buffers
        assert asked is not None
        configuration = (relaxation.frontier, *asked.slots.tolist(), *asked.nbytes.tolist())
        if (known := self.beside.get(configuration)) is not None and (known > asked.beside).any():
            tighter = replace(asked, beside=np.maximum(known, asked.beside))
            relaxation = _relaxed(relaxation.frontier, relaxation.stages, tighter, effort)
        for _ in range(1 + PARAMS.retries):
            width = min(width, widest(relaxation, effort.visits))
            if width < 1 or effort.late or not relaxation.possible:
                break
            found = search_labels(relaxation, width, 1.5 * self.seconds, effort)
            if not found.completions:
                break
            first = self._judge(relaxation, found.completions[0])
            if self.offer(first) or not first.excess:
                break
            if min(first.seconds, found.completions[0].seconds) > self.seconds:
                break
            buffers = relaxation.buffers
            assert buffers is not None
            beside = np.maximum(buffers.beside, relaxation.least)
            for key, over in first.excess.items():
                d = self.arrays.number[key]
                beside[d] += over + max(0.0, float(found.completions[0].spare[d]))
            self.beside[configuration] = beside
            tighter = replace(buffers, beside=beside)
            relaxation = _relaxed(relaxation.frontier, relaxation.stages, tighter, effort)
        return relaxation if self.seconds < before else None

    def _judge(self, relaxation: Relaxation, completion: Completion) -> Evaluation:
        """A completion of the coarse problem, as a placement of the problem."""
        frontier, arrays = relaxation.frontier, self.coarse
        operations = arrays.named(arrays.expand(completion.device[: frontier.units]))
        streamed = [
            arrays.names[item]
            for unit in range(frontier.units)
            if completion.streamed[unit]
            for item in frontier.movable(unit)
        ]
        homes = {
            arrays.names[item]: arrays.keys[d]
            for item, d in zip(frontier.shared, completion.device[frontier.units :].tolist(), strict=True)
        }
        assert relaxation.buffers is not None
        slots = {arrays.keys[d]: int(n) for d, n in enumerate(relaxation.buffers.slots) if n}
        return self._evaluate(replace(reside(self.problem, operations, streamed, homes), slots=slots))

    def _beside(self, best: Relaxation, effort: Effort) -> Relaxation:
        """Change the buffers of one accelerator at a time, while that helps."""
        tried, improved, gap = set[tuple[float, ...]](), True, PARAMS.sufficient_gap
        while improved and not effort.over:
            improved = False
            for trial in self._neighbours(best):
                key = (*trial.slots.tolist(), *trial.nbytes.tolist())
                if key in tried or effort.over:
                    continue
                tried.add(key)
                found = _relaxed(best.frontier, best.stages, trial, effort)
                if not found.possible or found.bound >= self.seconds * (1 - gap):
                    continue
                better = self._search(found, PARAMS.first_width, effort)
                if better is not None:
                    best, improved = better, True
                    break
        return best

    def _neighbours(self, best: Relaxation) -> Iterator[Buffers]:
        buffers = best.buffers
        assert buffers is not None
        for d in np.flatnonzero(buffers.slots).tolist():
            limit = self.problem.prefetch_limits.get(self.arrays.keys[d], np.inf)
            for slots in (1, 2, 3):
                for size in self._slot_sizes:
                    if (slots, size) != (buffers.slots[d], buffers.nbytes[d]) and slots * size <= limit:
                        changed = buffers.slots.copy(), buffers.nbytes.copy()
                        changed[0][d], changed[1][d] = slots, size
                        yield replace(buffers, slots=changed[0], nbytes=changed[1])

    def _widen(self, best: Relaxation, effort: Effort) -> None:
        """Search the best configuration wider and wider, at better prices."""
        best.improve(self.seconds, effort)
        width = PARAMS.first_width
        while not effort.over:
            width = int(width * PARAMS.width_growth)
            if width > widest(best, effort.visits):
                return
            best = self._search(best, width, effort) or best

    # -- the bound -----------------------------------------------------------------------------------

    def prove(self, enough: float) -> None:
        """The Lagrangian bound of the problem itself, whatever the buffers, for each home."""
        with self.effort.share(0.15) as part:
            found = relax(self.proving, enough, part, streaming=True)
        least = min((one.bound for one in found), default=np.inf)
        if np.isfinite(least):
            self.bound = self.bound.raised(least * (1 - ROUNDING), found[0].proof)


def _relaxed(frontier: Frontier, stages: list[DpStage], buffers: Buffers, effort: Effort) -> Relaxation:
    """A configuration with prices, a few rounds of them."""
    found = Relaxation(frontier, stages, buffers)
    found.improve(np.inf, effort, rounds=4)
    return found
