"""Find a placement: proposals in order of what users prefer, judged by the evaluator.

Accelerators come first: the CPU computes, and weights are fetched from it, only where the model does
not fit the accelerators without. Within that, seconds decide.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain as joined

from graphplan.device import DeviceKey, Topology
from graphplan.errors import InfeasibleError, readable_bytes
from graphplan.passes.bound import lower_bound
from graphplan.passes.chain import Chain
from graphplan.passes.close import close_gap
from graphplan.passes.coarsen import coarsen
from graphplan.passes.depth import deepen
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.exhaustive import search_all
from graphplan.passes.fill import fill
from graphplan.passes.incumbent import ENOUGH
from graphplan.passes.interleave import interleavings, quick_interleavings
from graphplan.passes.least import Least
from graphplan.passes.limits import Limits
from graphplan.passes.proposals import to_be_mended, with_offload, without_offload
from graphplan.passes.refine import refine
from graphplan.passes.repair import repair
from graphplan.passes.split_again import contiguous_split
from graphplan.passes.streaming import stream
from graphplan.schedule import Assignment

__all__ = ["Solution", "place", "sketch"]

_SMALL = 20  # operations up to which every placement is tried
_TINY = 12  # operations up to which that is done at length
_NODES = 60_000  # branches of that, about a second
_SHORTER, _SHORTEST = 3, 16  # how much less of it for more operations, and where there is a placement
_FEW_NODES = 3_000  # while looking for the smallest budgets, where there are many searches
_FIRST_WORK = 100_000  # of the local search before the gap is closed
_SOME, _LITTLE = 0.15, 0.05  # parts of the time for it, the second where there is hardly any
_TRYING = 0.5  # part of the time for that
_START_SECONDS = 2e-3  # per operation, from which there is time for a second start
_SECOND_SECONDS = 20e-3  # per operation, from which there is time to refine it too
_NEAR = 1.2  # times the best seconds up to which a plainer start is refined too
_DEPTH = 6  # most slots of a ring in a large graph
_BEAM_SECONDS = 4e-3  # per operation, from which beams have time to find something
_PROPOSING = 0.2  # part of the time for the first proposals with offload
_MENDED = 3  # proposals that are tried to be mended at a time, the nearest first
_TIGHTER = (0.98, 0.95, 0.9)  # of the budgets, tried where nothing is found with all of them


@dataclass(frozen=True, slots=True)
class Solution:
    """A placement within the budgets, and a bound on how much better one could be."""

    evaluation: Evaluation
    lower_bound: float
    proof: str


def place(
    problem: Problem,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    *,
    near: Assignment | None = None,
) -> Solution:
    """Place a graph.

    Args:
        problem: what to place, and on what.
        limits: when to stop improving; the best placement by then is returned, with a bound that holds.
            Without a deadline the search is limited by work, so that its result does not depend on the
            clock. ``exhaustive=False`` neither tries every placement of a small graph nor closes the gap
            of a large one, which takes seconds.
        near: a proposal beside those that are made here, from a plan for other budgets, say.

    Raises:
        InfeasibleError: with the smallest budgets that would do.
    """
    found = _search(problem, limits, near) or _search_tighter(problem, limits)
    if found is not None:
        return found
    # the search is not monotone: looking among larger budgets may find what keeps the given ones
    nearest = _smallest(problem)
    if nearest is not None:
        again = evaluate(problem, nearest.schedule.assignment)
        if again.feasible:
            bound = lower_bound(problem)
            return Solution(again, min(bound.seconds, again.seconds), bound.proof)
    raise _infeasible(problem, nearest)


def _search_tighter(problem: Problem, limits: Limits) -> Solution | None:
    """The best placement near one that is found where all budgets are smaller: with them others are tried."""
    for share in _TIGHTER:
        found = sketch(replace(problem, topology=problem.topology.scaled(share)))
        if found is not None:
            return _search(problem, limits, found.schedule.assignment)
    return None


def sketch(problem: Problem) -> Evaluation | None:
    """A placement that fits, found without much work; None where that finds none."""
    found = _search(problem)
    return None if found is None else found.evaluation


def _search(
    problem: Problem, limits: Limits | None = None, near: Assignment | None = None
) -> Solution | None:
    """The best placement found; ``limits`` is None where only feasibility is asked."""
    spec = next((s for s in problem.topology.devices if s.is_accelerator), problem.topology.devices[0])
    chain = Chain(problem.graph, spec)
    if problem.balance:
        even = contiguous_split(problem, chain, use_cpu=False, fetch=False, balance=True)
        fits = even is not None and even.feasible
        if even is not None and fits and sum(1 for s in problem.topology.devices if s.is_accelerator) > 1:
            bound = lower_bound(problem)
            proof = f"{bound.proof}, of the fastest placement, even or not"
            return Solution(even, min(bound.seconds, even.seconds), proof)
        if limits is not None and not fits:
            warnings.warn(
                "balance=True: the model does not fit the accelerators in even pieces, so it is placed to "
                "move the fewest bytes instead",
                stacklevel=2,
            )
    plain = _accelerators_alone(problem)
    if plain is not None:
        likely = [*_known(plain, near), *without_offload(plain, chain)]
        best = _best(plain, chain, likely, to_be_mended(plain, chain))
        filled = None
        if best is None or not _hurried(plain, limits):
            filled = min(fill(plain), key=lambda found: found.seconds, default=None)
        best, complete = _exhaust(plain, best or filled, limits, fetch=False)
        if best is not None:
            return _finish(plain, problem, chain, best, complete, limits, filled)
    proposals = joined(_known(problem, near), with_offload(problem, chain))
    best = plainer = _best(problem, chain, _in_time(proposals, limits))
    least = None if limits is None or not limits.exhaustive else Least.of(problem)
    if limits is not None and least is not None and not least.proves(best):
        best = _streamed(problem, chain, best, limits)
    best, complete = _exhaust(problem, best, limits, fetch=True)
    if best is None:
        return None
    beside = plainer if plainer is not None and plainer.seconds < best.seconds * _NEAR else None
    if _hurried(problem, limits):
        beside = None
    return _finish(problem, problem, chain, best, complete, limits, beside, least)


def _streamed(problem: Problem, chain: Chain, best: Evaluation | None, limits: Limits) -> Evaluation | None:
    """A better placement with streamed weights, if one is found."""
    known = [] if best is None else [best]
    left, operations = limits.left, len(problem.graph.operations)
    if left is not None and left < _BEAM_SECONDS * operations:  # what takes longer may not be done in time
        known += quick_interleavings(problem, chain, limits.until(0.2))
    best = min(known, key=lambda each: each.seconds, default=None)
    coarse = coarsen(problem, chain)
    found = list(stream(coarse, best, limits.until(0.5)))
    if not found and coarse is not problem:
        found = list(stream(problem, best, limits.until(0.3)))
    if not found:
        found = list(interleavings(problem, chain, limits.until(0.3)))
    return min([*([] if best is None else [best]), *found], key=lambda each: each.seconds, default=None)


def _hurried(problem: Problem, limits: Limits | None) -> bool:
    """Whether the time that is left is better spent on one start than on two."""
    left = None if limits is None else limits.left
    return left is not None and left < _START_SECONDS * len(problem.graph.operations)


def _finish(
    among: Problem,
    problem: Problem,
    chain: Chain,
    best: Evaluation,
    complete: bool,
    limits: Limits | None,
    beside: Evaluation | None = None,
    least: Least | None = None,
) -> Solution:
    """Refine what is not proven best, and bound it; without limits only feasibility was asked.

    ``beside`` is refined too: a better start can lead to a worse end. ``least`` is given if it is known.
    """
    where = "" if among is problem else " on the accelerators"
    if complete:
        return Solution(best, best.seconds, f"every placement{where} tried")
    if limits is None:
        return Solution(best, 0.0, "")
    if limits.exhaustive and limits.improves:
        least = least or Least.of(among)
    bound = lower_bound(among) if least is None else least.bound
    if not limits.improves or bound.seconds >= best.seconds * (1 - ENOUGH):
        return Solution(best, min(bound.seconds, best.seconds), bound.proof + where)
    starts = [best] if beside is None or beside is best else [best, beside]
    left = limits.left
    if left is not None and left < _SECOND_SECONDS * len(among.graph.operations):
        starts = starts[:1]
    part = _LITTLE if _hurried(among, limits) else _SOME
    ends = [refine(among, chain, start, _FIRST_WORK, limits.until(part).deadline) for start in starts]
    best = deepen(among, min(ends, key=lambda end: end.seconds), most=_DEPTH)
    if least is None:
        return Solution(best, min(bound.seconds, best.seconds), bound.proof + where)
    best, bound = close_gap(among, chain, best, least, limits)
    best = deepen(among, best, most=_DEPTH)
    return Solution(best, min(bound.seconds, best.seconds), bound.proof + where)


def _exhaust(
    problem: Problem, best: Evaluation | None, limits: Limits | None, *, fetch: bool
) -> tuple[Evaluation | None, bool]:
    """Every placement of a small graph, and whether all were tried."""
    count = sum(1 for operation in problem.graph.operations.values() if not operation.host_only)
    devices = sum(1 for spec in problem.topology.devices if spec.computes)
    if devices < 2 and best is not None:
        return best, _nowhere_else(problem)
    if count > _SMALL or devices < 2 or (fetch and not problem.offload):
        return best, False
    if limits is None:
        return (best, False) if best is not None else search_all(problem, None, fetch=fetch, nodes=_FEW_NODES)
    if not limits.exhaustive:
        return best, False
    nodes = _NODES
    if count > _TINY:  # where nothing fits yet, what this search finds may be all that does
        nodes //= _SHORTER if best is None else _SHORTEST
    deadline = None if best is None else limits.until(_TRYING).deadline
    return search_all(problem, best, fetch=fetch, nodes=nodes, deadline=deadline)


def _nowhere_else(problem: Problem) -> bool:
    """Whether a weight can only be where it is read, on the one device that computes."""
    others = [spec for spec in problem.topology.devices if not spec.computes]
    return not others and not problem.fixed_weights


def _accelerators_alone(problem: Problem) -> Problem | None:
    """The same problem with nothing offloaded but what the caller has pinned; None where that cannot fit.

    The CPU may keep what nobody reads.
    """
    keys = frozenset(spec.key for spec in problem.topology.devices if spec.is_accelerator)
    if not keys:
        return None
    allowed = {name: problem.allowed.get(name, keys) for name in problem.graph.operations}
    rules = {name: (rule & keys) or rule for name, rule in allowed.items()}
    plain = replace(problem, allowed=rules, offload=False)
    return plain if _least_held(plain, keys) <= sum(problem.topology[key].room for key in keys) else None


def _least_held(problem: Problem, keys: frozenset[DeviceKey]) -> int:
    """Bytes of the weights that only these devices may read, and nothing else may hold."""
    graph, found = problem.graph, 0
    for weight in graph.weights.values():
        readers = graph.readers.get(weight.name, ())
        if readers and weight.name not in problem.fixed_weights:
            found += weight.nbytes if all(problem.allowed[reader] <= keys for reader in readers) else 0
    return found


def _best(
    problem: Problem,
    chain: Chain,
    proposals: Iterable[Evaluation | None],
    further: Iterable[Evaluation | None] = (),
) -> Evaluation | None:
    """The fastest proposal within the budgets; where none is, of the nearest of all that can be mended."""
    found = [evaluation for evaluation in proposals if evaluation is not None]
    feasible = [evaluation for evaluation in found if evaluation.feasible]
    if not feasible and len(problem.topology.devices) > 1:
        found += [evaluation for evaluation in further if evaluation is not None]
        found.sort(key=lambda evaluation: sum(evaluation.excess.values()))
        for first in range(0, len(found), _MENDED):
            mended = [repair(problem, chain, near) for near in found[first : first + _MENDED]]
            feasible = [evaluation for evaluation in mended if evaluation.feasible]
            if feasible:
                break
    return min(feasible, key=lambda evaluation: evaluation.seconds, default=None)  # the first of equals


def _in_time(proposals: Iterable[Evaluation | None], limits: Limits | None) -> list[Evaluation | None]:
    """Proposals until a part of the time is over, but one that is within the budgets if there is any."""
    until = Limits() if limits is None else limits.until(_PROPOSING)
    found, feasible = list[Evaluation | None](), False
    for proposal in proposals:
        found.append(proposal)
        feasible |= proposal is not None and proposal.feasible
        if feasible and until.over:
            break
    return found


def _known(problem: Problem, near: Assignment | None) -> list[Evaluation]:
    found = [] if near is None else [evaluate(problem, near)]
    return [evaluation for evaluation in found if evaluation.feasible]


def _infeasible(problem: Problem, found: Evaluation | None) -> InfeasibleError:
    """The error, with the budgets of ``found``, a placement that passes the given ones."""
    topology = problem.topology
    available = {spec.key: spec.memory for spec in topology.devices}
    if found is None:
        total = readable_bytes(problem.graph.weight_bytes)
        return InfeasibleError(
            f"no placement fits: the model's weights take {total}, and no growth of the given budgets "
            f"in proportion was found to do; the budgets are {_listed(available)}",
            available=available,
        )
    needed = {spec.key: found.peak(spec.key).nbytes + spec.reserve for spec in topology.devices}
    short = {key: needed[key] - available[key] for key in needed if needed[key] > available[key]}
    device = max(short, key=lambda key: short[key] / max(needed[key], 1))
    operation = found.peak(device).operation
    return InfeasibleError(
        f"no placement fits: device {device!r} needs {readable_bytes(needed[device])} for "
        f"{_described(problem, operation)}, max_memory allows {readable_bytes(available[device])}. "
        f"Budgets that would do: {_listed(needed)}",
        needed=needed,
        available=available,
        operation=operation,
        device=device,
    )


def _listed(budgets: dict[DeviceKey, int]) -> str:
    return "{" + ", ".join(f"{key!r}: {nbytes}" for key, nbytes in budgets.items()) + "}"


def _described(problem: Problem, operation: str) -> str:
    found = problem.graph.operations.get(operation)
    if found is None:
        return "its weights"
    return f"{operation!r} (in {found.module_path})" if found.module_path else repr(operation)


def _smallest(problem: Problem) -> Evaluation | None:
    """A placement for the smallest growth of all budgets, by bisection to half a percent."""
    topology = _openable(problem.topology)
    high, found = 1.0, None
    while found is None and high < 1e9:
        high *= 2
        found = sketch(replace(problem, topology=topology.scaled(high)))
    if found is None:
        return None
    low = high / 2
    while high / low > 1.005:
        middle = (low + high) / 2
        candidate = sketch(replace(problem, topology=topology.scaled(middle)))
        if candidate is None:
            low = middle
        else:
            high, found = middle, candidate
    return _sufficient(problem, found, topology.scaled(high))


def _openable(topology: Topology) -> Topology:
    """Budgets of nothing cannot grow in proportion: start them at one allocation."""
    return topology.with_memory({s.key: 512 for s in topology.devices if s.memory == 0 and s.computes})


def _sufficient(problem: Problem, found: Evaluation, limit: Topology) -> Evaluation:
    """Make sure that asking for the peaks themselves succeeds; else ask for the grown budgets."""
    peaks = {spec.key: found.peak(spec.key).nbytes + spec.reserve for spec in problem.topology.devices}
    again = sketch(replace(problem, topology=problem.topology.with_memory(peaks)))
    if again is not None:
        return found
    raised = {
        spec.key: replace(found.peak(spec.key), nbytes=limit[spec.key].room)
        for spec in problem.topology.devices
    }
    memory = replace(found.memory, peaks={**found.memory.peaks, **raised})
    return replace(found, memory=memory)
