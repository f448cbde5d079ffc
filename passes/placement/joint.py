"""Place several calls of one model over one placement of its weights.

A prefill and a decode, say, run over the same weights, and each must keep every budget. What is
minimised is the sum of their seconds, each times its weight. One call after the other is placed, and
settles where the weights live that nobody before it has read; each in turn goes first, and the best of
these is improved by exchanging weights between devices. Every call is judged by the evaluator, with
all weights where they are, and with the rings that all calls share. The bound is the weighted sum of each
call's own: alone, none is slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from graphplan.devices.topology import DeviceKey, Topology
from graphplan.errors import InfeasibleError
from graphplan.ir.constraints import Wishes
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.certificate import Bound, Solution, certify
from graphplan.passes.placement.constrain import constrain
from graphplan.passes.placement.driver import bound_with_offload, holds_for, place, sketch
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.exchange import exchange
from graphplan.passes.placement.limits import Limits
from graphplan.passes.placement.params import SearchParams
from graphplan.passes.placement.problem import Problem, cpu_key
from graphplan.passes.placement.residence import reside
from graphplan.passes.placement.shared_buffers import beside, evaluate_together, fit_together, within

__all__ = ["Call", "place_jointly"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call among several.

    Attributes:
        problem: what to place, without the caller's rules.
        wishes: those rules, as far as they name what this call runs.
        weight: how much its seconds count.
    """

    problem: Problem
    wishes: Wishes
    weight: float

    def settled(self, homes: Mapping[str, DeviceKey]) -> Problem:
        """The problem with the caller's rules, and with weights that have a home already."""
        known = {name: key for name, key in homes.items() if name in self.problem.graph.weights}
        fixed = {**known, **self.problem.fixed_weights}
        return constrain(replace(self.problem, fixed_weights=fixed), self.wishes)

    def on(self, topology: Topology) -> Call:
        """The same call on other devices; where one has more room, rings may grow by as much."""
        before = self.problem.topology
        growth = {
            key: limit + topology[key].room - before[key].room for key, limit in self.problem.growth.items()
        }
        return replace(self, problem=replace(self.problem, topology=topology, growth=growth))

    def read(self) -> list[str]:
        """The weights whose data it reads."""
        graph = self.problem.graph
        working = (operation for operation in graph.operations.values() if not operation.host_only)
        inputs = {name for operation in working for name in operation.inputs}
        return [name for name in graph.weights if name in inputs]


def place_jointly(
    calls: Sequence[Call],
    limits: Limits = Limits(),  # noqa: B008  # frozen
    *,
    near: Sequence[Assignment] | None = None,
    advise: bool = True,
) -> tuple[Solution, ...]:
    """A placement of each call, in order, all over the same homes of weights.

    Weights of one name are one weight; every call's graph names all of them.

    Args:
        calls: what to place.
        limits: as in :func:`graphplan.passes.placement.driver.place`.
        near: an assignment of each call to start from as well, all over the same homes of weights.
        advise: whether an error says which budgets would do, which takes many searches.

    Raises:
        InfeasibleError: a call fits in no way, or no way was found in which all of them do.
    """
    pinned = _pinned(calls)
    known: Sequence[Assignment | None] = near or [None] * len(calls)
    alone = [
        place(call.settled(pinned), limits.until(1 / (2 * len(calls))), near=one)
        for call, one in zip(calls, known, strict=True)
    ]
    problems, weights = [call.settled(pinned) for call in calls], [call.weight for call in calls]
    starts = [*_search(calls, pinned, alone, limits), *_all_streamed(calls, pinned, limits)]
    if near is not None:
        start = fit_together(problems, near)
        starts += [start] if all(found.feasible for found in start) else []
    if not starts:
        raise _infeasible(calls, advise=advise)
    part = limits.until(1 / (2 * len(starts)))
    exchanged = [exchange(problems, weights, start, part) for start in starts]
    fastest = min(exchanged, key=lambda found: _total(calls, found))
    best = _polished(calls, fastest, limits)
    return tuple(
        certify(found, _bound(problem, found, solo, limits))
        for problem, found, solo in zip(problems, best, alone, strict=True)
    )


def _bound(problem: Problem, found: Evaluation, solo: Solution, limits: Limits) -> Bound:
    """Alone, no call is slower; but one that fits the accelerators alone may be offloaded beside others."""
    if holds_for(solo, problem, found):
        return Bound(solo.lower_bound, f"this call alone: {solo.proof}")
    bound = bound_with_offload(problem, found.seconds, limits)
    return replace(bound, proof=f"this call alone: {bound.proof}")


def _pinned(calls: Sequence[Call]) -> dict[str, DeviceKey]:
    """Homes that the caller, or an earlier plan, has given."""
    return {name: key for call in calls for name, key in call.settled({}).fixed_weights.items()}


def _total(calls: Sequence[Call], found: Sequence[Evaluation]) -> float:
    return sum(call.weight * one.seconds for call, one in zip(calls, found, strict=True))


def _search(
    calls: Sequence[Call], pinned: Mapping[str, DeviceKey], alone: Sequence[Solution], limits: Limits
) -> Iterator[list[Evaluation]]:
    """What comes of letting each call go first, the others in order of what they weigh."""
    seconds = [c.weight * solo.evaluation.seconds for c, solo in zip(calls, alone, strict=True)]
    heaviest = sorted(range(len(calls)), key=lambda index: -seconds[index])
    for first in heaviest:
        order = [first, *(index for index in heaviest if index != first)]
        found = _InOrder(calls, order, pinned, alone, limits).run()
        if found is not None:
            yield found


def _all_streamed(
    calls: Sequence[Call], pinned: Mapping[str, DeviceKey], limits: Limits
) -> Iterator[list[Evaluation]]:
    """All weights in CPU memory, as far as they may be; the exchange then brings some to accelerators."""
    problem = calls[0].settled(pinned)
    cpu = cpu_key(problem.topology)
    if cpu is None or not problem.offload or not any(s.is_accelerator for s in problem.topology.devices):
        return
    streamable = frozenset.intersection(*(call.problem.graph.streamable for call in calls))
    homes = {**dict.fromkeys(sorted(streamable), cpu), **pinned}
    problems = [call.settled(homes) for call in calls]
    found: list[Evaluation] = []
    for one in problems:
        placed = sketch(beside(one, found), limits)
        if placed is None:
            return
        found.append(placed)
    judged = fit_together(problems, [one.assignment for one in found])
    if all(one.feasible for one in judged):
        yield judged


class _InOrder:
    """Place calls one after the other; where one lacks room, the others leave more."""

    def __init__(
        self,
        calls: Sequence[Call],
        order: Sequence[int],
        pinned: Mapping[str, DeviceKey],
        alone: Sequence[Solution],
        limits: Limits,
    ) -> None:
        self.calls, self.order, self.pinned, self.alone = calls, order, pinned, alone
        self.limits = limits
        self.spare: list[dict[DeviceKey, int]] = [{} for _ in calls]

    def run(self) -> list[Evaluation] | None:
        for _ in range(2 * SearchParams().retries):
            found = self._round()
            if found is not None:
                return found
            if not any(self.spare):
                return None
        return None

    def _round(self) -> list[Evaluation] | None:
        homes = dict(self.pinned)
        placed: dict[int, Evaluation] = {}
        for index in self.order:
            found = self._place(index, homes, list(placed.values()))
            if found is None:
                return None
            placed[index] = found
            chosen = found.schedule.assignment.weights
            homes.update({name: chosen[name] for name in self.calls[index].read()})
        for found in placed.values():  # what none of them reads
            homes = {**found.schedule.assignment.weights, **homes}
        return self._judge([placed[index] for index in range(len(self.calls))], homes)

    def _place(
        self, index: int, homes: Mapping[str, DeviceKey], placed: Sequence[Evaluation]
    ) -> Evaluation | None:
        problem = beside(_leaving(self.calls[index].settled(homes), self.spare[index]), placed)
        if index == self.order[0] and not self.spare[index]:
            return self.alone[index].evaluation
        if index != self.order[0] and not set(self.calls[index].read()) - set(homes):
            natural = evaluate(problem, _beside_weights(problem, homes))
            if natural.excess:  # no search for this call makes room for what others have put there
                self._make_room(index, natural.excess)
                return None
        try:
            return place(problem, replace(self.limits.until(0.25), proves=False)).evaluation
        except InfeasibleError as error:
            short = {key: need - error.available[key] for key, need in error.needed.items()}
            self._make_room(index, {key: nbytes for key, nbytes in short.items() if nbytes > 0})
            return None

    def _make_room(self, index: int, excess: Mapping[DeviceKey, int]) -> None:
        for other, spare in enumerate(self.spare):
            if other != index:
                for key, nbytes in excess.items():
                    spare[key] = spare.get(key, 0) + nbytes

    def _judge(self, placed: Sequence[Evaluation], homes: Mapping[str, DeviceKey]) -> list[Evaluation] | None:
        judged = fit_together(
            [call.settled(homes) for call in self.calls],
            [_rehomed(found.schedule.assignment, homes) for found in placed],
        )
        if all(found.feasible for found in judged):
            return judged
        for index, found in enumerate(judged):
            self._make_room(index, found.excess)
        return None


def _rehomed(assignment: Assignment, homes: Mapping[str, DeviceKey]) -> Assignment:
    return replace(assignment, weights={name: homes[name] for name in assignment.weights})


def _leaving(problem: Problem, spare: Mapping[DeviceKey, int]) -> Problem:
    """The problem with budgets that leave so many more bytes free."""
    specs = (replace(s, reserve=s.reserve + spare.get(s.key, 0)) for s in problem.topology.devices)
    return replace(problem, topology=replace(problem.topology, devices=tuple(specs)))


def _beside_weights(problem: Problem, homes: Mapping[str, DeviceKey]) -> Assignment:
    """Every operation where the first of its weights lives, or the operation before it runs."""
    graph = problem.graph
    key = next(spec.key for spec in problem.topology.devices if spec.computes)
    devices: dict[str, DeviceKey] = {}
    for operation in graph.operations.values():
        weights = [homes[name] for name in operation.inputs if name in graph.weights]
        key = next((home for home in weights if problem.topology[home].computes), key)
        devices[operation.name] = key
    for group in graph.together:
        first = next(name for name in graph.operations if name in group)
        devices.update(dict.fromkeys(group, devices[first]))
    return reside(problem, problem.obey(devices))


def _polished(calls: Sequence[Call], found: Sequence[Evaluation], limits: Limits) -> list[Evaluation]:
    """Each call's own search once more, with all weights where they are."""
    polished = list(found)
    homes = found[0].schedule.assignment.weights
    problems = [call.settled(homes) for call in calls]
    for index, problem in enumerate(problems):
        others = [one for other, one in enumerate(polished) if other != index]
        near = polished[index].schedule.assignment  # which is feasible, so something is found
        again = place(within(problem, others), limits.until(1 / len(problems)), near=near).evaluation
        if again.seconds < polished[index].seconds:
            trial = [one.schedule.assignment for one in polished]
            trial[index] = again.schedule.assignment
            judged = evaluate_together(problems, trial)
            polished = judged if all(one.feasible for one in judged) else polished
    return polished


def _infeasible(calls: Sequence[Call], *, advise: bool) -> InfeasibleError:
    """Each call fits alone: the smallest growth of all budgets with which all do."""
    topology = calls[0].problem.topology
    said = (
        f"no placement of the weights was found that keeps the budgets in all {len(calls)} calls, though "
        "each of them fits alone"
    )
    if not advise:
        return InfeasibleError(said)
    precision = 1 + SearchParams().negligible
    low, step = 1.0, precision - 1
    while not _fits(calls, 1 + step) and step < 1e6:  # most lack little, and each try takes long
        low, step = 1 + step, 2 * step
    high = 1 + step
    while high / low > precision:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(calls, middle) else (middle, high)
    available = {spec.key: spec.memory for spec in topology.devices}
    needed = {spec.key: spec.memory for spec in topology.scaled(high).devices}
    return InfeasibleError(
        f"{said}. Budgets that would do: {needed}; the given ones are {available}",
        needed=needed,
        available=available,
    )


def _fits(calls: Sequence[Call], factor: float) -> bool:
    grown = [call.on(call.problem.topology.scaled(factor)) for call in calls]
    pinned = _pinned(grown)
    alone = [sketch(call.settled(pinned)) for call in grown]
    if any(found is None for found in alone):
        return False
    known = [Solution(found, 0.0, "") for found in alone if found is not None]
    return next(_search(grown, pinned, known, Limits(effort=0.2)), None) is not None
