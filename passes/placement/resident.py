"""The search without streaming: segments, local search, label setting and bounds, on flat arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.arrays import Arrays, Ints
from graphplan.passes.placement.bounds.label_dp import Completion, max_width, search_labels
from graphplan.passes.placement.bounds.relaxation import Relaxation, least_seconds, relax
from graphplan.passes.placement.certificate import Bound
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.local_search import LocalSearch
from graphplan.passes.placement.params import PARAMS, ROUNDING, Effort
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.segment_dp import SegmentDP

_LABELS = "label-setting search"


@dataclass
class ResidentSearch:
    """Places a problem without streaming.

    Attributes:
        problem: the problem, whose weights reside with their readers.
        effort: the effort to charge.
        devices: (operations,) the incumbent, the best placement so far; None if there is none.
        chosen: (items,) homes of shared weights in the incumbent.
        seconds: seconds of the incumbent.
        bound: lower bound for every placement of the problem.
        arrays: arrays of the problem, folded if it is a training step.
    """

    problem: Problem
    effort: Effort
    devices: Ints | None = None
    chosen: Ints | None = None
    seconds: float = np.inf
    bound: Bound = field(default_factory=Bound)
    arrays: Arrays = field(init=False)
    _proofs: list[Relaxation] = field(default_factory=list)  # of the problem itself
    _climbed: set[bytes] = field(default_factory=set)
    _repaired: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.arrays = Arrays.of_search(self.problem)

    @cached_property
    def proving(self) -> Arrays:
        """Arrays of the problem itself, unfolded, which bounds must hold for."""
        return Arrays(self.problem) if self.arrays.folded else self.arrays

    # -- a first placement ---------------------------------------------------------------------------

    def find_first_placement(self, warm_start: Assignment | None = None) -> bool:
        """Find a placement within the budgets, by segments and repair; return whether there is one.

        A training step that does not fit folded is tried unfolded: backward passes may run on other devices.
        """
        if not self._find_first_placement(warm_start) and self.arrays.folded and not self.effort.over:
            self.arrays = self.proving
            self._find_first_placement(warm_start)
        return self.devices is not None

    def _find_first_placement(self, warm_start: Assignment | None) -> bool:
        if warm_start is not None and warm_start.operations.keys() == self.arrays.graph.operations.keys():
            devices = self.arrays.devices(warm_start)
            if all((devices[unit] == devices[unit[0]]).all() for unit in self.arrays.units):
                self._offer(devices, self._homes_of(warm_start))
        infeasible = list(self._segments())
        if self.devices is None:
            infeasible += self._segments(minimise_excess=True)
        if self.devices is None:
            infeasible += self._single_devices()
        if self.devices is None:
            self._repair(infeasible)
        return self.devices is not None

    def _homes_of(self, warm_start: Assignment) -> Ints:
        """(items,) homes of shared weights that reside with one of their readers, else -1."""
        arrays, chosen = self.arrays, np.full(len(self.arrays.names), -1)
        for item in arrays.shared:
            home = warm_start.weights.get(arrays.names[item])
            readers = {warm_start.operations[name] for name in arrays.graph.readers[arrays.names[item]]}
            if home in readers and arrays.problem.topology[home].is_accelerator:
                chosen[item] = arrays.number[home]
        return chosen

    def _segments(self, *, minimise_excess: bool = False) -> Iterator[Ints]:
        """Offer contiguous segments, device classes in any order and in turn; yield those over a budget."""
        for in_order in (False, True):
            search = SegmentDP(
                self.arrays,
                self.effort,
                slowest=self.problem.balance,
                in_order=in_order,
                minimise_excess=minimise_excess,
            )
            yield from self._offer_segments(search)
            if search.complete:
                return

    def _offer_segments(self, search: SegmentDP) -> Iterator[Ints]:
        fits: list[tuple[float, Ints]] = []
        for homes in search.homes():
            for _, devices in search.placements(homes):
                if self.arrays.fits(devices):
                    fits.append((self.arrays.seconds(devices), devices))
                else:
                    yield devices
        for _, devices in sorted(fits, key=lambda pair: pair[0])[:2]:
            self._offer(devices, None, climb=not self.problem.balance)

    def _single_devices(self) -> Iterator[Ints]:
        """Offer every placement on one device; yield those over budget."""
        arrays = self.arrays
        for d in range(arrays.computing):
            devices = arrays.expand(np.full(len(arrays.units), d))
            if not self._offer(devices, None):
                yield devices

    def _repair(self, starts: list[Ints]) -> None:
        """Repair the placements that exceed the budgets least, until one fits."""
        starts.sort(key=lambda start: np.maximum(self.arrays.peaks(start) - self.arrays.room, 0.0).sum())
        untried = {key: devices for devices in starts if (key := devices.tobytes()) not in self._repaired}
        for key, devices in list(untried.items())[: PARAMS.retries]:
            self._repaired.add(key)
            with self.effort.fraction(0.25) as sub_effort:
                search = LocalSearch(self.arrays, devices, sub_effort)
                fits = search.repair()
            if fits and self._offer(search.devices, search.chosen):
                return

    def _offer(self, devices: Ints, chosen: Ints | None, *, climb: bool = True) -> bool:
        """Climb from a placement within the budgets, and keep the best; return whether it is within them."""
        arrays = self.arrays
        if not arrays.fits(devices, chosen):
            return False
        seconds = arrays.seconds(devices, chosen)
        if not np.isfinite(seconds):
            return False
        key, limit = devices.tobytes(), self.seconds * (1 + PARAMS.negligible)
        if climb and seconds < limit and key not in self._climbed:
            with self.effort.fraction(PARAMS.local_share) as sub_effort:
                search = LocalSearch(arrays, devices, sub_effort, chosen)
                search.climb()
            self._climbed |= {key, search.devices.tobytes()}
            devices, chosen, seconds = search.devices, search.chosen, search.seconds
        if seconds < self.seconds * (1 - ROUNDING):
            self.devices, self.chosen, self.seconds = devices.copy(), chosen, seconds
        return True

    # -- better placements and bounds ----------------------------------------------------------------

    @property
    def proven(self) -> bool:
        """Whether the gap is at most ``sufficient_gap``."""
        return self.bound.seconds >= self.seconds * (1 - PARAMS.sufficient_gap)

    def relax(self) -> list[Relaxation]:
        """Raise the bound by Lagrangian relaxations, one for each home of the largest shared weight."""
        if self.effort.late:
            fallback = least_seconds(self.arrays)
            self.bound = self.bound.raised(fallback.seconds, fallback.proof)
            return []
        target_bound = self.seconds * (1 - PARAMS.sufficient_gap / 2)
        with self.effort.fraction(0.5) as sub_effort:
            relaxations = relax(self.arrays, target_bound, sub_effort)
        self._proofs = relaxations
        if self.arrays.folded:
            with self.effort.fraction(0.3) as sub_effort:
                self._proofs = relax(self.proving, target_bound, sub_effort)
        self._raise_bound()
        return relaxations

    def improve(self) -> None:
        """Run wider and wider label-setting searches, until the gap is closed or the effort is spent."""
        if self.devices is None and self.effort.over:
            return  # a bound without a placement is of no use
        relaxations, width = self.relax(), 0
        still_open = relaxations
        while not self.proven and not self.effort.over:
            target_bound = self.seconds * (1 - PARAMS.sufficient_gap)
            still_open = sorted((r for r in still_open if r.bound < target_bound), key=lambda r: r.bound)
            width = self._next_width(width, still_open)
            if not width:
                break
            still_open = [r for r in still_open if not self._search(r, width)]
            self._raise_bound()
        self._exchange()
        self._enumerate(relaxations)

    def _exchange(self) -> None:
        """Improve the incumbent by exchanges, with work beyond that of the label searches, while it pays."""
        earlier = np.inf
        while self.devices is not None and not self.proven and not self.effort.late:
            if self.seconds > earlier * (1 - PARAMS.negligible):
                return
            earlier = self.seconds
            more = replace(self.effort, visits=PARAMS.exchange_effort * self.effort.total)
            search = LocalSearch(self.arrays, self.devices, more, self.chosen)
            search.exchange()
            self._offer(search.devices, search.chosen)

    def _enumerate(self, relaxations: list[Relaxation]) -> None:
        """Evaluate all placements whose relaxed seconds are below the incumbent's, if these are few."""
        max_labels = 1000 * PARAMS.completions
        for relaxation in relaxations:
            frontier = relaxation.frontier
            if self.proven or self.effort.over or relaxation.bound >= self.seconds:
                continue
            if 4.0 * max_labels * frontier.devices * len(frontier.steps) > self.effort.total:
                break
            result = search_labels(relaxation, max_labels, self.seconds, self.effort, keep_all=True)
            exact = result.exact
            for completion in result.completions:
                if completion.seconds >= self.seconds:
                    break  # the others are slower
                # unread weights may fit elsewhere than where they were tried
                exact &= self._judge((completion,)) or not self._may_fit(completion)
            if exact and self.devices is not None:
                relaxation.bound, relaxation.proof = self.seconds, _LABELS
        self._raise_bound()

    def _raise_bound(self) -> None:
        lowest = min(self._proofs, key=lambda relaxation: relaxation.bound, default=None)
        if lowest is not None:
            self.bound = self.bound.raised(lowest.bound * (1 - ROUNDING), lowest.proof)

    def _next_width(self, width: int, relaxations: list[Relaxation]) -> int:
        """Return the width of the next search, within half of the effort; 0 if that gains too little."""
        if not relaxations:
            return 0
        largest = min(max_width(relaxations[0], self.effort.visits / 2 / len(relaxations)), 20_000)
        smallest = int(width + 1 if width else PARAMS.first_width / PARAMS.width_growth)
        if largest < smallest:
            return 0 if self.devices is not None else smallest
        return min(largest, int(max(width, PARAMS.first_width) * PARAMS.width_growth))

    def _search(self, relaxation: Relaxation, width: int) -> bool:
        """Search labels, with margins if peaks exceed a budget; return whether the width dropped none."""
        margin, exact = np.zeros(self.arrays.computing), True
        for attempt in range(1 + PARAMS.retries):
            incumbent_seconds = self.seconds * (1 if attempt else 1 - ROUNDING)
            result = search_labels(relaxation, width, incumbent_seconds, self.effort, margin)
            exact &= result.exact
            if not attempt and result.bound > relaxation.bound:
                relaxation.bound, relaxation.proof = result.bound, _LABELS
            if not result.completions or self._judge(result.completions) or self.effort.over:
                break
            if self.devices is None:
                self._repair([self._expand(completion)[0] for completion in result.completions])
            peaks = self.arrays.peaks(*self._expand(result.completions[0]))
            margin += np.maximum(peaks - self.arrays.room, 0.0)
        return exact

    def _judge(self, completions: tuple[Completion, ...]) -> bool:
        """Offer completions, the fastest first, until one is within the budgets; return whether one is."""
        for completion in completions:
            devices, chosen = self._expand(completion)
            self.effort.charge(10.0 * self.arrays.count)
            if self._offer(devices, chosen):
                return True
        return False

    def _may_fit(self, completion: Completion) -> bool:
        """Whether a completion might fit with other homes of unread weights."""
        arrays = self.arrays
        if not arrays.unread:
            return False
        return bool((arrays.read_peaks(*self._expand(completion)) <= arrays.room).all())

    def _expand(self, completion: Completion) -> tuple[Ints, Ints]:
        arrays = self.arrays
        chosen, units = np.full(len(arrays.names), -1), len(arrays.units)
        chosen[arrays.shared] = completion.device[units:]
        return arrays.expand(completion.device[:units]), chosen

    # -- head-room -----------------------------------------------------------------------------------

    def balance(self) -> None:
        """Find more head-room among placements that are slower by at most ``sufficient_gap``."""
        assert self.devices is not None
        max_seconds = self.seconds * (1 + PARAMS.sufficient_gap)
        with self.effort.fraction(PARAMS.local_share) as sub_effort:
            search = LocalSearch(self.arrays, self.devices, sub_effort, self.chosen)
            search.balance(max_seconds)
        self.devices, self.chosen, self.seconds = search.devices, search.chosen, search.seconds

    # -- the answer ----------------------------------------------------------------------------------

    @property
    def beyond_fastest(self) -> float:
        """The incumbent's compute seconds beyond those of each operation on its fastest device."""
        if self.devices is None:
            return 0.0
        compute = self.arrays.compute
        return float((compute[self.devices, np.arange(self.arrays.count)] - compute.min(axis=0)).sum())

    def evaluation(self) -> Evaluation | None:
        """Return the evaluation of the best placement; None if there is none."""
        if self.devices is None:
            return None
        arrays = self.arrays
        units = np.array([self.devices[members[0]] for members in arrays.units], dtype=np.int64)
        return evaluate(self.problem, arrays.assignment(arrays.expand(units), self.chosen))
