"""The driver: which search a problem gets, in which order, within one effort.

Accelerators come first: where they hold the model, the CPU computes nothing, and weights are streamed only
if operations then run on faster accelerators, and no further calls follow from this one. Within that,
seconds decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from graphplan.devices.topology import DISK, DeviceKey
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds.milp import bound_by_classes
from graphplan.passes.placement.bounds.relaxation import least_seconds
from graphplan.passes.placement.certificate import Bound, Scope, Solution, certify
from graphplan.passes.placement.evaluate import Evaluation, evaluate, evaluate_filled
from graphplan.passes.placement.infeasible import explain_infeasible, smallest_budgets
from graphplan.passes.placement.params import PARAMS, Effort, Limits
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import on_one_device, unread_weights
from graphplan.passes.placement.resident import ResidentSearch
from graphplan.passes.placement.streaming.streamed import StreamedSearch
from graphplan.passes.placement.streaming.streamed_local_search import climb_streamed
from graphplan.warnings import warn

_MILP = "integer program over operation classes"
_NOT_EVEN = (
    "balance=True: the model does not fit the accelerators in even pieces, so it is placed for the least "
    "time instead"
)


def place(
    problem: Problem,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    *,
    near: Assignment | None = None,
) -> Solution:
    """Place a graph.

    Args:
        problem: what to place, and on what.
        limits: when to stop; the best placement by then is returned, with a bound that holds.
        near: a placement to begin with as well, from a plan for other budgets, say.

    Raises:
        InfeasibleError: with budgets that would do.
    """
    found = attempt(problem, limits, near)
    if found is not None:
        return _searched_on(found, problem, limits)
    # the search is no proof: what fits larger budgets may fit the given ones
    effort = Limits(limits.deadline).work(len(problem.graph.operations), PARAMS.advice_effort)
    advice = smallest_budgets(problem, effort, probe, closely=not limits.retries)
    if advice is not None:
        again = evaluate(problem, advice.evaluation.assignment)
        if again.feasible:
            return certify(again, Bound())
    raise explain_infeasible(problem, advice)


def _searched_on(found: Solution, problem: Problem, limits: Limits) -> Solution:
    """Searched with more work where the gap is large, unless earlier plans leave little to choose."""
    settled = bool(problem.prefetch_limits) or problem.balance
    if found.gap <= PARAMS.large_gap or settled or limits.left is not None or not limits.proves:
        return found
    more = replace(limits, effort=limits.effort * PARAMS.more_work)
    again = attempt(problem, more, found.evaluation.assignment)
    return found if again is None or again.evaluation.seconds > found.evaluation.seconds else again


def probe(
    problem: Problem,
    effort: Effort | None = None,
    deadline: float | None = None,
    *,
    climbs: bool = False,
) -> Evaluation | None:
    """A placement that fits, found with a tenth of the default work; None where that finds none.

    Args:
        problem: what to place.
        effort: what is charged, if it is limited.
        deadline: ``time.monotonic()`` at which to stop, where no effort is given.
        climbs: whether one that streams weights is improved, with half of the default work.
    """
    if not _runs(problem):
        only = _without_operations(problem)
        return only if only.feasible else None
    visits = PARAMS.visits(len(problem.graph.operations)) / 10
    effort = effort or Effort(2 * visits, deadline)
    for candidate, streaming in _attempts(problem):
        part = replace(effort, visits=max(0.0, min(visits, effort.visits)))
        search = StreamedSearch(candidate, part) if streaming else ResidentSearch(candidate, part)
        if not search.begin():
            search.improve()
        effort.charge(part.done)
        found = search.best if isinstance(search, StreamedSearch) else search.evaluation()
        if found is not None and found.feasible:
            if climbs and isinstance(search, StreamedSearch):
                return climb_streamed(search.arrays, found, Effort(5 * visits, deadline))
            return found
    return None


def _runs(problem: Problem) -> bool:
    """Whether any operation does more than read sizes."""
    return any(not operation.host_only for operation in problem.graph.operations.values())


def _without_operations(problem: Problem) -> Evaluation:
    """A placement of a model that returns its inputs or weights as they are, or sizes of them."""
    key = problem.topology.computing[0].key
    return evaluate_filled(problem, on_one_device(problem, key), unread_weights(problem))


def _bound_without_operations(found: Evaluation) -> Bound:
    """Nothing is faster than what takes no time; where results come from elsewhere, another home may be."""
    return Bound(0.0, "no operations") if found.seconds == 0.0 else Bound()


def _attempts(problem: Problem) -> Iterator[tuple[Problem, bool]]:
    """Problems to try in turn, and whether with streaming."""
    alone = accelerators_alone(problem)
    if alone is not None:
        yield alone, _streams_anyway(alone)
    if _may_offload(problem):
        # each weight resides somewhere, streamed ones in CPU memory
        if problem.graph.held_bytes <= sum(spec.room for spec in problem.topology.computing):
            yield problem, True
    elif alone is None:
        yield problem, False


def _may_offload(problem: Problem) -> bool:
    topology = problem.topology
    return problem.offload and topology.cpu is not None and bool(topology.accelerators)


def _streams_anyway(problem: Problem) -> bool:
    """Whether accelerators may read weights that reside in CPU memory, by pins: their own or a reader's."""
    graph, cpu = problem.graph, problem.topology.cpu
    keys = problem.topology.accelerator_keys
    for name in graph.streamable if cpu is not None else ():
        on_accelerators = [bool(problem.allowed.get(r, keys) & keys) for r in graph.readers.get(name, ())]
        there = problem.fixed_weights.get(name)
        if any(on_accelerators) and (there == cpu or (there is None and not all(on_accelerators))):
            return True
    return False


def accelerators_alone(problem: Problem) -> Problem | None:
    """The same problem with nothing on the CPU but what the caller has pinned there; None if it cannot fit.

    The CPU may hold what nobody reads.
    """
    keys = problem.topology.accelerator_keys
    if not keys:
        return None
    alone = replace(problem.on(keys), offload=False)
    room = sum(problem.topology[key].room for key in keys)
    return alone if _least_held(alone, keys) <= room else None


def _least_held(problem: Problem, keys: frozenset[DeviceKey]) -> int:
    """Bytes of the weights that only these devices may read, and nothing else may hold."""
    graph, found = problem.graph, 0
    for weight in graph.weights.values():
        readers = graph.readers.get(weight.name, ())
        if readers and weight.name not in problem.fixed_weights:
            found += weight.held_bytes if all(problem.allowed[reader] <= keys for reader in readers) else 0
    return found


def attempt(problem: Problem, limits: Limits, near: Assignment | None) -> Solution | None:
    """As :func:`place`; None where nothing is found."""
    if not _runs(problem):
        only = _without_operations(problem)
        return certify(only, _bound_without_operations(only)) if only.feasible else None
    for candidate, streaming in _attempts(problem):
        if streaming:
            if candidate.balance:
                warn(_NOT_EVEN)
            found = _place_streamed(candidate, problem, limits, near)
        else:
            found = _place_resident(candidate, problem, limits, near)
        if found is not None:
            return found
    return None


def _on_faster_accelerators(
    search: ResidentSearch, found: Evaluation, problem: Problem, limits: Limits
) -> Solution | None:
    """Streamed, where operations would be faster on other accelerators, and that takes less; else None.

    Not where a cache or an optimizer's step makes the same weights serve calls of another kind: the tokens
    after a prompt would stream them too, and the CPU would change them.
    """
    least = PARAMS.sufficient_gap * found.seconds
    if search.beyond_fastest <= least or not _may_stream_alone(problem):
        return None
    there = replace(problem, allowed=search.problem.allowed)
    streamed = _place_streamed(there, problem, limits, found.assignment)
    return None if streamed is None or streamed.evaluation.seconds >= found.seconds else streamed


def _may_stream_alone(problem: Problem) -> bool:
    """Whether weights may be streamed where unlike accelerators hold them, and serve this call alone."""
    graph = problem.graph
    speeds = {(spec.flops, spec.bandwidth) for spec in problem.topology.accelerators}
    further = problem.further_calls or any(value.stays for value in graph.values.values())
    trains = not problem.streaming or any(op.backward for op in graph.operations.values())
    settled = problem.balance or problem.fixed_weights.keys() >= set(graph.streamable)
    return len(speeds) > 1 and _may_offload(problem) and not (further or trains or settled)


def _place_resident(
    candidate: Problem, problem: Problem, limits: Limits, near: Assignment | None
) -> Solution | None:
    """Segments and local search, then labels and bounds, then head-room."""
    if candidate.balance and len(candidate.topology.accelerators) > 1:
        return _place_evenly(candidate, problem, limits, near)
    mine = limits.until(0.5) if limits.left is not None and _may_stream_alone(problem) else limits
    effort = mine.work(len(candidate.graph.operations))
    search = ResidentSearch(replace(candidate, balance=False), effort)
    if not _begin(search, near):
        return None
    if limits.proves:
        small = len(search.proving.units) * search.proving.computing <= PARAMS.milp_variables
        if small and not effort.late:
            with effort.share(0.3) as part:
                found = bound_by_classes(search.proving, search.seconds, part, streaming=False)
            search.bound = search.bound.raised(found, _MILP)
        search.improve()
    search.balance()
    evaluation = search.evaluation()
    if evaluation is None or not evaluation.feasible:
        return None
    streamed = _on_faster_accelerators(search, evaluation, problem, limits)
    return streamed or _certified(evaluation, search.bound, candidate, problem)


def _begin(search: ResidentSearch | StreamedSearch, near: Assignment | None) -> bool:
    """Find a placement at all, in half of the time; the budgets of an error take the rest.

    An error costs the caller more than a longer search: a small effort does not end before the default has.
    """
    whole = search.effort
    default = PARAMS.visits(len(search.problem.graph.operations))
    search.effort = replace(whole, deadline=whole.until(0.5))
    found = search.begin(near)
    whole.charge(search.effort.done)
    if not found and whole.total < default:
        search.effort = replace(search.effort, visits=default)
        found = search.begin(near)
        whole.charge(search.effort.done)
    if not found:
        search.effort = replace(search.effort, visits=max(whole.visits, default) / 2)
        search.improve()
        whole.charge(search.effort.done)
    search.effort = whole
    return bool(np.isfinite(search.seconds))


def _place_evenly(
    candidate: Problem, problem: Problem, limits: Limits, near: Assignment | None
) -> Solution | None:
    """Segments of which the longest is as short as can be; the bound is of the fastest placement."""
    effort = limits.work(len(candidate.graph.operations))
    search = ResidentSearch(candidate, effort)
    evaluation = search.evaluation() if search.begin() else None
    if evaluation is None or not evaluation.feasible:
        warn(_NOT_EVEN)
        return _place_resident(replace(candidate, balance=False), problem, limits, near)
    search.relax()
    bound = replace(search.bound, proof=f"{search.bound.proof}, of the fastest placement, even or not")
    return _certified(evaluation, bound, candidate, problem)


def _prove(search: StreamedSearch, seconds: float) -> None:
    """Raise the bound of a streamed search, towards the seconds of a known placement."""
    if search.effort.late:
        least = least_seconds(search.arrays)
        search.bound = search.bound.raised(least.seconds, least.proof)
        return
    with search.effort.share(0.1) as part:
        found = bound_by_classes(search.proving, seconds, part, streaming=True)
    search.bound = search.bound.raised(found, _MILP)
    search.prove(seconds)


def bound_with_offload(problem: Problem, seconds: float, limits: Limits) -> Bound:
    """A bound on every placement, those included that offload though the accelerators hold the model.

    A known one takes so many seconds.
    """
    if not _runs(problem):
        return _bound_without_operations(_without_operations(problem))
    search = StreamedSearch(problem, limits.work(len(problem.graph.operations), PARAMS.streaming_effort))
    _prove(search, seconds)
    return search.bound


def holds_for(scope: Scope, problem: Problem, found: Evaluation) -> bool:
    """Whether a bound of this scope holds for a placement of the problem, from any search."""
    if scope is Scope.ANY:
        return True
    if not is_searched(problem, found):
        return False
    alone, now = accelerators_alone(problem), found.assignment
    if alone is None or scope is Scope.SEARCHED:
        return True
    keys, readers = problem.topology.accelerator_keys, problem.graph.readers
    at_home = scope is Scope.ON_ACCELERATORS or all(
        now.weights[name] in keys | {now.operations[reader] for reader in readers.get(name, ())}
        for name in problem.graph.weights
        if readers.get(name) and name not in problem.fixed_weights
    )
    return at_home and all(now.operations[name] in rule for name, rule in alone.allowed.items())


def is_searched(problem: Problem, found: Evaluation) -> bool:
    """Whether each weight that one group of operations reads resides with it, on the CPU, or as it is fixed.

    Other calls over the same weights may leave it on another accelerator, from where no search streams it.
    A weight that several groups read may reside where anything runs: memory beside it is counted only there.
    """
    graph, now = problem.graph, found.assignment
    group_of = {name: number for number, group in enumerate(graph.together) for name in group}
    busy = {now.operations[name] for name, operation in graph.operations.items() if not operation.host_only}
    for name in graph.weights:
        readers = graph.readers.get(name, ())
        own = len({group_of.get(reader, reader) for reader in readers}) == 1
        homes = {now.operations[reader] for reader in readers} if own else busy
        others = {problem.topology.cpu, DISK, problem.fixed_weights.get(name)}
        if readers and now.weights[name] not in homes | others:
            return False
    return True


def _certified(found: Evaluation, bound: Bound, candidate: Problem, problem: Problem) -> Solution:
    """A placement with its bound, and the class of placements that it holds for, if this is one of them."""
    if not is_searched(problem, found):  # repair may leave shared weights where nothing runs
        bound = least_seconds(Arrays(problem))
    elif candidate is not problem and problem.offload and problem.topology.cpu is not None:
        scope = Scope.ON_ACCELERATORS if candidate.offload else Scope.WITHOUT_OFFLOAD
        bound = replace(bound, scope=scope)
    return certify(found, bound)


def _place_streamed(
    candidate: Problem, problem: Problem, limits: Limits, near: Assignment | None
) -> Solution | None:
    """Accelerators in turn; segments, beams over configurations of buffers; the smallest moves; bounds."""
    effort = limits.work(len(candidate.graph.operations), PARAMS.streaming_effort)
    turns = _in_turns(candidate, effort)
    search = StreamedSearch(candidate, effort)
    begun = _begin(search, near) if turns is None else search.begin(near)
    if turns is None and not begun:
        return None
    if limits.proves:
        _prove(search, min(search.seconds, np.inf if turns is None else turns.seconds))
    if not search.proven:
        search.improve()
    if turns is not None:  # no earlier: beams go by the best that they find themselves
        search.offer(turns)
    assert search.best is not None
    if not search.proven:
        search.best = climb_streamed(search.arrays, search.best, effort, search.bound.seconds)
    return _certified(search.best, search.bound, candidate, problem)


def _in_turns(candidate: Problem, effort: Effort) -> Evaluation | None:
    if candidate.fixed_weights.keys() >= set(candidate.graph.streamable):
        return None  # operations follow the weights that an earlier plan has placed
    # half of little time: what the other searches begin with is several times slower
    with effort.share(PARAMS.turns_share if effort.deadline is None else 0.5) as part:
        search = StreamedSearch(candidate, part)
        search.take_turns()
    return search.best
