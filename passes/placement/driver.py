"""The driver: which searches a problem gets, in which order, within one effort.

Accelerators come first. Where they hold the model, the CPU computes nothing, and weights are streamed only if
operations then run on faster accelerators and the weights serve no other forward passes. They do not hold it
where a pin or an earlier plan has put weights into CPU memory. Within these rules the fastest placement is
taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial

import numpy as np

from graphplan.devices.topology import DISK, DeviceKey
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds.milp import BY_CLASSES, bound_by_classes
from graphplan.passes.placement.certificate import Bound, Scope, Solution, certify
from graphplan.passes.placement.evaluate import Evaluation, evaluate, evaluate_filled
from graphplan.passes.placement.infeasible import everything_on_one, explain_infeasible, smallest_budgets
from graphplan.passes.placement.params import PARAMS, Effort, Limits
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import on_one_device, unread_weights
from graphplan.passes.placement.resident import ResidentSearch
from graphplan.passes.placement.streaming.streamed import StreamedSearch, prove_streamed
from graphplan.passes.placement.streaming.streamed_local_search import climb_streamed
from graphplan.warnings import warn

_NOT_EVEN = (
    "balance=True: the model does not fit the accelerators in even pieces, so it is placed for the least "
    "time instead"
)


def place(
    problem: Problem,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    *,
    warm_start: Assignment | None = None,
) -> Solution:
    """Place a graph.

    Args:
        problem: the graph, the devices and the rules.
        limits: when to stop; the best placement by then is returned, with a valid bound.
        warm_start: another placement to start from, for instance from a plan for other budgets.

    Raises:
        InfeasibleError: no placement was found; it names sufficient budgets.
    """
    solution = attempt(problem, limits, warm_start)
    if solution is not None:
        return _search_further(solution, problem, limits)
    # the search proves nothing: a placement for larger budgets may fit the given ones
    effort = Limits(limits.deadline).work(len(problem.graph.operations), PARAMS.advice_effort)
    closely = limits.advises and not limits.caller_retries
    advice = smallest_budgets(problem, effort, probe, closely=closely) or everything_on_one([problem])
    if advice is not None:
        evaluation = evaluate(problem, advice.evaluation.assignment)
        if evaluation.feasible:
            return certify(evaluation, Bound())
    raise explain_infeasible(problem, advice)


def _search_further(solution: Solution, problem: Problem, limits: Limits) -> Solution:
    """Search again from the placement that was found: in the time that is left, or if the gap is large.

    Earlier plans and even pieces restrict the search: more of it finds nothing.
    """
    timed = limits.deadline is not None
    restricted = bool(problem.prefetch_limits) or problem.balance
    tolerated = PARAMS.sufficient_gap if timed else PARAMS.large_gap
    if solution.gap <= tolerated or restricted or limits.over or not limits.proves:
        return solution
    more = replace(limits, effort=math.inf if timed else limits.effort * PARAMS.more_work)
    second = attempt(problem, more, solution.evaluation.assignment)
    return solution if second is None else _better(solution, second)


def _better(first: Solution, second: Solution) -> Solution:
    """Return the faster placement, with the higher bound where both hold for the same placements."""
    if second.evaluation.seconds <= first.evaluation.seconds:
        first, second = second, first
    bound = second.bound
    if bound.scope is not first.bound.scope:
        return first
    return certify(first.evaluation, first.bound.raised(bound.seconds, bound.proof))


def probe(
    problem: Problem,
    effort: Effort | None = None,
    deadline: float | None = None,
    *,
    climbs: bool = False,
) -> Evaluation | None:
    """Return a placement that fits, found with a tenth of the default work; None if that finds none.

    Args:
        problem: the problem to place.
        effort: the effort to charge, if it is limited.
        deadline: ``time.monotonic()`` at which to stop, if no effort is given.
        climbs: whether to improve a placement that streams weights, with half of the default work.
    """
    if (trivial := _without_operations(problem)) is not None:
        return trivial.evaluation if trivial.evaluation.feasible else None
    visits = PARAMS.visits(len(problem.graph.operations)) / 10
    effort = effort or Effort(2 * visits, deadline)
    for candidate, streaming in _attempts(problem):
        sub_effort = replace(effort, visits=max(0.0, min(visits, effort.visits)))
        search = StreamedSearch(candidate, sub_effort) if streaming else ResidentSearch(candidate, sub_effort)
        if search.arrays.lacks_room:
            continue
        if not search.find_first_placement():
            search.improve()
        effort.charge(sub_effort.done)
        evaluation = search.evaluation()
        if evaluation is not None and evaluation.feasible:
            if climbs and isinstance(search, StreamedSearch):
                search.effort = Effort(5 * visits, deadline)
                search.accelerate()
                assert search.best is not None
                return climb_streamed(search.arrays, search.best, search.effort)
            return evaluation
    return None


def _without_operations(problem: Problem) -> Solution | None:
    """Return the placement of a model that only returns inputs, weights or sizes of them; None for others.

    A placement that takes no time has a tight bound; otherwise another home may be faster.
    """
    if not all(operation.host_only for operation in problem.graph.operations.values()):
        return None
    key = problem.topology.computing[0].key
    evaluation = evaluate_filled(problem, on_one_device(problem, key), unread_weights(problem))
    return Solution(evaluation, Bound(0.0, "no operations") if evaluation.seconds == 0.0 else Bound())


def _attempts(problem: Problem) -> Iterator[tuple[Problem, bool]]:
    """Yield the problems to try in turn, and whether each allows streaming."""
    alone, last = accelerators_alone(problem), problem.offload and _may_compute_at_home(problem)
    if alone is not None and not last:
        yield alone, _streams_by_pins(alone)
    if _may_offload(problem):
        # streamed weights need room as well, in CPU memory
        if problem.graph.held_bytes <= sum(spec.room for spec in problem.topology.computing):
            yield problem, True
    elif alone is None:
        yield problem, _streams_by_pins(problem)
    if alone is not None and last:
        yield alone, _streams_by_pins(alone)


def _may_offload(problem: Problem) -> bool:
    topology = problem.topology
    streams = any(spec.room > 0 for spec in topology.accelerators)
    return problem.offload and topology.cpu is not None and streams


def _streams_by_pins(problem: Problem) -> bool:
    """Whether accelerators may read weights in CPU memory because of pins, of the weight or of a reader."""
    graph, cpu = problem.graph, problem.topology.cpu
    keys = problem.topology.accelerator_keys
    if cpu is None:
        return False
    for name in graph.streamable:
        on_accelerators = [bool(problem.allowed.get(r, keys) & keys) for r in graph.readers.get(name, ())]
        home = problem.fixed_weights.get(name)
        if any(on_accelerators) and (home == cpu or (home is None and not all(on_accelerators))):
            return True
    return False


def accelerators_alone(problem: Problem) -> Problem | None:
    """Return the problem with only pins and unread weights on the CPU; None if the weights cannot fit."""
    keys = problem.topology.accelerator_keys
    if not keys:
        return None
    alone = replace(problem.on(keys), offload=False)
    room = sum(problem.topology[key].room for key in keys)
    return alone if _least_held(alone, keys) <= room else None


def _may_compute_at_home(problem: Problem) -> bool:
    """Whether the CPU may compute with a weight that is fixed there, instead of an accelerator."""
    graph, cpu, keys = problem.graph, problem.topology.cpu, problem.topology.accelerator_keys
    if cpu is None:
        return False
    able = frozenset({cpu, *keys})
    at_home = (name for name in graph.streamable if problem.fixed_weights.get(name) in (cpu, DISK))
    readers = (
        problem.allowed.get(reader, able) for name in at_home for reader in graph.readers.get(name, ())
    )
    return any(cpu in allowed and allowed & keys for allowed in readers)


def _least_held(problem: Problem, keys: frozenset[DeviceKey]) -> int:
    """Return the bytes of weights that only these devices may read, so that one of them must hold each."""
    graph, total = problem.graph, 0
    for weight in graph.weights.values():
        readers = graph.readers.get(weight.name, ())
        if not readers or weight.name in problem.fixed_weights:
            continue
        if all(problem.allowed[reader] <= keys for reader in readers):
            total += weight.held_bytes
    return total


def attempt(problem: Problem, limits: Limits, warm_start: Assignment | None) -> Solution | None:
    """Return the solution as :func:`place`, without further search; None if nothing is found."""
    if (trivial := _without_operations(problem)) is not None:
        return trivial if trivial.evaluation.feasible else None
    for candidate, streaming in _attempts(problem):
        if streaming:
            if candidate.balance:
                warn(_NOT_EVEN)
            solution = _place_streamed(candidate, problem, limits, warm_start)
        else:
            solution = _place_resident(candidate, problem, limits, warm_start)
        if solution is not None:
            return solution
    return None


def _on_faster_accelerators(
    search: ResidentSearch, resident: Evaluation, problem: Problem, limits: Limits
) -> Solution | None:
    """Return a streamed placement with operations on faster accelerators, if it is faster, else None.

    It is not tried where the weights serve other forward passes: the tokens after a prompt would stream them
    too. Nor in training: the CPU would update them.
    """
    negligible = PARAMS.sufficient_gap * resident.seconds
    if search.beyond_fastest <= negligible or not _may_stream_anyway(problem):
        return None
    candidate = replace(problem, allowed=search.problem.allowed)
    streamed = _place_streamed(candidate, problem, limits, resident.assignment)
    return None if streamed is None or streamed.evaluation.seconds >= resident.seconds else streamed


def _may_stream_anyway(problem: Problem) -> bool:
    """Whether streaming may pay though mixed accelerators hold the weights, which serve this pass only."""
    graph = problem.graph
    speeds = {(spec.flops, spec.bandwidth) for spec in problem.topology.accelerators}
    further = problem.further_calls or any(value.stays for value in graph.values.values())
    trains = not problem.streaming or any(op.backward for op in graph.operations.values())
    settled = problem.balance or problem.fixed_weights.keys() >= set(graph.streamable)
    return len(speeds) > 1 and _may_offload(problem) and not (further or trains or settled)


def _place_resident(
    candidate: Problem, problem: Problem, limits: Limits, warm_start: Assignment | None
) -> Solution | None:
    """Place without streaming: segments and local search, then label setting and bounds, then head-room."""
    if candidate.balance and len(candidate.topology.accelerators) > 1:
        even = _place_evenly(candidate, problem, limits)
        if even is not None:
            return even
        warn(_NOT_EVEN)
    streams_after = limits.seconds_left is not None and _may_stream_anyway(problem)
    effort = (limits.until(0.5) if streams_after else limits).work(len(candidate.graph.operations))
    search = ResidentSearch(replace(candidate, balance=False), effort)
    if search.arrays.lacks_room or not _find_first_placement(search, warm_start):
        return None
    if limits.proves:
        small = len(search.proving.units) * search.proving.computing <= PARAMS.milp_variables
        if small and not effort.late:
            with effort.fraction(0.3) as sub_effort:
                proven = bound_by_classes(search.proving, search.seconds, sub_effort, streaming=False)
            search.bound = search.bound.raised(proven, BY_CLASSES)
        search.improve()
    search.balance()
    evaluation = search.evaluation()
    if evaluation is None or not evaluation.feasible:
        return None
    streamed = _on_faster_accelerators(search, evaluation, problem, limits)
    return streamed or _certified(evaluation, search.bound, candidate, problem)


def _find_first_placement(search: ResidentSearch | StreamedSearch, warm_start: Assignment | None) -> bool:
    """Find a first placement in half of the time, since the budgets of an error need the rest.

    A small effort is raised to the default if nothing is found: an error costs the caller more than time.
    """
    effort, deadline = search.effort, search.effort.until(0.5)
    default = PARAMS.visits(len(search.problem.graph.operations))

    def found(step: Callable[[], object], visits: float) -> bool:
        search.effort = Effort(visits, deadline)
        step()
        effort.charge(search.effort.done)
        return bool(np.isfinite(search.seconds))

    find_first = partial(search.find_first_placement, warm_start)
    fits = found(find_first, effort.visits)
    fits = fits or (effort.total < default and found(find_first, default))
    fits = fits or found(search.improve, max(effort.visits, default) / 2)
    search.effort = effort
    return fits


def _place_evenly(candidate: Problem, problem: Problem, limits: Limits) -> Solution | None:
    """Place segments with the shortest longest one; the bound is of the fastest placement."""
    effort = limits.work(len(candidate.graph.operations))
    search = ResidentSearch(candidate, effort)
    evaluation = search.evaluation() if search.find_first_placement() else None
    if evaluation is None or not evaluation.feasible:
        return None
    search.relax()
    bound = replace(search.bound, proof=f"{search.bound.proof}, of the fastest placement, even or not")
    return _certified(evaluation, bound, candidate, problem)


def bound_with_offload(problem: Problem, seconds: float, limits: Limits) -> Bound:
    """Return a bound for all placements, including those that offload though accelerators hold the model.

    ``seconds`` are those of a known placement.
    """
    if (trivial := _without_operations(problem)) is not None:
        return trivial.bound
    effort = limits.work(len(problem.graph.operations), PARAMS.streaming_effort)
    return prove_streamed(Arrays(problem), seconds, effort)


def holds_for(scope: Scope, problem: Problem, evaluation: Evaluation) -> bool:
    """Whether a bound of this scope holds for a placement of the problem, whichever search found it."""
    if scope is Scope.ANY:
        return True
    if not is_searched(problem, evaluation):
        return False
    alone, now = accelerators_alone(problem), evaluation.assignment
    if alone is None or scope is Scope.SEARCHED:
        return True
    keys, readers = problem.topology.accelerator_keys, problem.graph.readers
    at_home = scope is Scope.ON_ACCELERATORS or all(
        now.weights[name] in keys | {now.operations[reader] for reader in readers.get(name, ())}
        for name in problem.graph.weights
        if readers.get(name) and name not in problem.fixed_weights
    )
    return at_home and all(now.operations[name] in rule for name, rule in alone.allowed.items())


def is_searched(problem: Problem, evaluation: Evaluation) -> bool:
    """Whether a placement is in ``Scope.SEARCHED``: each weight resides where a search may put it.

    A weight that one macro-operation reads resides with it, on the CPU, or where it is fixed. Other passes
    over the same weights may leave it on another accelerator, from which no search streams it.
    """
    graph, now = problem.graph, evaluation.assignment
    for name in graph.weights:
        readers = graph.readers.get(name, ())
        if len({graph.group_of.get(reader, reader) for reader in readers}) != 1:
            continue  # unread or shared: it may reside anywhere
        homes = {now.operations[reader] for reader in readers}
        if now.weights[name] not in homes | {problem.topology.cpu, DISK, problem.fixed_weights.get(name)}:
            return False
    return True


def _certified(evaluation: Evaluation, bound: Bound, candidate: Problem, problem: Problem) -> Solution:
    """Return a placement with its bound and scope."""
    if candidate is not problem and problem.offload and problem.topology.cpu is not None:
        scope = Scope.ON_ACCELERATORS if candidate.offload else Scope.WITHOUT_OFFLOAD
        bound = replace(bound, scope=scope)
    return certify(evaluation, bound)


def _place_streamed(
    candidate: Problem, problem: Problem, limits: Limits, warm_start: Assignment | None
) -> Solution | None:
    """Place with streaming; first as if the CPU's budget were no limit, since most placements then fit it."""
    search = _streamed_search(candidate, limits)
    if search.arrays.lacks_room:
        return None
    is_first = warm_start is None and not limits.over
    ample = _with_ample_cpu(search.arrays, candidate) if is_first else None
    if ample is not None:
        return _place_first_with(ample, search, problem, limits)
    best = _search_streamed(search, limits, warm_start)
    return None if best is None else _certified(best, search.bound, candidate, problem)


def _place_first_with(
    ample: Problem, search: StreamedSearch, problem: Problem, limits: Limits
) -> Solution | None:
    """Place ``ample``, whose bound holds for the search's problem too; then that, unless it fits already."""
    candidate, ideal = search.problem, _streamed_search(ample, limits.one_of(2))
    best = _search_streamed(ideal, limits.one_of(2), None)
    if best is None:
        return None
    repaired = evaluate_filled(candidate, best.assignment, search.arrays.unread)
    if not repaired.feasible:
        effort = limits.work(len(candidate.graph.operations))
        repaired = climb_streamed(search.arrays, repaired, effort)
        best = _search_streamed(search, limits, None)
        if best is not None:
            bound = search.bound.raised(ideal.bound.seconds, ideal.bound.proof)
            best = min(best, repaired, key=lambda e: (not e.feasible, e.seconds))
            return _certified(best, bound, candidate, problem)
    return _certified(repaired, ideal.bound, candidate, problem) if repaired.feasible else None


def _streamed_search(candidate: Problem, limits: Limits) -> StreamedSearch:
    return StreamedSearch(candidate, limits.work(len(candidate.graph.operations), PARAMS.streaming_effort))


def _with_ample_cpu(arrays: Arrays, candidate: Problem) -> Problem | None:
    """Return the problem with a CPU that holds everything; None if the given one does."""
    topology = candidate.topology
    assert topology.cpu is not None
    assert arrays.cpu is not None
    spec, all_on_cpu = topology[topology.cpu], np.full(arrays.count, arrays.cpu)
    everything = int(arrays.peaks(all_on_cpu)[arrays.cpu])
    if everything <= spec.room:
        return None
    memory = {topology.cpu: everything + spec.withheld}
    return replace(candidate, topology=topology.with_memory(memory))


def _search_streamed(
    search: StreamedSearch, limits: Limits, warm_start: Assignment | None
) -> Evaluation | None:
    """Search and bound with streaming: round robin, segments, bounds, beam searches, local search."""
    effort = search.effort
    round_robin = _place_round_robin(search)
    if round_robin is not None:
        search.find_first_placement(warm_start)
    elif not _find_first_placement(search, warm_start):
        return None
    if limits.proves:
        unfolded = Arrays(search.problem) if search.arrays.folded else search.arrays
        incumbent_seconds = min(search.seconds, np.inf if round_robin is None else round_robin.seconds)
        search.bound = prove_streamed(unfolded, incumbent_seconds, effort)
    if not search.proven:
        search.improve()
    if round_robin is not None:  # only now: beams are steered by the seconds of their own best placement
        search.offer(round_robin)
    assert search.best is not None
    if not search.proven:
        search.best = climb_streamed(search.arrays, search.best, effort, search.bound.seconds)
    return search.best


def _place_round_robin(search: StreamedSearch) -> Evaluation | None:
    """Return the best round-robin placement of the accelerators; the search itself has none yet."""
    problem, effort = search.problem, search.effort
    if problem.fixed_weights.keys() >= set(problem.graph.streamable):
        return None  # an earlier plan has placed the weights, and operations follow them
    with effort.fraction(PARAMS.round_robin_share) as sub_effort:
        trial = copy(search)
        trial.effort = sub_effort
        trial.try_round_robin()
    return trial.best
