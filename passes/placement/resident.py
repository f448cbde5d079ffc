"""The search where nothing is streamed: segments, local search, labels and bounds, on flat arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.arrays import Arrays, Floats, Ints
from graphplan.passes.placement.certificate import Bound
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.frontier import Frontier, make_stages
from graphplan.passes.placement.label_dp import Completion, search_labels
from graphplan.passes.placement.local_search import LocalSearch
from graphplan.passes.placement.params import Effort
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.relaxation import Buffers, Relaxation
from graphplan.passes.placement.segment_dp import SegmentDP
from graphplan.passes.placement.symmetry import device_classes

__all__ = ["ResidentSearch"]

_RELAXED = "Lagrangian relaxation"
_LABELS = "label-setting search"


@dataclass(slots=True)
class _Case:
    """A relaxation with the home of the largest shared weight settled, and how wide it was searched."""

    relaxation: Relaxation
    bound: float = 0.0
    width: int = 0
    proof: str = _RELAXED


@dataclass(slots=True)
class ResidentSearch:
    """Places a problem without streaming.

    Attributes:
        problem: whose weights reside with their readers.
        effort: what is charged.
        devices: (operations,) the best placement so far; None where there is none.
        chosen: (items,) homes of shared weights in it.
        seconds: of it.
        bound: on every placement of the problem.
    """

    problem: Problem
    effort: Effort
    devices: Ints | None = None
    chosen: Ints | None = None
    seconds: float = np.inf
    bound: Bound = field(default_factory=Bound)
    arrays: Arrays = field(init=False)
    _climbed: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.arrays = Arrays(self.problem, self.effort.params)

    # -- a first placement ---------------------------------------------------------------------------

    def begin(self, near: Assignment | None = None) -> bool:
        """Find a placement within the budgets, by segments and repair; whether there is one."""
        if near is not None and near.operations.keys() == self.arrays.graph.operations.keys():
            self._offer(self.arrays.devices(near), self._homes_of(near))
        infeasible = list(self._segments())
        if self.devices is None:
            infeasible += self._segments(loose=True)
        if self.devices is None:
            infeasible += self._alone()
        if self.devices is None:
            self._repair(infeasible)
        return self.devices is not None

    def _homes_of(self, near: Assignment) -> Ints:
        """The homes of shared weights, where these reside with one of their readers."""
        arrays, chosen = self.arrays, np.full(len(self.arrays.names), -1)
        for item in arrays.shared:
            home = near.weights.get(arrays.names[item])
            readers = {near.operations[name] for name in arrays.graph.readers[arrays.names[item]]}
            if home in readers and arrays.problem.topology[home].is_accelerator:
                chosen[item] = arrays.number[home]
        return chosen

    def _segments(self, *, loose: bool = False) -> Iterator[Ints]:
        """Offer contiguous segments; what passes a budget is left for repair."""
        search = SegmentDP(self.arrays, self.effort, slowest=self.problem.balance, loose=loose)
        if not search.classes:
            return
        fits: list[tuple[float, Ints]] = []
        for homes in search.homes():
            for _, devices in search.placements(homes):
                if self.arrays.fits(devices):
                    fits.append((self.arrays.seconds(devices), devices))
                else:
                    yield devices
        for _, devices in sorted(fits, key=lambda pair: pair[0])[:2]:
            self._offer(devices, None, climb=not self.problem.balance)

    def _alone(self) -> Iterator[Ints]:
        """Everything on one device."""
        arrays = self.arrays
        for d in range(arrays.computing):
            units = np.full(len(arrays.units), d)
            for unit, members in enumerate(arrays.units):
                able = np.flatnonzero(np.isfinite(arrays.compute[:, members]).all(axis=1))
                if len(able) and d not in able:
                    units[unit] = able[0]
            devices = arrays.expand(units)
            if not self._offer(devices, None):
                yield devices

    def _repair(self, starts: list[Ints]) -> None:
        """Mend those that pass the budgets by least."""
        starts.sort(
            key=lambda devices: float(np.maximum(self.arrays.peaks(devices) - self.arrays.room, 0.0).sum())
        )
        for devices in starts[: self.effort.params.retries]:
            part = self.effort.share(0.25)
            search = LocalSearch(self.arrays, devices, part)
            fits = search.repair()
            self.effort.spent(part)
            if fits and self._offer(search.devices, search.chosen):
                return

    def _offer(self, devices: Ints, chosen: Ints | None, *, climb: bool = True) -> bool:
        """Keep a placement if it is the best within the budgets; whether it is within them."""
        arrays = self.arrays
        if not arrays.fits(devices, chosen):
            return False
        seconds = arrays.seconds(devices, chosen)
        if not np.isfinite(seconds):
            return False
        key = devices.tobytes()
        if climb and seconds < self.seconds * 1.02 and key not in self._climbed:
            part = self.effort.share(self.effort.params.local_share)
            search = LocalSearch(arrays, devices, part, chosen)
            search.climb()
            self.effort.spent(part)
            self._climbed |= {key, search.devices.tobytes()}
            devices, chosen, seconds = search.devices, search.chosen, search.seconds
        if seconds < self.seconds * (1 - 1e-12):
            self.devices, self.chosen, self.seconds = devices.copy(), chosen, seconds
        return True

    # -- better placements and bounds ----------------------------------------------------------------

    @property
    def proven(self) -> bool:
        """Whether the gap is small enough to end."""
        return self.bound.seconds >= self.seconds * (1 - self.effort.params.sufficient_gap)

    def relax(self) -> list[_Case]:
        """Raise the bound by Lagrangian relaxations, one for each home of the largest shared weight."""
        params, cases = self.effort.params, self._cases()
        enough = self.seconds * (1 - params.sufficient_gap / 2) if np.isfinite(self.seconds) else np.inf
        for number, case in enumerate(cases):
            part = self.effort.share(0.5 / (len(cases) - number))
            case.relaxation.improve(enough, part)
            self.effort.spent(part)
            case.bound = case.relaxation.bound * (1 - 1e-9)
        self._raise(cases)
        return cases

    def improve(self) -> None:
        """Label-setting searches, wider and wider, until the gap is closed or the effort is spent."""
        if self.devices is None and self.effort.over:
            return  # no bound is asked for
        params, cases = self.effort.params, self.relax()
        while not self.proven and not self.effort.over:
            open_cases = [case for case in cases if case.bound < self.seconds * (1 - params.sufficient_gap)]
            if not open_cases:
                break
            case = min(open_cases, key=lambda case: (case.width, case.bound))
            if not self._widen(case, len(open_cases)):
                break
            self._raise(cases)
        self._enumerate(cases)

    def _enumerate(self, cases: list[_Case]) -> None:
        """Judge all placements whose relaxed seconds are below the best, where these are few."""
        most = 1000 * self.effort.params.completions
        for case in cases:
            frontier = case.relaxation.frontier
            if self.proven or self.effort.over or case.bound >= self.seconds:
                continue
            if 4.0 * most * frontier.devices * len(frontier.steps) > self.effort.total:
                return
            found = search_labels(case.relaxation, most, self.seconds, self.effort, every=True)
            for completion in found.completions:
                if completion.seconds >= self.seconds:
                    break  # the others are slower
                self._judge((completion,))
            if found.exact and self.devices is not None:
                case.bound, case.proof = self.seconds * (1 - 1e-9), _LABELS
        self._raise(cases)

    def _raise(self, cases: list[_Case]) -> None:
        least = min(cases, key=lambda case: case.bound, default=None)
        if least is not None:
            self.bound = self.bound.raised(least.bound, least.proof)

    def _cases(self) -> list[_Case]:
        """A relaxation for each home of the largest shared weight, one of each class of devices."""
        arrays, params = self.arrays, self.effort.params
        frontier = Frontier(arrays)
        sizes = [arrays.weight_bytes[item - arrays.values] for item in frontier.shared]
        least = params.negligible * float(arrays.weight_bytes.sum())
        if not sizes or max(sizes) < least:
            return [self._case(frontier)]
        frontier = Frontier(arrays, first=int(np.argmax(sizes)))
        step = frontier.steps[0]
        able = [members[0] for members in device_classes(arrays) if np.isfinite(step.seconds[members[0]])]
        homes = [home for home in able if max(sizes) <= arrays.room[home]]
        return [self._case(frontier.with_first(home)) for home in homes]

    def _case(self, frontier: Frontier) -> _Case:
        return _Case(Relaxation(frontier, make_stages(frontier, self.effort), Buffers.none(frontier.devices)))

    def _widen(self, case: _Case, cases: int) -> bool:
        """Search a case wider than before, with margins where peaks pass a budget; False if it cannot."""
        params, relaxation = self.effort.params, case.relaxation
        frontier = relaxation.frontier
        each = (
            self.effort.visits / 2 / cases / len(frontier.steps)
        )  # visits for a step, as labels charge them
        widest = int(min((each - 1500.0 - 600.0 * frontier.devices) / (4.0 * frontier.devices), 20_000))
        width = min(widest, int(max(case.width, params.first_width) * params.width_growth))
        least = 1.5 * case.width if case.width else params.first_width / params.width_growth
        if width < least and self.devices is not None:
            return False
        width = max(width, int(least))
        case.width = width
        margin = np.zeros(self.arrays.computing)
        for attempt in range(1 + params.retries):
            below = self.seconds * (1 if attempt else 1 - 1e-9)
            found = search_labels(relaxation, width, below, self.effort, margin, estimates=bool(attempt))
            if not attempt and found.bound > case.bound:
                case.bound, case.proof = found.bound * (1 - 1e-9), _LABELS
            if not found.completions or self._judge(found.completions) or self.effort.over:
                break
            if self.devices is None:
                self._repair([self._expand(completion)[0] for completion in found.completions])
            devices, chosen = self._expand(found.completions[0])
            if attempt:  # the first time, counting live values may be enough
                margin += 1.05 * np.maximum(self.arrays.peaks(devices, chosen) - self.arrays.room, 0.0)
        return True

    def _judge(self, completions: tuple[Completion, ...]) -> bool:
        """Offer what labels propose, the fastest first; whether one is within the budgets."""
        for completion in completions:
            devices, chosen = self._expand(completion)
            self.effort.charge(10.0 * self.arrays.count)
            if self._offer(devices, chosen):
                return True
        return False

    def _expand(self, completion: Completion) -> tuple[Ints, Ints]:
        arrays = self.arrays
        chosen, units = np.full(len(arrays.names), -1), len(arrays.units)
        chosen[arrays.shared] = completion.device[units:]
        return arrays.expand(completion.device[:units]), chosen

    # -- head-room -----------------------------------------------------------------------------------

    def balance(self) -> None:
        """Among placements of the same seconds within a tenth of a percent, one with more head-room."""
        if self.devices is None or self.problem.balance:
            return
        most = self.seconds * (1 + self.effort.params.sufficient_gap)
        devices, chosen = self.devices, self.chosen
        if sum(spec.is_accelerator for spec in self.arrays.specs) > 1:
            devices, chosen = self._roomier_segments(most, devices, chosen)
        part = self.effort.share(self.effort.params.local_share)
        search = LocalSearch(self.arrays, devices, part, chosen)
        search.balance(most)
        self.effort.spent(part)
        self.devices, self.chosen, self.seconds = search.devices, search.chosen, search.seconds

    def _roomier_segments(self, most: float, devices: Ints, chosen: Ints | None) -> tuple[Ints, Ints | None]:
        """By bisection, segments within the smallest share of all budgets that take no longer."""
        room = self.arrays.room.copy()
        low, high = 0.0, self._fullness(self.arrays.peaks(devices, chosen))
        try:
            for _ in range(6):
                if self.effort.over or high - low < 0.02:
                    break
                middle = (low + high) / 2
                self.arrays.room = room * middle
                found = self._fastest_segments(most)
                if found is None:
                    low = middle
                else:
                    devices, chosen, high = found, None, self._fullness(self.arrays.peaks(found), room)
        finally:
            self.arrays.room = room
        return devices, chosen

    def _fullness(self, peaks: Floats, room: Floats | None = None) -> float:
        share = peaks / np.maximum(self.arrays.room if room is None else room, 1.0)
        return float(max(x for x, spec in zip(share, self.arrays.specs, strict=True) if spec.is_accelerator))

    def _fastest_segments(self, most: float) -> Ints | None:
        search = SegmentDP(self.arrays, self.effort)
        for homes in search.homes():
            for _, devices in search.placements(homes):
                if self.arrays.fits(devices) and self.arrays.seconds(devices) <= most:
                    return devices
        return None

    # -- the answer ----------------------------------------------------------------------------------

    def evaluation(self) -> Evaluation | None:
        """The best placement, judged by the evaluator; None where there is none."""
        if self.devices is None:
            return None
        arrays = self.arrays
        units = np.array([self.devices[members[0]] for members in arrays.units], dtype=np.int64)
        return evaluate(self.problem, arrays.assignment(arrays.expand(units), self.chosen))
