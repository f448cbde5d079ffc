"""What holds a plan back: each budget grown, each link and device twice as fast, and planned again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from tqdm.auto import tqdm

from graphplan.cost import move_seconds
from graphplan.device import DeviceKey, DeviceSpec, Link, Topology
from graphplan.errors import InfeasibleError
from graphplan.passes.evaluate import Problem, evaluate
from graphplan.passes.joint import Call, place_jointly
from graphplan.passes.place import place
from graphplan.passes.residence import reside
from graphplan.visualize import size_text, table_lines, time_text

if TYPE_CHECKING:
    from graphplan.placement import Plan

__all__ = ["Bottleneck", "Growth", "find_bottleneck"]

_GIB = 1 << 30
_WORTH = 1e-3  # of the makespan: a smaller gain is none
_SAME = 1e-6  # of the makespan: times that differ by less are the same
_PRECISION = 0.05  # of the increase that is reported
_TWICE = 2.0


@dataclass(frozen=True, slots=True)
class Growth:
    """What more of one thing would save.

    Attributes:
        what: ``"memory"`` of a device, ``"link"`` between two, or ``"speed"`` of a device.
        devices: the key of the device, or those of the link's ends.
        like: keys of devices that are the same, for which the same holds.
        increase: bytes to add to the budget: the fewest that give the whole gain. 0 where a link or a
            device is made twice as fast.
        makespan: modelled seconds of the plan that is made then.
        gain: seconds that it saves; 0 where it saves none.
        trials: bytes added -> modelled seconds, in the order of the bytes.
    """

    what: Literal["memory", "link", "speed"]
    devices: tuple[DeviceKey, ...]
    like: tuple[DeviceKey, ...]
    increase: int
    makespan: float
    gain: float
    trials: tuple[tuple[int, float], ...] = ()

    def __str__(self) -> str:
        if self.what == "memory":
            return f"{size_text(self.increase)} more memory on {self.devices[0]!r}"
        if self.what == "link":
            return f"a link between {self.devices[0]!r} and {self.devices[1]!r} that is twice as fast"
        return f"a device {self.devices[0]!r} that is twice as fast"


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What would help a plan most.

    Attributes:
        answer: the growth that helps most: of memory, if that helps at all, since a budget can be had
            without another machine; else of a link's or a device's speed. None if nothing helps.
        binds: whether more memory would help.
        growths: everything that was tried, what helps most first.
        makespan: modelled seconds of the plan; of several calls the weighted sum, as all below.
        compute_seconds: of all operations.
        transfer_seconds: of activations between devices.
        fetch_seconds: of weights that are copied at each call.
        io_seconds: of inputs and outputs.
    """

    answer: Growth | None
    binds: bool
    growths: tuple[Growth, ...]
    makespan: float
    compute_seconds: float
    transfer_seconds: float
    fetch_seconds: float
    io_seconds: float

    @property
    def gain(self) -> float:
        """Seconds that the answer saves."""
        return 0.0 if self.answer is None else self.answer.gain

    def to_json(self) -> str:
        """All of it as JSON text."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        if self.answer is None:
            head = "nothing that was tried would save time"
        else:
            share = 100 * self.answer.gain / self.makespan
            head = f"{self.answer} would save {time_text(self.answer.gain)} ({share:.1f} %)"
            if not self.binds:
                head = f"no budget binds; {head}"
        parts = (
            f"a call takes {time_text(self.makespan)}: {time_text(self.compute_seconds)} compute, "
            f"{time_text(self.transfer_seconds)} transfers, {time_text(self.fetch_seconds)} fetched weights, "
            f"{time_text(self.io_seconds)} inputs and outputs"
        )
        rows = [
            [
                growth.what,
                " - ".join(map(str, growth.devices)),
                f"+{size_text(growth.increase)}" if growth.what == "memory" else "twice",
                time_text(growth.makespan),
                time_text(growth.gain),
                f"so on {', '.join(map(str, growth.like))}" if growth.like else "",
            ]
            for growth in self.growths
        ]
        header = ["more", "of", "by", "time", "saves", ""]
        return "\n".join([head, parts, "", *table_lines(header, rows)])


def find_bottleneck(plan: Plan, *, progress: bool = True) -> Bottleneck:
    """Plan again with more of each thing; the result depends on the plan only."""
    search = _Search(plan)
    trials: list[Callable[[], Growth]] = [*search.memory(), *search.links(), *search.speeds()]
    growths = []
    # a bar that waits a second before it shows
    with warnings.catch_warnings(), tqdm(trials, desc="bottleneck", delay=1, disable=not progress) as bar:
        warnings.filterwarnings("ignore", message="balance=True")  # the plan itself has said so
        growths = [trial() for trial in bar]
    growths.sort(key=lambda growth: -growth.gain)
    useful = [growth for growth in growths if growth.gain > _WORTH * plan.weighted_makespan]
    binding = [growth for growth in useful if growth.what == "memory"]
    answer = next(iter(binding or useful), None)
    return Bottleneck(answer, bool(binding), tuple(growths), plan.weighted_makespan, *_parts(plan))


def _parts(plan: Plan) -> tuple[float, float, float, float]:
    compute = transfers = fetches = through = 0.0
    for one in plan.calls:
        weight, topology = one.call_weight, one.topology
        specs = {spec.key: spec for spec in topology.devices}
        for run in one.schedule.runs():
            compute += weight * one.problem.seconds(one.graph.operations[run.operation], specs[run.device])
        transfers += weight * sum(move_seconds(move, topology) for move in one.transfers)
        fetches += weight * sum(move_seconds(move, topology) for move in one.fetches)
        through += weight * sum(move_seconds(move, topology) for move in one.io_transfers)
    return compute, transfers, fetches, through


class _Search:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.topology = plan, plan.topology
        self.calls = [
            Call(
                Problem(
                    one.graph,
                    one.topology,
                    one.schedule.host,
                    one.schedule.returns_to_host,
                    one.fixed_weights,
                ),
                one.wishes,
                one.call_weight,
            )
            for one in plan.calls
        ]

    def _seconds(self, topology: Topology) -> float:
        """Modelled seconds of the plan that is made for these devices."""
        calls = [call.on(topology) for call in self.calls]
        try:
            if len(calls) == 1:
                return calls[0].weight * place(calls[0].settled({})).evaluation.seconds
            solutions = place_jointly(calls)
        except InfeasibleError:  # the search is not complete, and finds nothing in other budgets
            return float("inf")
        return sum(c.weight * s.evaluation.seconds for c, s in zip(calls, solutions, strict=True))

    def _growth(
        self,
        what: Literal["memory", "link", "speed"],
        devices: tuple[DeviceKey, ...],
        seconds: float,
        like: tuple[DeviceKey, ...] = (),
    ) -> Growth:
        now = self.plan.weighted_makespan
        gain = now - seconds
        helps = gain > _SAME * now
        return Growth(what, devices, like, 0, seconds if helps else now, gain if helps else 0.0)

    # -- memory -----------------------------------------------------------------------------------

    def memory(self) -> Iterator[Callable[[], Growth]]:
        """For each kind of device, what more memory on it saves."""
        kinds: dict[object, list[DeviceSpec]] = {}
        named = {*self.plan.wishes.pin.values(), *self.plan.fixed_weights.values()}
        for spec in self.topology.devices:
            special = spec.key if self.topology.links or spec.key in named else None
            speeds = (spec.flops, spec.bandwidth, spec.overhead)
            kinds.setdefault((spec.type, spec.memory, spec.reserve, speeds, special), []).append(spec)
        for members in kinds.values():
            if members[0].computes:
                like = tuple(spec.key for spec in members[1:])
                yield lambda spec=members[0], like=like: self._memory(spec, like)  # type: ignore[misc]

    def _memory(self, spec: DeviceSpec, like: tuple[DeviceKey, ...]) -> Growth:
        whole = self._missing(spec)
        now = self.plan.weighted_makespan
        if whole <= 0:
            return self._growth("memory", (spec.key,), now, like)
        sizes = sorted({size for size in (spec.memory // 10, _GIB) if 0 < size < whole} | {whole})
        trials = {size: self._grown(spec, size) for size in sizes}
        best = min(trials.values())
        found = self._growth("memory", (spec.key,), best, like)
        if found.gain:
            self._narrow(spec, trials, best + _SAME * now)
        least = min((size for size, s in trials.items() if s <= best + _SAME * now), default=0)
        return replace(found, increase=least if found.gain else 0, trials=tuple(sorted(trials.items())))

    def _narrow(self, spec: DeviceSpec, trials: dict[int, float], enough: float) -> None:
        """Look for the fewest bytes with which the time is still that of the most."""
        high = min(size for size, seconds in trials.items() if seconds <= enough)
        low = max((size for size in trials if size < high), default=0)
        while high - low > max(512, _PRECISION * high):
            middle = (low + high) // 2
            trials[middle] = self._grown(spec, middle)
            low, high = (low, middle) if trials[middle] <= enough else (middle, high)

    def _grown(self, spec: DeviceSpec, size: int) -> float:
        return self._seconds(self.topology.with_memory({spec.key: spec.memory + size}))

    def _missing(self, spec: DeviceSpec) -> int:
        """Bytes that the device lacks to hold everything that may run on it."""
        most = 0
        for call in self.calls:
            problem = call.settled({})
            everywhere = problem.obey(dict.fromkeys(problem.graph.operations, spec.key))
            most = max(most, evaluate(problem, reside(problem, everywhere)).peak(spec.key).nbytes)
        return most - spec.room

    # -- speed ------------------------------------------------------------------------------------

    def links(self) -> Iterator[Callable[[], Growth]]:
        """For each link that is used, what one twice as fast saves."""
        used: dict[tuple[DeviceKey, DeviceKey], None] = {}
        for one in self.plan.calls:
            for move in one.schedule.moves():
                pair = (move.source, move.destination)
                if (move.destination, move.source) not in used:
                    used[pair] = None
        for pair in used:
            yield lambda pair=pair: self._link(pair)  # type: ignore[misc]

    def _link(self, pair: tuple[DeviceKey, DeviceKey]) -> Growth:
        a, b = pair
        faster = {ends: _faster(self.topology.link(*ends)) for ends in ((a, b), (b, a))}
        topology = replace(self.topology, links={**self.topology.links, **faster})
        return self._growth("link", pair, self._seconds(topology))

    def speeds(self) -> Iterator[Callable[[], Growth]]:
        """For each device that runs operations, what one twice as fast saves."""
        used = {run.device for one in self.plan.calls for run in one.schedule.runs()}
        for spec in self.topology.devices:
            if spec.key in used:
                yield lambda spec=spec: self._speed(spec)  # type: ignore[misc]

    def _speed(self, spec: DeviceSpec) -> Growth:
        faster = replace(
            spec,
            flops=spec.flops * _TWICE,
            bandwidth=spec.bandwidth * _TWICE,
            overhead=spec.overhead / _TWICE,
        )
        devices = tuple(faster if one.key == spec.key else one for one in self.topology.devices)
        return self._growth("speed", (spec.key,), self._seconds(replace(self.topology, devices=devices)))


def _faster(link: Link) -> Link:
    return Link(link.bandwidth * _TWICE, link.latency / _TWICE)
