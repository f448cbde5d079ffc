"""The search where accelerators do not hold the weights: the CPU computes and holds weights to stream.

A configuration fixes the prefetch buffers of each accelerator and the home of the largest shared weight. The
Lagrangian relaxation gives a lower bound for each configuration, and they are searched in that order. The
search is a beam of labels with a clock for every copy queue. The evaluator judges its completions; where they
exceed a budget, the beam is rerun with more memory reserved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from graphplan.ir.liveness import measure_memory
from graphplan.ir.schedule import Assignment, Run
from graphplan.passes.placement.arrays import Arrays, Floats, Ints
from graphplan.passes.placement.bounds.frontier import DpStage, Frontier, frontiers_by_home
from graphplan.passes.placement.bounds.label_dp import Completion, max_width, search_labels
from graphplan.passes.placement.bounds.milp import BY_CLASSES, bound_by_classes
from graphplan.passes.placement.bounds.relaxation import Buffers, Relaxation, least_seconds, relax
from graphplan.passes.placement.bounds.symmetry import device_classes
from graphplan.passes.placement.certificate import Bound
from graphplan.passes.placement.evaluate import Evaluation, evaluate_filled
from graphplan.passes.placement.params import PARAMS, ROUNDING, Effort
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import assign_weights
from graphplan.passes.placement.segment_dp import SegmentDP
from graphplan.passes.placement.streaming.coarsen import coarsen
from graphplan.passes.placement.streaming.min_cut import CUT_VISITS, accelerated
from graphplan.passes.placement.streaming.round_robin import round_robin
from graphplan.passes.placement.streaming.streamed_local_search import climb_streamed

_ROUNDS = (16, 32, 8, 64, 4)
"""Numbers of rounds to try: only a trial shows which is best for a model."""


@dataclass
class StreamedSearch:
    """Places a problem with the CPU and with streaming.

    Attributes:
        problem: the problem to place.
        effort: the effort to charge.
        best: the fastest placement within the budgets; None if there is none.
        bound: lower bound for every placement of the problem.
        nearest: the placement that exceeds the budgets by least, among those that exceed one.
        arrays: arrays of the problem, folded if it is a training step.
        guide: frontier of these arrays, to read weights from; it gives no bound.
        coarse: arrays of the coarser problem, which the beams search.
        slot_sizes: sizes of prefetch slots to try, the largest first.
        activation_needs: frontier, slots and their bytes -> (devices,) bytes that exact peaks need in
            addition to weights.
    """

    problem: Problem
    effort: Effort
    best: Evaluation | None = None
    bound: Bound = field(default_factory=Bound)
    nearest: Evaluation | None = None
    arrays: Arrays = field(init=False)
    guide: Frontier = field(init=False)
    coarse: Arrays = field(init=False)
    slot_sizes: list[float] = field(init=False)
    activation_needs: dict[tuple[object, ...], Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._search_on(Arrays.of_search(self.problem))

    def _search_on(self, arrays: Arrays) -> None:
        self.arrays = arrays
        tied = coarsen(arrays)
        self.coarse = arrays if tied is arrays.problem else Arrays(tied, folded=arrays.folded)
        self.guide = Frontier(arrays, streaming=True, guide=True)
        self.slot_sizes = _slot_sizes(self.coarse)

    @property
    def seconds(self) -> float:
        """Seconds of the best placement."""
        return np.inf if self.best is None else self.best.seconds

    @property
    def proven(self) -> bool:
        """Whether the gap is at most ``sufficient_gap``."""
        return self.bound.seconds >= self.seconds * (1 - PARAMS.sufficient_gap)

    @property
    def places_weights(self) -> bool:
        """Whether it decides where weights reside; False if earlier plans have placed all of them."""
        return any(map(self.guide.movable, range(len(self.arrays.units))))

    def evaluation(self) -> Evaluation | None:
        """Return the best placement; None if there is none."""
        return self.best

    def _evaluate(self, assignment: Assignment) -> Evaluation:
        return evaluate_filled(self.problem, assignment, self.arrays.unread)

    def offer(self, evaluation: Evaluation) -> bool:
        """Keep a placement if it is the fastest within the budgets; return whether it is within them."""
        self.effort.charge_evaluation(self.arrays.count)
        if not evaluation.feasible:
            over = sum(evaluation.excess.values()) if np.isfinite(evaluation.seconds) else np.inf
            if over < (np.inf if self.nearest is None else sum(self.nearest.excess.values())):
                self.nearest = evaluation
            return False
        if evaluation.seconds < self.seconds * (1 - ROUNDING):
            self.best = evaluation
        return True

    # -- a first placement ---------------------------------------------------------------------------

    def try_round_robin(self) -> None:
        """Try accelerators in round robin, with smaller and smaller slots, until these do not pay.

        Slot sizes that too few weights fill come last, such as that of a head larger than all other weights.
        """
        arrays, ratio = self.arrays, PARAMS.slot_ratio
        accelerators = np.flatnonzero(arrays.accelerates).tolist()
        deficit = arrays.weight_bytes.sum() - arrays.room[accelerators].sum()

        def is_filled_by_few(size: float) -> bool:
            fill = (arrays.weight_bytes <= size) & (arrays.weight_bytes * ratio > size)
            return bool(arrays.weight_bytes[fill].sum() < deficit)

        for size in sorted(self.slot_sizes, key=is_filled_by_few):
            earlier = self.seconds
            for rounds in _ROUNDS if len(accelerators) > 1 else (1,):
                if self.effort.over:
                    return
                devices = self.coarse.expand(round_robin(self.coarse, rounds))
                self._stream_excess(dict.fromkeys(accelerators, 0.0), devices, size)
            if self.best is not None and self.seconds == earlier:
                return

    def find_first_placement(self, warm_start: Assignment | None = None) -> bool:
        """Find a first placement; return whether one fits.

        Tried are the homes of fixed weights, segments, single devices, even spreads, and repair. A training
        step that does not fit folded is tried unfolded: backward passes may run on other devices.
        """
        if not self._find_first_placement(warm_start) and self.arrays.folded and not self.effort.over:
            self._search_on(Arrays(self.problem))
            self._find_first_placement(warm_start)
        return self.best is not None

    def _find_first_placement(self, warm_start: Assignment | None) -> bool:
        if warm_start is not None and (adopted := self._adopt(warm_start)) is not None:
            self.offer(self._evaluate(adopted))
        self._try_at_home()
        complete = False
        for options in (
            {"streaming": True, "use_cpu": True},
            {"streaming": True, "use_cpu": True, "in_order": True},
            {"use_cpu": True},
            {"streaming": True},
            {"streaming": True, "use_cpu": True, "minimise_excess": True},
        ):
            if self.effort.over:
                break
            if self.best is not None and ("minimise_excess" in options or self._fifth_of_effort_spent):
                break
            if "in_order" in options and complete:
                continue
            search = SegmentDP(self.arrays, self.effort, **options)
            complete = search.complete
            self._offer_segments(search)
        self.try_single_devices()
        self._spread_evenly()
        self.accelerate()
        if self.best is None and self.nearest is not None:
            with self.effort.fraction(PARAMS.local_share) as sub_effort:
                self.offer(climb_streamed(self.arrays, self.nearest, sub_effort))
        return self.best is not None

    def _offer_segments(self, search: SegmentDP) -> None:
        for homes in search.homes():
            if self.effort.over or (self.best is not None and self._fifth_of_effort_spent):
                return
            for segments, devices in search.placements(homes):
                deficit = dict.fromkeys((segment.device for segment in segments), 0.0)
                for segment in segments:
                    deficit[segment.device] = max(deficit[segment.device], segment.excess)
                self._stream_excess(deficit, devices)

    @property
    def _fifth_of_effort_spent(self) -> bool:
        return self.effort.visits < 0.8 * self.effort.total

    def _adopt(self, warm_start: Assignment) -> Assignment | None:
        """Return a given placement under this problem's rules; None if it separates tied operations."""
        arrays, problem, cpu = self.arrays, self.problem, self.problem.topology.cpu
        if warm_start.operations.keys() != problem.graph.operations.keys():
            return None
        operations = problem.on_allowed_devices(warm_start.operations)
        if any(len({operations[name] for name in group}) > 1 for group in problem.graph.together):
            return None
        streamed = [
            name
            for item, name in enumerate(arrays.names)
            if item >= arrays.values
            and warm_start.weights.get(name) == cpu
            and self.guide.is_streamable(item)
        ]
        shared = [arrays.names[item] for item in arrays.shared if arrays.names[item] in warm_start.weights]
        readers = problem.graph.readers
        homes = {name: warm_start.weights[name] for name in shared}
        homes = {name: key for name, key in homes.items() if key in map(operations.get, readers[name])}
        return replace(assign_weights(problem, operations, streamed, homes), slots=warm_start.slots)

    def _try_at_home(self) -> None:
        """Try each macro-operation where its weights are fixed, those without such a weight with the last."""
        arrays, able = self.arrays, np.isfinite(self.guide.clock)
        nbytes = np.zeros(able.shape)
        for item, readers in arrays.readers.items():
            if item >= arrays.values and 0 <= arrays.fixed[item] < arrays.computing:
                nbytes[arrays.fixed[item], list(readers)] += arrays.nbytes[item]
        nbytes[~able] = 0.0
        if not nbytes.any():
            return
        devices, last = [], int(nbytes.sum(axis=1).argmax())
        for unit in range(len(arrays.units)):
            if nbytes[:, unit].any():
                last = int(nbytes[:, unit].argmax())
            elif not able[last, unit]:
                last = int(able[:, unit].argmax())
            devices.append(last)
        self._stream_excess({}, arrays.expand(np.array(devices)))

    def try_single_devices(self) -> None:
        """Try everything on one device, with as few weights streamed as possible, and with all of them."""
        arrays = self.arrays
        for device, *_ in device_classes(arrays):
            devices = arrays.expand(np.full(len(arrays.units), device))
            self._stream_excess({device: 0.0}, devices)
            if arrays.accelerates[device]:
                self.offer(self._evaluate(self._with_all_streamed(devices)))

    def _spread_evenly(self) -> None:
        """Try slots of each size with all on one accelerator, and with the devices of the best placement."""
        arrays = self.arrays
        if not self.places_weights:
            return
        able = (device for device, *_ in device_classes(arrays) if arrays.accelerates[device])
        trials = [arrays.expand(np.full(len(arrays.units), device)) for device in able]
        if self.best is not None:
            trials.append(arrays.devices(self.best.assignment))
        for size, devices in product(self.slot_sizes, trials):
            if self.effort.over:
                return
            self._stream_excess(dict.fromkeys(np.unique(devices).tolist(), 0.0), devices, size)

    def accelerate(self) -> None:
        """Try operations of the CPU on the accelerators, except for those that need too much memory there.

        A segment leaves more on the CPU than that: there are few positions at which it may end.
        """
        arrays, clock, cpu = self.arrays, self.arrays.unit_seconds(), self.arrays.cpu
        accelerators, units = np.flatnonzero(arrays.accelerates), np.arange(len(arrays.units))
        if self.best is None or cpu is None or not len(accelerators) or not len(units):
            return
        devices = arrays.devices(self.best.assignment)[[members[0] for members in arrays.units]]
        cards = np.where(devices == cpu, accelerators[clock[accelerators].argmin(0)], devices)
        able = np.isfinite(clock[cards, units])
        for _ in range(2 * PARAMS.retries):
            if self.effort.over:
                return
            devices = np.where(accelerated(arrays, cards, able), cards, cpu)
            self.effort.charge(CUT_VISITS * arrays.count)
            evaluation = self._evaluate(self._with_all_streamed(arrays.expand(devices)))
            if self.offer(evaluation) or evaluation.seconds >= self.seconds:
                break
            crowded = [unit for unit in self._crowded(evaluation) if np.isfinite(clock[cpu, unit])]
            if not able[crowded].any():
                break
            able[crowded] = False
        if evaluation.feasible:
            self._stream_excess(self._deficit(evaluation), arrays.devices(evaluation.assignment))

    def _crowded(self, evaluation: Evaluation) -> list[int]:
        """Return the macro-operations during which, or before which, an accelerator exceeds its budget."""
        graph, topology = self.problem.graph, self.problem.topology
        profile = measure_memory(graph, topology, evaluation.schedule, with_profile=True).profile
        over = [np.array(profile[spec.key]) > spec.room for spec in topology.accelerators]
        crowded, full = set[int](), False
        for step, exceeds in zip(evaluation.schedule.steps, np.any(over, axis=0).tolist(), strict=True):
            full |= exceeds
            if isinstance(step, Run):
                if full:
                    crowded.add(int(self.arrays.unit_of[self.arrays.index[step.operation]]))
                full = False
        return sorted(crowded - {-1})

    def _deficit(self, evaluation: Evaluation) -> dict[int, float]:
        """Return device -> bytes of weights to stream there, of a placement that streams all of them."""
        arrays, devices = self.arrays, self.arrays.devices(evaluation.assignment)
        deficit: dict[int, float] = {}
        for device in np.unique(devices[arrays.accelerates[devices]]).tolist():
            units = np.unique(arrays.unit_of[devices == device])
            streamed = [item for unit in units[units >= 0].tolist() for item in self.guide.movable(unit)]
            spare = arrays.room[device] - evaluation.peak(arrays.keys[device]).nbytes
            deficit[device] = max(0.0, arrays.stored_bytes(streamed) - spare)
        return deficit

    def _with_all_streamed(self, devices: Ints) -> Assignment:
        """Return the assignment of these (operations,) devices with all weights streamed that can be."""
        weights = range(self.arrays.values, len(self.arrays.names))
        streamable = [self.arrays.names[item] for item in weights if self.guide.is_streamable(item)]
        return assign_weights(self.problem, self.arrays.named(devices), streamable)

    def _stream_excess(
        self, deficit: dict[int, float], devices: Ints, max_weight_bytes: float = np.inf
    ) -> None:
        """Offer placements with as many weights streamed, spread evenly, as devices lack bytes for.

        Args:
            deficit: device -> bytes that it lacks at first; raised by the bytes found to exceed a budget.
            devices: (operations,) devices.
            max_weight_bytes: size of the largest weight that may be streamed.
        """
        operations, tried, kept = self.arrays.named(devices), None, set[int]()
        for _ in range(2 * PARAMS.retries):
            spread = {
                d: [i for i in self._spread(devices, d, nbytes, max_weight_bytes) if i not in kept]
                for d, nbytes in deficit.items()
                if nbytes
            }
            if spread == tried:
                return  # all weights that can be streamed are
            tried = spread
            streamed = [self.arrays.names[item] for items in spread.values() for item in items]
            evaluation = self._evaluate(assign_weights(self.problem, operations, streamed))
            if self.offer(evaluation) or not evaluation.excess or evaluation.seconds >= self.seconds:
                return  # streaming more does not make it faster
            for key, over in evaluation.excess.items():
                d = self.arrays.number[key]
                if self.arrays.accelerates[d]:
                    freed = self.arrays.stored_bytes(spread.get(d, []))
                    deficit[d] = max(deficit.get(d, 0.0), freed) + over
            if not self.arrays.accelerates[[self.arrays.number[key] for key in evaluation.excess]].any():
                kept |= self._to_keep(spread, evaluation)

    def _to_keep(self, spread: Mapping[int, list[int]], evaluation: Evaluation) -> set[int]:
        """Return streamed weights to keep on accelerators with spare bytes, until CPU memory suffices."""
        kept, over = set[int](), float(sum(evaluation.excess.values()))
        for d, streamed in spread.items():
            spare = self.arrays.room[d] - evaluation.peak(self.arrays.keys[d]).nbytes
            for item in sorted(streamed, key=lambda item: -self.arrays.nbytes[item]):
                nbytes = self.arrays.stored_bytes([item])
                if nbytes <= spare and over > 0:
                    kept.add(item)
                    spare, over = spare - nbytes, over - nbytes
        return kept

    def _spread(self, devices: Ints, device: int, nbytes: float, slot_bytes: float) -> list[int]:
        """Return weights to stream to a device, at equal distances in its order.

        Their bytes are ``nbytes`` and two slots. They nearly fill a slot; if those weights are too few, all
        that fit into one are taken.
        """
        arrays, frontier = self.arrays, self.guide
        units = np.unique(arrays.unit_of[devices == device])
        own_weights = [item for unit in units[units >= 0].tolist() for item in frontier.movable(unit)]
        own_weights = [
            i for i in own_weights if devices[arrays.source[i]] == device and arrays.nbytes[i] <= slot_bytes
        ]
        filling = [i for i in own_weights if arrays.nbytes[i] * PARAMS.slot_ratio > slot_bytes]
        if np.isfinite(slot_bytes) and arrays.stored_bytes(filling) >= nbytes + 2.0 * slot_bytes:
            own_weights = filling
        total, chosen = arrays.stored_bytes(own_weights), list[int]()
        if nbytes > total:  # own weights are not enough: stream shared ones too
            for item in arrays.shared:
                read_here = any(devices[arrays.units[unit][0]] == device for unit in arrays.readers[item])
                if read_here and frontier.is_streamable(item):
                    chosen.append(item)
        if not total:
            return chosen
        wanted = min(total, nbytes + 2.0 * float(arrays.nbytes[own_weights].max()))
        quota = 0.0
        for item in own_weights:
            size = arrays.stored_bytes([item])
            quota += wanted / total * size
            if quota >= size * (1 - ROUNDING):
                quota -= size
                chosen.append(item)
        # whole weights fall short of the wanted bytes: stream one more
        if quota > ROUNDING * wanted:
            others = sorted(set(own_weights) - set(chosen), key=arrays.nbytes.__getitem__)
            chosen += ([item for item in others if arrays.stored_bytes([item]) >= quota] or others[-1:])[:1]
        return chosen

    # -- beams ---------------------------------------------------------------------------------------

    def improve(self) -> None:
        """Search configurations in the order of their bounds, then neighbours of the best, then wider."""
        if self.best is None and self.effort.over:
            return  # a bound without a placement is of no use
        with self.effort.fraction(0.25) as sub_effort:
            configurations = sorted(self._configurations(sub_effort), key=lambda relaxation: relaxation.bound)
        best = configurations[0] if configurations else None
        with self.effort.fraction(0.35) as sub_effort:
            for configuration in configurations:
                gap_closed = configuration.bound >= self.seconds * (1 - PARAMS.sufficient_gap)
                if sub_effort.over or gap_closed:
                    break
                best = self._search(configuration, PARAMS.first_width, sub_effort) or best
        if best is not None:
            with self.effort.fraction(0.3) as sub_effort:
                best = self._search_neighbours(best, sub_effort)
            with self.effort.fraction(0.8) as sub_effort:
                self._widen(best, sub_effort)

    def _configurations(self, effort: Effort) -> Iterator[Relaxation]:
        """Yield a relaxation for each home of the largest shared weight and each number and size of slots."""
        frontiers = list(frontiers_by_home(self.coarse, effort, streaming=True, guide=True))
        trials = [
            (stages, frontier, buffers)
            for slots in (2, 1)
            for size in self.slot_sizes
            for frontier, stages in frontiers
            if (buffers := self._buffers(frontier, slots, size)) is not None
        ]
        for done, (stages, frontier, buffers) in enumerate(trials):
            if effort.over and done:
                return
            with effort.fraction(1 / (len(trials) - done)) as sub_effort:
                relaxation = _relaxed(frontier, stages, buffers, sub_effort)
            if relaxation.possible:
                yield relaxation

    def _buffers(self, frontier: Frontier, slots: int, nbytes: float) -> Buffers | None:
        """Return prefetch buffers on each accelerator that has room for them and the least needy operation.

        Room for the neediest one is reserved where possible. None if no accelerator streams.
        """
        keys, count = self.arrays.keys, frontier.devices
        needs = np.array([step.needs for step in frontier.steps if step.variable < frontier.units])
        further = np.maximum(slots * nbytes - self.arrays.allocated_buffers, 0.0)
        left = self.arrays.room - self.arrays.fixed_bytes - further
        limits = np.array([self.problem.prefetch_limits.get(keys[d], np.inf) for d in range(count)])
        streams = self.arrays.accelerates & (left >= needs.min(axis=0)) & (slots * nbytes <= limits)
        if not streams.any():
            return None
        activation_bytes = np.where(streams & (left >= needs.max(axis=0)), needs.max(axis=0), 0.0)
        return Buffers(np.where(streams, slots, 0), np.where(streams, nbytes, 0.0), activation_bytes)

    def _search(
        self, relaxation: Relaxation, width: int, effort: Effort, *, neighbour: bool = False
    ) -> Relaxation | None:
        """Search a configuration; return its last relaxation if the best placement improved, else None.

        Where exact peaks exceed a budget, that placement is repaired, more is reserved for activations, and
        prices are recomputed. A repair alone does not make a ``neighbour`` the configuration to widen.
        """
        earlier, requested = self.seconds, relaxation.reserved.activation_bytes
        configuration = relaxation.frontier, relaxation.reserved.key
        needed = np.maximum(self.activation_needs.get(configuration, requested), requested)
        if (needed > requested).any():
            relaxation = _reserving(relaxation, needed, effort)
        for _ in range(1 + PARAMS.retries):
            width = min(width, max_width(relaxation, effort.visits))
            if width < 1 or effort.late or not relaxation.possible:
                break
            result = search_labels(relaxation, width, 1.5 * self.seconds, effort)
            if not result.completions:
                break
            first = self._judge(relaxation, result.completions[0])
            if self.offer(first) or not first.excess:
                break
            if first.seconds < self.seconds:
                self.offer(self._with_more_streamed(first))
                earlier = self.seconds if neighbour else earlier
            if min(first.seconds, result.completions[0].seconds) > self.seconds:
                break
            needed = np.maximum(relaxation.reserved.activation_bytes, relaxation.activation_reserve)
            for key, over in first.excess.items():
                d = self.arrays.number[key]
                needed[d] += over + max(0.0, float(result.completions[0].spare[d]))
            self.activation_needs[configuration] = needed
            relaxation = _reserving(relaxation, needed, effort)
        return relaxation if self.seconds < earlier else None

    def _judge(self, relaxation: Relaxation, completion: Completion) -> Evaluation:
        """Evaluate a completion of the coarse problem as a placement of the problem."""
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
        slots = {arrays.keys[d]: int(n) for d, n in enumerate(relaxation.reserved.slots) if n}
        return self._evaluate(replace(assign_weights(self.problem, operations, streamed, homes), slots=slots))

    def _with_more_streamed(self, evaluation: Evaluation) -> Evaluation:
        """Return a placement with more weights streamed where accelerators exceed their budgets.

        Each streams the smallest weight that suffices and fits its slots, or else the largest that fits them.
        """
        arrays, cpu = self.arrays, self.problem.topology.cpu
        assert cpu is not None
        movable = [item for unit in range(len(arrays.units)) for item in self.guide.movable(unit)]
        for _ in range(PARAMS.retries):
            slots = {b.device: max(b.slots, default=0) for b in evaluation.schedule.prefetch_buffers}
            homes = dict(evaluation.assignment.weights)
            for key, over in evaluation.excess.items():
                resident = [item for item in movable if homes[arrays.names[item]] == key != cpu]
                fitting = [item for item in resident if arrays.nbytes[item] <= slots.get(key, 0)]
                fitting.sort(key=lambda i: (arrays.nbytes[i] < over, abs(arrays.nbytes[i] - over)))
                homes |= {arrays.names[item]: cpu for item in fitting[:1]}
            if homes == evaluation.assignment.weights:
                break
            self.effort.charge_evaluation(arrays.count)
            evaluation = self._evaluate(replace(evaluation.assignment, weights=homes))
        return evaluation

    def _search_neighbours(self, best: Relaxation, effort: Effort) -> Relaxation:
        """Search neighbours: change the buffers of one accelerator at a time, while that helps."""
        tried = set[tuple[float, ...]]()
        while (better := self._better_neighbour(best, tried, effort)) is not None:
            best = better
        return best

    def _better_neighbour(
        self, best: Relaxation, tried: set[tuple[float, ...]], effort: Effort
    ) -> Relaxation | None:
        """Return the first neighbour, of those not ``tried``, that improves the best placement."""
        for trial in self._neighbours(best.reserved):
            if effort.over:
                return None
            if trial.key in tried:
                continue
            tried.add(trial.key)
            relaxation = _relaxed(best.frontier, best.stages, trial, effort)
            if not relaxation.possible or relaxation.bound >= self.seconds * (1 - PARAMS.sufficient_gap):
                continue
            better = self._search(relaxation, PARAMS.first_width, effort, neighbour=True)
            if better is not None:
                return better
        return None

    def _neighbours(self, buffers: Buffers) -> Iterator[Buffers]:
        for d in np.flatnonzero(buffers.slots).tolist():
            limit = self.problem.prefetch_limits.get(self.arrays.keys[d], np.inf)
            for slots in (1, 2, 3):
                for size in self.slot_sizes:
                    if (slots, size) != (buffers.slots[d], buffers.nbytes[d]) and slots * size <= limit:
                        changed = buffers.slots.copy(), buffers.nbytes.copy()
                        changed[0][d], changed[1][d] = slots, size
                        yield replace(buffers, slots=changed[0], nbytes=changed[1])

    def _widen(self, best: Relaxation, effort: Effort) -> None:
        """Run wider and wider searches of the best configuration, at better prices."""
        best.improve(self.seconds, effort)
        width = PARAMS.first_width
        while not effort.over:
            width = int(width * PARAMS.width_growth)
            if width > max_width(best, effort.visits):
                return
            best = self._search(best, width, effort) or best


def _slot_sizes(arrays: Arrays) -> list[float]:
    """Return a few slot sizes: the largest that a macro-operation needs, and some clearly smaller."""
    frontier = Frontier(arrays, streaming=True, guide=True)
    nbytes = np.array([step.movable for step in frontier.steps if step.variable < frontier.units])
    for item, readers in arrays.readers.items():
        if item >= arrays.values and arrays.fixed[item] == arrays.cpu and frontier.is_streamable(item):
            nbytes[list(readers)] += arrays.stored_bytes([item])
    limits = (arrays.problem.prefetch_limits.get(key, np.inf) for key in arrays.keys[: arrays.computing])
    most = np.minimum(arrays.room, list(limits))[arrays.accelerates].max(initial=0.0)
    sizes, candidates = list[float](), np.unique(nbytes[(nbytes > 0) & (nbytes <= most)])
    while len(candidates) and len(sizes) < PARAMS.slot_sizes:
        sizes.append(float(candidates[-1]))
        candidates = candidates[candidates * PARAMS.slot_ratio <= candidates[-1]]
    return sizes


def prove_streamed(arrays: Arrays, incumbent_seconds: float, effort: Effort) -> Bound:
    """Return a lower bound for every placement, with prefetch buffers of any size.

    ``arrays`` are those of the problem itself, unfolded. A bound of ``incumbent_seconds`` is not raised
    further.
    """
    if effort.late:
        fallback = least_seconds(arrays)
        return Bound().raised(fallback.seconds, fallback.proof)
    with effort.fraction(0.1) as sub_effort:
        proven = bound_by_classes(arrays, incumbent_seconds, sub_effort, streaming=True)
    bound = Bound().raised(proven, BY_CLASSES)
    with effort.fraction(0.15) as sub_effort:
        relaxations = relax(arrays, incumbent_seconds, sub_effort, streaming=True)
    lowest = min(relaxations, key=lambda relaxation: relaxation.bound, default=None)
    if lowest is None or not np.isfinite(lowest.bound):
        return bound
    return bound.raised(lowest.bound * (1 - ROUNDING), lowest.proof)


def _reserving(relaxation: Relaxation, activation_bytes: Floats, effort: Effort) -> Relaxation:
    """Return the relaxation of the same configuration with so many (devices,) bytes for activations."""
    buffers = replace(relaxation.reserved, activation_bytes=activation_bytes)
    return _relaxed(relaxation.frontier, relaxation.stages, buffers, effort)


def _relaxed(frontier: Frontier, stages: list[DpStage], buffers: Buffers, effort: Effort) -> Relaxation:
    """Return the relaxation of a configuration, its prices improved by a few rounds."""
    relaxation = Relaxation(frontier, stages, buffers)
    relaxation.improve(np.inf, effort, rounds=4)
    return relaxation
