"""Find the bottleneck of a plan: plan again with larger budgets, and with faster links and devices.

These searches start from the plan. Together they take about as much effort as the plan itself did, a third of
it for the answer: its gain is close to that of a new plan, the gains of the others are lower
bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from tqdm.auto import tqdm

from graphplan.analysis.plan_problem import as_if_first, plain_problem
from graphplan.analysis.sensitivity import Bottleneck, Growth, Resource
from graphplan.devices.topology import ALIGNMENT, DeviceKey, DeviceSpec, Topology
from graphplan.errors import InfeasibleError
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule import Assignment
from graphplan.ir.timeline import call_seconds
from graphplan.passes.placement.calls.joint import Call, place_jointly
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.params import Limits
from graphplan.passes.placement.residence import on_one_device
from graphplan.report.time_parts import time_parts
from graphplan.warnings import unwarned

_WORTH = 1e-3  # of the makespan: a smaller gain counts as none
_SAME = 1e-6  # of the makespan: times that differ by less are equal
_PRECISION = 0.05  # relative precision of the increase that is reported
_TWICE = 2.0
_TRIALS = 0.5  # share of a plan's effort for the first plans of all improvements
_ANSWER = 0.3  # likewise for the plan of the answer; a fraction of it for plans that narrow it down
_LOOK = 0.15  # a quick look: share of a plan's effort for all plans with more memory
_ROUGH = 0.25  # likewise: relative precision of the increase
_NARROWED = 700  # likewise: with more operations, a search for fewer bytes takes seconds


def find_bottleneck(plan: PlanData, *, progress: bool = True) -> Bottleneck:
    """Plan again with each improvement; the result depends on the plan only."""
    replanner = _Replanner(plan)
    faster = (partial(replanner.sped, *one) for one in replanner.faster())
    trials: list[Callable[[], Growth]] = [*replanner.memory(), *faster]
    replanner.share = _TRIALS / max(1, len(trials))
    # a bar that appears after a second
    bar = tqdm(trials, desc="bottleneck", delay=1, disable=not progress)
    with bar, unwarned("balance=True"):  # the plan itself has warned
        growths = sorted((trial() for trial in bar), key=lambda growth: -growth.gain)
        useful = [growth for growth in growths if growth.gain > _WORTH * plan.weighted_makespan]
        binding = [growth for growth in useful if growth.what == "memory"]
        answer = next(iter(binding or useful), None)
        if answer is not None:
            growths.remove(answer)
            answer = replanner.confirmed(answer)
            growths = sorted([*growths, answer], key=lambda growth: -growth.gain)
    parts = [(one.call_weight, time_parts(one)) for one in plan.calls]
    return Bottleneck(
        answer,
        bool(binding),
        tuple(growths),
        plan.weighted_makespan,
        compute_seconds=sum(weight * sum(one.compute.values()) for weight, one in parts),
        transfer_seconds=sum(weight * one.transfers for weight, one in parts),
        streaming_seconds=sum(weight * one.streaming for weight, one in parts),
        io_seconds=sum(weight * (one.inputs + one.outputs) for weight, one in parts),
        hidden_seconds=sum(one.call_weight * one.timeline.hidden_seconds for one in plan.calls),
    )


def advice(plan: PlanData) -> str:
    """Return a sentence on a change that would save time, found quickly; empty for the method ``"hooks"``.

    More memory is tried with less search. If it saves nothing, the same schedule is timed with each link and
    each device twice as fast.
    """
    if plan.method == "hooks":
        return ""
    replanner = _Replanner(plan)
    trials = list(replanner.memory())
    replanner.share = _LOOK / max(1, len(trials))
    with unwarned("balance=True"):  # the plan itself has warned
        best = max((trial() for trial in trials), key=lambda growth: growth.gain, default=None)
        if best is not None and best.gain > _WORTH * plan.weighted_makespan:
            narrowed = len(plan.graph.operations) <= _NARROWED
            return (replanner.with_fewest_bytes(best, _ROUGH) if narrowed else best).saving
    text = "a quick look found no gain from more memory"
    fastest = _fastest(replanner)
    return text if fastest is None else f"{text}; {fastest.saving}"


def _fastest(replanner: _Replanner) -> Growth | None:
    """Return the link or device that saves most if it is twice as fast and nothing moves."""
    now, growths = replanner.now, []
    for resource, devices in replanner.faster():
        topology = replanner.topology_with_faster(resource, devices)
        seconds = sum(
            one.call_weight * call_seconds(one.graph, topology, one.schedule) for one in replanner.plan.calls
        )
        growths.append(Growth(resource, devices, (), increase=0, makespan=seconds, gain=now - seconds))
    useful = (growth for growth in growths if growth.gain > _WORTH * now)
    return max(useful, key=lambda growth: growth.gain, default=None)


@dataclass(frozen=True, slots=True)
class _Placements:
    """Placements of all calls on modified devices."""

    calls: tuple[Evaluation, ...]
    seconds: float


class _Replanner:
    """Plans again on other devices, as if no earlier plan had placed the weights.

    ``share`` is the share of a plan's effort that each trial takes.
    """

    def __init__(self, plan: PlanData) -> None:
        self.placed_before = any(one.fixed_weights for one in plan.calls)
        self.plan, self.topology = as_if_first(plan), plan.topology
        plan = self.plan
        self.calls = [Call(plain_problem(one), one.constraints, one.call_weight) for one in plan.calls]
        self.now = plan.weighted_makespan
        self.warm_starts = [one.schedule.assignment for one in plan.calls]
        self.share = 1.0

    def _place(
        self, topology: Topology, share: float | None = None, warm_starts: Sequence[Assignment] | None = None
    ) -> _Placements | None:
        """Return the placements found for these devices; None if the incomplete search finds none."""
        calls, start = [call.on(topology) for call in self.calls], warm_starts or self.warm_starts
        limits = Limits(effort=share or self.share, proves=False)
        try:
            if len(calls) == 1:
                solutions = [place(calls[0].with_homes({}), limits, warm_start=start[0])]
            else:
                solutions = list(place_jointly(calls, limits, warm_starts=start))
        except InfeasibleError:
            return None
        placed = tuple(solution.evaluation for solution in solutions)
        return _Placements(placed, sum(c.weight * one.seconds for c, one in zip(calls, placed, strict=True)))

    def _growth(
        self,
        resource: Resource,
        devices: tuple[DeviceKey, ...],
        placed: _Placements | None,
        like: tuple[DeviceKey, ...] = (),
    ) -> Growth:
        gain = 0.0 if placed is None else self.now - placed.seconds
        gain = gain if gain > _SAME * self.now and not self._is_free(placed) else 0.0
        return Growth(resource, devices, like, increase=0, makespan=self.now - gain, gain=gain)

    def _is_free(self, other: _Placements | None) -> bool:
        """Whether letting weights of earlier plans move, on unmodified devices, saves as much."""
        return other is not None and self._freed - other.seconds <= _SAME * self.now < self.now - self._freed

    @cached_property
    def _freed(self) -> float:
        """Seconds on unmodified devices if the weights of earlier plans could move."""
        placed = self._place(self.topology) if self.placed_before else None
        return self.now if placed is None else min(self.now, placed.seconds)

    def confirmed(self, answer: Growth) -> Growth:
        """Return the answer with the fewest sufficient bytes, and the gain of a plan made with them."""
        if answer.what != "memory":
            again = self.sped(answer.what, answer.devices, _ANSWER)
            return max(answer, again, key=lambda growth: growth.gain)
        fewest = self.with_fewest_bytes(answer, _PRECISION)
        placed = self._place(self._grown(self.topology[answer.devices[0]], fewest.increase), _ANSWER)
        again = self._growth("memory", answer.devices, placed, answer.like)
        best = max(fewest, again, key=lambda growth: growth.gain)
        trials = {**dict(fewest.trials), fewest.increase: best.makespan}
        return replace(best, increase=fewest.increase, trials=tuple(sorted(trials.items())))

    def with_fewest_bytes(self, answer: Growth, precision: float) -> Growth:
        """Return the answer, more memory, with the fewest sufficient bytes up to relative ``precision``."""
        spec = self.topology[answer.devices[0]]
        trials = self._narrowed(spec, answer, precision)
        fewest = min(size for size, s in trials.items() if s <= answer.makespan + _SAME * self.now)
        seconds, ordered = trials[fewest], tuple(sorted(trials.items()))
        return replace(answer, increase=fewest, makespan=seconds, gain=self.now - seconds, trials=ordered)

    # -- memory -----------------------------------------------------------------------------------

    def memory(self) -> Iterator[Callable[[], Growth]]:
        """Yield for each group of identical devices a trial with more memory on one."""
        kinds: dict[DeviceSpec, list[DeviceSpec]] = {}
        named = {*self.plan.constraints.pin.values()}
        for spec in self.topology.devices:
            special = spec.key if self.topology.links or spec.key in named else ""
            kind = replace(spec, key=special, device=spec.type, reserve=spec.withheld, taken=0)
            kinds.setdefault(kind, []).append(spec)
        for members in kinds.values():
            if members[0].computes:
                like = tuple(spec.key for spec in members[1:])
                yield partial(self._memory, members[0], like)

    def _memory(self, spec: DeviceSpec, like: tuple[DeviceKey, ...]) -> Growth:
        """Return the gain if the device holds everything that may run on it."""
        missing = self._missing(spec)
        placed = self._place(self._grown(spec, missing)) if missing else None
        growth = self._growth("memory", (spec.key,), placed, like)
        if placed is None or not growth.gain:
            return growth
        excess = _excess(spec, placed.calls)
        return replace(growth, increase=excess, trials=((excess, placed.seconds),))

    def _narrowed(self, spec: DeviceSpec, answer: Growth, precision: float) -> dict[int, float]:
        """Bisect for the fewest bytes with the answer's time; return bytes added -> seconds."""
        trials = dict(answer.trials)
        low, high, warm_starts = 0, answer.increase, self.warm_starts
        while high - low > max(ALIGNMENT, precision * high):
            middle = (low + high) // 2
            placed = self._place(self._grown(spec, middle), _ANSWER * _PRECISION, warm_starts)
            if placed is None or placed.seconds > answer.makespan + _SAME * self.now:
                trials[middle] = self.now if placed is None else min(placed.seconds, self.now)
                low = middle
                continue
            high = min(middle, max(_excess(spec, placed.calls), low + 1))
            warm_starts = [one.schedule.assignment for one in placed.calls]
            trials[high] = placed.seconds
        return trials

    def _grown(self, spec: DeviceSpec, size: int) -> Topology:
        return self.topology.with_memory({spec.key: spec.memory + size})

    def _missing(self, spec: DeviceSpec) -> int:
        """Return the bytes that the device lacks to hold everything that may run on it."""
        problems = (call.with_homes({}) for call in self.calls)
        return _excess(spec, (evaluate(one, on_one_device(one, spec.key)) for one in problems))

    # -- speed ------------------------------------------------------------------------------------

    def faster(self) -> Iterator[tuple[Resource, tuple[DeviceKey, ...]]]:
        """Yield each link and each device that is used."""
        pairs: dict[tuple[DeviceKey, DeviceKey], None] = {}
        for one in self.plan.calls:
            for copy in one.schedule.copies():
                if (copy.destination, copy.source) not in pairs:
                    pairs[copy.source, copy.destination] = None
        for pair in pairs:
            yield "link", pair
        used = {run.device for one in self.plan.calls for run in one.schedule.runs()}
        for spec in self.topology.devices:
            if spec.key in used:
                yield "speed", (spec.key,)

    def topology_with_faster(self, resource: Resource, devices: tuple[DeviceKey, ...]) -> Topology:
        """Return the devices with one link, or one device, twice as fast."""
        if resource == "link":
            source, destination = devices
            return self.topology.with_faster_link(source, destination, _TWICE)
        spec = self.topology[devices[0]]
        faster = replace(
            spec,
            flops=spec.flops * _TWICE,
            bandwidth=spec.bandwidth * _TWICE,
            overhead=spec.overhead / _TWICE,
        )
        changed = tuple(faster if one.key == spec.key else one for one in self.topology.devices)
        return replace(self.topology, devices=changed)

    def sped(self, resource: Resource, devices: tuple[DeviceKey, ...], share: float | None = None) -> Growth:
        """Return the gain of a plan for a faster device or link."""
        placed = self._place(self.topology_with_faster(resource, devices), share)
        return self._growth(resource, devices, placed)


def _excess(spec: DeviceSpec, calls: Iterable[Evaluation]) -> int:
    """Return the bytes by which placements of all calls exceed the device's budget."""
    return max(0, *(one.peak(spec.key).nbytes - spec.room for one in calls))
