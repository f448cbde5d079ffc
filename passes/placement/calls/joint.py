"""Place several forward passes of one model over one placement of its weights.

A prefill and a decode, for instance, use the same weights, and each must keep every budget. The objective is
the weighted sum of their seconds. The pass that counts most (weight times seconds alone) is placed first and
decides the homes of the weights that it reads; the others follow. This is done once within the budgets, and
once within budgets that leave room for the others' activations, since a prefill has more of these. The result
is improved by exchanging weights between devices; in the best, each pass is placed once more over the weights
as they are. The evaluator judges every pass with all weights and with the prefetch buffers that all passes
share. The bound of each pass is its bound alone: no joint placement is faster.
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
from graphplan.passes.placement.calls.shared_buffers import (
    evaluate_together,
    fit_together,
    with_allocated_buffers,
    with_limited_buffers,
)
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
from graphplan.passes.placement.infeasible import (
    Advice,
    everything_on_one,
    explain_infeasible,
    smallest_budgets,
    with_highest_peaks,
)
from graphplan.passes.placement.params import PARAMS, Effort, Limits
from graphplan.passes.placement.problem import Problem


@dataclass(frozen=True, slots=True)
class Call:
    """One forward pass among several.

    Attributes:
        problem: the problem, without the caller's constraints.
        constraints: the constraints that name something in this pass.
        weight: factor of its seconds in the objective.
    """

    problem: Problem
    constraints: Constraints
    weight: float

    def with_homes(self, homes: Mapping[str, DeviceKey]) -> Problem:
        """Return the problem with the caller's constraints and with these homes of weights."""
        named = {name: key for name, key in homes.items() if name in self.problem.graph.weights}
        fixed = {**named, **self.problem.fixed_weights}
        return constrain(replace(self.problem, fixed_weights=fixed), self.constraints)

    def on(self, topology: Topology) -> Call:
        """Return the pass with another topology; prefetch limits grow by as much as the devices' room."""
        current = self.problem.topology
        growth = {
            key: limit + topology[key].room - current[key].room
            for key, limit in self.problem.prefetch_limits.items()
        }
        return replace(self, problem=replace(self.problem, topology=topology, prefetch_limits=growth))

    def read(self) -> set[str]:
        """Return the weights that the pass reads."""
        graph = self.problem.graph
        return {name for name in graph.weights if graph.readers.get(name)}


def place_jointly(
    calls: Sequence[Call],
    limits: Limits = Limits(),  # noqa: B008  # frozen
    *,
    warm_starts: Sequence[Assignment] | None = None,
) -> tuple[Solution, ...]:
    """Place all passes over the same homes of weights; return the solutions in order.

    Weights of one name are one weight; every pass's graph names all of them.

    Args:
        calls: the passes to place.
        limits: as in :func:`graphplan.passes.placement.driver.place`.
        warm_starts: another assignment of each pass to start from, all over the same homes of weights.

    Raises:
        InfeasibleError: no placement of one pass alone, or of all of them together, was found.
    """
    calls = [replace(call, problem=replace(call.problem, further_calls=len(calls) > 1)) for call in calls]
    pinned, weights = _pinned(calls), [call.weight for call in calls]
    problems = [call.with_homes(pinned) for call in calls]
    starts_alone: Sequence[Assignment | None] = warm_starts or [None] * len(calls)
    searches = 4 * len(calls)
    try:
        alone = [
            place(problem, _one_of(limits, searches - done), warm_start=warm_start)
            for done, (problem, warm_start) in enumerate(zip(problems, starts_alone, strict=True))
        ]
    except InfeasibleError:
        nearest = _smallest_budgets(calls, limits) if len(calls) > 1 and limits.advises else None
        if nearest is None or nearest.budgets == calls[0].problem.topology.budgets:
            raise
        raise explain_infeasible(calls[0].problem, nearest) from None

    def find(problem: Problem) -> Evaluation | None:
        solution = attempt(problem, replace(_one_of(limits, searches), proves=False), None)
        return probe(problem, deadline=limits.deadline) if solution is None else solution.evaluation

    adopted = None if warm_starts is None else fit_together(problems, warm_starts)
    starts = [adopted] if adopted is not None and _feasible(adopted) else []
    evaluations = [solution.evaluation for solution in alone]
    for number, start in enumerate(_Starts(calls, pinned, find).each(evaluations)):
        if start is not None:
            starts.append(start)
        if starts and (number or limits.over):
            break  # further starts are for budgets that are hard to keep
    if not starts:
        starts.append(_found_by_probes(calls, limits))
    exchanged = [exchange(problems, weights, start, limits.one_of(2 * len(starts))) for start in starts]
    best = min(exchanged, key=partial(weighted_seconds, weights))
    if not limits.over:
        best = _search_again(calls, best, limits)
    return tuple(
        certify(evaluation, _bound(problem, evaluation, solo, limits))
        for problem, evaluation, solo in zip(problems, best, alone, strict=True)
    )


def _one_of(limits: Limits, searches: int) -> Limits:
    """Return the limits of one of several searches that are left, from now on."""
    return replace(limits.one_of(searches), effort=limits.effort * PARAMS.call_effort)


def _bound(problem: Problem, evaluation: Evaluation, solo: Solution, limits: Limits) -> Bound:
    """Return the bound of the pass alone if its scope holds here; else a bound with a wider scope."""
    if holds_for(solo.bound.scope, problem, evaluation):
        bound = solo.bound
    elif is_searched(problem, evaluation):
        bound = bound_with_offload(problem, evaluation.seconds, limits)
    else:
        bound = least_seconds(Arrays(problem))
    return replace(bound, proof=f"these inputs alone: {bound.proof}")


def _pinned(calls: Sequence[Call]) -> dict[str, DeviceKey]:
    """Return weight -> its home by the caller's pins or an earlier plan."""
    return {name: key for call in calls for name, key in call.with_homes({}).fixed_weights.items()}


def _feasible(evaluations: Sequence[Evaluation]) -> bool:
    return all(evaluation.feasible for evaluation in evaluations)


@dataclass(frozen=True, slots=True)
class _Starts:
    """Finds placements of all passes over the same homes of weights.

    Attributes:
        calls: the passes.
        pinned: weight -> its home by the caller's pins or an earlier plan.
        find: function that places one pass.
    """

    calls: Sequence[Call]
    pinned: Mapping[str, DeviceKey]
    find: Callable[[Problem], Evaluation | None]

    def each(self, alone: Sequence[Evaluation]) -> Iterator[list[Evaluation] | None]:
        """Yield starts: each pass first, without and with room for the others; at last, all weights streamed.

        None stands for a start that was not found, or exceeds a budget.
        """
        calls, pinned = self.calls, self.pinned
        heaviest = sorted(range(len(calls)), key=lambda index: -calls[index].weight * alone[index].seconds)
        for first in heaviest:
            order = [first, *(index for index in heaviest if index != first)]
            yield self._in_turn(order, pinned, alone[first])
            problem = calls[first].with_homes(pinned)
            smaller = _with_room(problem, alone[first], [alone[index] for index in order[1:]])
            placed = self.find(smaller) if smaller.topology != problem.topology else None
            yield None if placed is None else self._in_turn(order, pinned, placed)
        problem = calls[0].with_homes(pinned)
        if problem.topology.cpu is not None and problem.offload:
            streamable = frozenset.intersection(*(call.problem.graph.streamable for call in calls))
            yield self._in_turn(heaviest, {**dict.fromkeys(streamable, problem.topology.cpu), **pinned}, None)

    def _in_turn(
        self, order: Sequence[int], homes: Mapping[str, DeviceKey], first: Evaluation | None
    ) -> list[Evaluation] | None:
        """Place passes in this order, each over the homes of weights that those before it have decided.

        ``homes`` are decided from the start; ``first`` is a placement of the first in order, if there is one.
        """
        decided, placed = dict(homes), dict[int, Evaluation]()
        for index in order:
            evaluation = None if placed else first
            if evaluation is None:
                problem = self.calls[index].with_homes(decided)
                evaluation = self.find(with_allocated_buffers(problem, list(placed.values())))
            if evaluation is None:
                return None
            placed[index] = evaluation
            read = self.calls[index].read()
            decided |= {name: evaluation.assignment.weights[name] for name in read}
        for evaluation in placed.values():  # homes of unread weights
            decided = {**evaluation.assignment.weights, **decided}
        assignments = [placed[index].assignment for index in range(len(self.calls))]
        together = fit_together(
            [call.with_homes(decided) for call in self.calls],
            [replace(old, weights={name: decided[name] for name in old.weights}) for old in assignments],
        )
        return together if _feasible(together) else None


def _with_room(problem: Problem, alone: Evaluation, others: Sequence[Evaluation]) -> Problem:
    """Return the problem with budgets that leave room for the larger activations of other passes."""
    memory = {}
    for spec in problem.topology.devices:
        needs = [
            evaluation.peak(spec.key).nbytes - evaluation.peak(spec.key).weights
            for evaluation in (alone, *others)
        ]
        more = max(needs) - needs[0] if spec.is_accelerator else 0
        memory[spec.key] = max(0, spec.memory - more)
    return replace(problem, topology=problem.topology.with_memory(memory))


def _search_again(calls: Sequence[Call], start: Sequence[Evaluation], limits: Limits) -> list[Evaluation]:
    """Search each pass once more, over all weights where they reside; return the better evaluations."""
    best = list(start)
    problems = [call.with_homes(start[0].assignment.weights) for call in calls]
    for index, problem in enumerate(problems):
        others = [evaluation for evaluation in best if evaluation is not best[index]]
        warm_start = best[index].assignment  # feasible, so `place` finds something
        pass_limits = replace(_one_of(limits, len(problems) - index), proves=False)
        limited = with_limited_buffers(problem, others)
        replaced = place(limited, pass_limits, warm_start=warm_start).evaluation
        trial = [evaluation.assignment for evaluation in best]
        trial[index] = replaced.assignment
        together = evaluate_together(problems, trial)
        if replaced.seconds < best[index].seconds and _feasible(together):
            best = together
    return best


def _found_by_probes(calls: Sequence[Call], limits: Limits) -> list[Evaluation]:
    """Return a placement of all passes that a short search finds where longer ones find none.

    Raises:
        InfeasibleError: it finds none either; the error names budgets with which it finds one.
    """
    message = (
        f"no placement of the weights was found that keeps the budgets for all {len(calls)} of calls=, "
        "though each fits alone"
    )
    if not limits.advises:
        raise InfeasibleError(message)
    start = _probe_jointly(calls, _advice_effort(calls, limits))
    if start is not None:
        return start
    nearest = _smallest_budgets(calls, limits)
    if nearest is None:
        raise InfeasibleError(message)
    available = calls[0].problem.topology.budgets
    raise InfeasibleError(
        f"{message}. These budgets suffice: max_memory={dict(nearest.budgets)}; "
        f"the given ones are {available}",
        needed=nearest.budgets,
        available=available,
    )


def _advice_effort(calls: Sequence[Call], limits: Limits) -> Effort:
    return Limits(limits.deadline).work(sum(len(call.problem.graph.operations) for call in calls))


def _smallest_budgets(calls: Sequence[Call], limits: Limits) -> Advice | None:
    """Return budgets with which a short search finds a placement of all passes; None if there is none."""

    def highest(problem: Problem, effort: Effort) -> Evaluation | None:
        """Return the first pass's placement on the problem's devices, with the highest peaks of all."""
        joint = _probe_jointly([call.on(problem.topology) for call in calls], effort)
        return None if joint is None else with_highest_peaks(joint)

    closely = not limits.caller_retries
    found = smallest_budgets(calls[0].problem, _advice_effort(calls, limits), highest, closely=closely)
    pinned = _pinned(calls)
    return found or everything_on_one([call.with_homes(pinned) for call in calls])


def _probe_jointly(calls: Sequence[Call], effort: Effort) -> list[Evaluation] | None:
    """Return a placement of all passes that a short search finds; None if it finds none."""
    pinned = _pinned(calls)
    alone = [probe(call.with_homes(pinned), effort) for call in calls]
    possible = [evaluation for evaluation in alone if evaluation is not None]
    if len(possible) < len(calls):
        return None
    starts = _Starts(calls, pinned, partial(probe, effort=effort)).each(possible)
    return next((start for start in starts if start is not None), None)
