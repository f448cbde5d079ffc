"""Place several calls of one model over one placement of its weights.

A prefill and a decode, say, run over the same weights, and each must keep every budget. What is
minimised is the sum of their seconds, each times its weight. The call that counts most is placed first, and
settles where its weights live; the others follow. It is so once within the budgets, and once beside room for
the activations of the others, which a prefill has more of. What is found is improved by exchanging weights
between devices; in the best, each call is placed once more over the weights as they are.
Every call is judged by the evaluator, with all weights where they are, and with the prefetch buffers that all
calls share. The bound is the weighted sum of each call's own: alone, none is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from graphplan.devices.topology import DeviceKey, Topology
from graphplan.errors import InfeasibleError
from graphplan.ir.constraints import Constraints
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds.relaxation import least_seconds
from graphplan.passes.placement.calls.exchange import exchange, weighted_seconds
from graphplan.passes.placement.calls.shared_buffers import beside, evaluate_together, fit_together, within
from graphplan.passes.placement.certificate import Bound, Solution, certify
from graphplan.passes.placement.constrain import constrain
from graphplan.passes.placement.driver import (
    attempt,
    bound_with_offload,
    holds_for,
    is_searched,
    place,
    probe,
)
from graphplan.passes.placement.evaluate import Evaluation
from graphplan.passes.placement.infeasible import smallest_budgets
from graphplan.passes.placement.params import PARAMS, Effort, Limits
from graphplan.passes.placement.problem import Problem

Find = Callable[[Problem], Evaluation | None]


@dataclass(frozen=True, slots=True)
class Call:
    """One call among several.

    Attributes:
        problem: what to place, without the caller's rules.
        constraints: those rules, as far as they name what this call runs.
        weight: how much its seconds count.
    """

    problem: Problem
    constraints: Constraints
    weight: float

    def with_homes(self, homes: Mapping[str, DeviceKey]) -> Problem:
        """The problem with the caller's rules, and with weights that have a home already."""
        known = {name: key for name, key in homes.items() if name in self.problem.graph.weights}
        fixed = {**known, **self.problem.fixed_weights}
        return constrain(replace(self.problem, fixed_weights=fixed), self.constraints)

    def on(self, topology: Topology) -> Call:
        """The same call on other devices; where one has more room, prefetch buffers may grow by as much."""
        before = self.problem.topology
        growth = {
            key: limit + topology[key].room - before[key].room
            for key, limit in self.problem.prefetch_limits.items()
        }
        return replace(self, problem=replace(self.problem, topology=topology, prefetch_limits=growth))

    def read(self) -> set[str]:
        """The weights whose data it reads."""
        graph = self.problem.graph
        return {name for name in graph.weights if graph.readers.get(name)}


def place_jointly(
    calls: Sequence[Call],
    limits: Limits = Limits(),  # noqa: B008  # frozen
    *,
    near: Sequence[Assignment] | None = None,
) -> tuple[Solution, ...]:
    """A placement of each call, in order, all over the same homes of weights.

    Weights of one name are one weight; every call's graph names all of them.

    Args:
        calls: what to place.
        limits: as in :func:`graphplan.passes.placement.driver.place`.
        near: an assignment of each call to start from as well, all over the same homes of weights.

    Raises:
        InfeasibleError: a call fits in no way, or no way was found in which all of them do.
    """
    calls = [replace(call, problem=replace(call.problem, further_calls=len(calls) > 1)) for call in calls]
    problems, weights = [call.with_homes(_pinned(calls)) for call in calls], [call.weight for call in calls]
    known: Sequence[Assignment | None] = near or [None] * len(calls)
    part = limits.one_of(4 * len(calls))
    part = replace(part, effort=part.effort * PARAMS.call_effort)
    alone = [place(problem, part, near=one) for problem, one in zip(problems, known, strict=True)]

    def find(problem: Problem) -> Evaluation | None:
        solution = attempt(problem, replace(part, proves=False), None)
        return probe(problem, deadline=limits.deadline) if solution is None else solution.evaluation

    starts: list[list[Evaluation]] = []
    if near is not None and _feasible(known_together := fit_together(problems, near)):
        starts.append(known_together)
    evaluations = [solution.evaluation for solution in alone]
    for number, start in enumerate(_starts(calls, evaluations, find)):
        if start is not None and _feasible(start):
            starts.append(start)
        if starts and (number or limits.over):
            break  # the others are for budgets that are hard to keep
    if not starts:
        raise _infeasible(calls, limits)
    exchanged = [exchange(problems, weights, start, limits.one_of(2 * len(starts))) for start in starts]
    best = min(exchanged, key=partial(weighted_seconds, weights))
    if not limits.over:
        best = _placed_again(calls, best, part)
    return tuple(
        certify(found, _bound(problem, found, solo, limits))
        for problem, found, solo in zip(problems, best, alone, strict=True)
    )


def _bound(problem: Problem, found: Evaluation, solo: Solution, limits: Limits) -> Bound:
    """Alone, no call is slower; but one that fits the accelerators alone may be offloaded beside others."""
    if holds_for(solo.bound.scope, problem, found):
        bound = solo.bound
    elif is_searched(problem, found):
        bound = bound_with_offload(problem, found.seconds, limits)
    else:
        bound = least_seconds(Arrays(problem))
    return replace(bound, proof=f"these inputs alone: {bound.proof}")


def _pinned(calls: Sequence[Call]) -> dict[str, DeviceKey]:
    """Homes that the caller, or an earlier plan, has given."""
    return {name: key for call in calls for name, key in call.with_homes({}).fixed_weights.items()}


def _feasible(found: Sequence[Evaluation]) -> bool:
    return all(one.feasible for one in found)


def _starts(
    calls: Sequence[Call], alone: Sequence[Evaluation], find: Find
) -> Iterator[list[Evaluation] | None]:
    """What comes of letting one call go first, with and without room for the others; and of streaming all."""
    pinned = _pinned(calls)
    heaviest = sorted(range(len(calls)), key=lambda index: -calls[index].weight * alone[index].seconds)
    for first in heaviest:
        order = [first, *(index for index in heaviest if index != first)]
        yield _in_turn(calls, order, pinned, alone[first], find)
        problem = calls[first].with_homes(pinned)
        smaller = _with_room(problem, alone[first], [alone[index] for index in order[1:]])
        found = find(smaller) if smaller.topology != problem.topology else None
        yield _in_turn(calls, order, pinned, found, find) if found is not None else None
    problem = calls[0].with_homes(pinned)
    cpu = problem.topology.cpu
    if cpu is not None and problem.offload:
        streamable = frozenset.intersection(*(call.problem.graph.streamable for call in calls))
        yield _in_turn(calls, heaviest, {**dict.fromkeys(streamable, cpu), **pinned}, None, find)


def _with_room(problem: Problem, own: Evaluation, others: Sequence[Evaluation]) -> Problem:
    """The problem of one call, beside what other calls need more than it for activations of accelerators."""
    memory = {}
    for spec in problem.topology.devices:
        needs = [one.peak(spec.key).nbytes - one.peak(spec.key).weights for one in (own, *others)]
        more = max(needs) - needs[0] if spec.is_accelerator else 0
        memory[spec.key] = max(0, spec.memory - more)
    return replace(problem, topology=problem.topology.with_memory(memory))


def _in_turn(
    calls: Sequence[Call],
    order: Sequence[int],
    homes: Mapping[str, DeviceKey],
    first: Evaluation | None,
    find: Find,
) -> list[Evaluation] | None:
    """Place calls in this order, each over the weights that those before it have settled.

    ``homes`` are settled before; ``first`` is a placement of the first in order.
    """
    with_homes, placed = dict(homes), dict[int, Evaluation]()
    for index in order:
        found = first if index == order[0] else None
        found = found or find(beside(calls[index].with_homes(with_homes), list(placed.values())))
        if found is None:
            return None
        placed[index] = found
        with_homes |= {name: found.assignment.weights[name] for name in calls[index].read()}
    for found in placed.values():  # what none of them reads
        with_homes = {**found.assignment.weights, **with_homes}
    assignments = [placed[index].assignment for index in range(len(calls))]
    return fit_together(
        [call.with_homes(with_homes) for call in calls],
        [replace(one, weights={name: with_homes[name] for name in one.weights}) for one in assignments],
    )


def _placed_again(calls: Sequence[Call], found: Sequence[Evaluation], limits: Limits) -> list[Evaluation]:
    """Each call's own search once more, with all weights where they are."""
    best = list(found)
    problems = [call.with_homes(found[0].assignment.weights) for call in calls]
    for index, problem in enumerate(problems):
        others = [one for one in best if one is not best[index]]
        near = best[index].assignment  # which is feasible, so something is found
        again = place(within(problem, others), replace(limits, proves=False), near=near).evaluation
        trial = [one.assignment for one in best]
        trial[index] = again.assignment
        judged = evaluate_together(problems, trial)
        if again.seconds < best[index].seconds and _feasible(judged):
            best = judged
    return best


def _infeasible(calls: Sequence[Call], limits: Limits) -> InfeasibleError:
    """Each call fits alone: which growth of all budgets would do for all of them."""
    said = (
        f"no placement of the weights was found that keeps the budgets for all {len(calls)} of calls=, "
        "though each fits alone"
    )
    problem = calls[0].problem
    nearest = None
    if limits.advises:
        effort = Limits(limits.deadline).work(sum(len(call.problem.graph.operations) for call in calls))
        nearest = smallest_budgets(problem, effort, lambda one, left: _probed(calls, one, left))
    if nearest is None:
        return InfeasibleError(said)
    available = problem.topology.budgets
    return InfeasibleError(
        f"{said}. Budgets that would do: max_memory={dict(nearest.budgets)}; the given ones are {available}",
        needed=nearest.budgets,
        available=available,
    )


def _probed(calls: Sequence[Call], problem: Problem, effort: Effort) -> Evaluation | None:
    """The first call's placement on the problem's devices, with the highest peaks of all calls."""
    grown = [call.on(problem.topology) for call in calls]
    alone = [probe(call.with_homes(_pinned(grown)), effort) for call in grown]
    possible = [found for found in alone if found is not None]
    if len(possible) < len(calls):
        return None
    starts = _starts(grown, possible, lambda one: probe(one, effort))
    found = next((start for start in starts if start and _feasible(start)), None)
    if found is None:
        return None
    peaks = {
        key: max((one.peak(key) for one in found), key=lambda p: p.nbytes) for key in problem.topology.keys
    }
    return replace(found[0], highest=peaks)
