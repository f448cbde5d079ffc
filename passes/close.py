"""Close the gap: better placements from above, better bounds from below, until they meet or time is up.

Small, branchy and knapsack-like graphs go to the mixed-integer program; accelerators alone to labels; what
is open then to column generation, which comes first in stacks over many or unlike devices. What any of them
proposes is judged by the evaluator and refined on the fine graph. Without a time limit the work is counted,
so that the same input gives the same placement on any machine.
"""

from __future__ import annotations

from graphplan.passes.around import finer_split
from graphplan.passes.bound import Bound
from graphplan.passes.chain import Chain
from graphplan.passes.close_by_columns import Columns
from graphplan.passes.close_by_labels import search_labels, search_wider
from graphplan.passes.close_by_leads import bound_by_leads
from graphplan.passes.close_by_program import solve_program
from graphplan.passes.counts import count_units
from graphplan.passes.evaluate import Evaluation, Problem
from graphplan.passes.incumbent import ENOUGH, Incumbent
from graphplan.passes.least import Least
from graphplan.passes.limits import Limits
from graphplan.passes.parts import part_by_home
from graphplan.passes.shares import Shares

__all__ = ["close_gap"]

_LP_TOLERANCE = 1e-6
_STACKED = 5  # a graph is a stack if it has so many times more units than kinds of them
_BINARIES = 450  # decisions of a program that is solved without being asked for time
_STREAMED_BINARIES = 150
_MANY_BINARIES = 6000
_PROGRAM_SECONDS = 2.0  # below which HiGHS would rather overrun than find anything
_COUNTING_PROGRAMS = 400  # linear ones, where nobody asked for time
_PATIENCE = 100  # of these without progress
_MOST_PROGRAMS = 10_000  # all are remembered
_PROVEN = 2.5e-3  # gap from which columns are not worth the wait, where nobody asked for time
_SPLIT_SECONDS = 0.25e-3  # per operation: of a split in all places
_SPLITTING, _AGAIN = 0.3, 0.1  # of the time that it may take; and in the other order
_MANY = 5  # accelerators, with fewer of which labels find what it finds: it may take a third of that
_LEADS = 0.8  # of the time, for a bound that knows when copies are made


def close_gap(
    problem: Problem, chain: Chain, best: Evaluation, least: Least, limits: Limits
) -> tuple[Evaluation, Bound]:
    """A placement at least as good as ``best``, and a lower bound for all at least as high as ``least``'s."""
    incumbent = Incumbent(problem, chain, best, least.bound, limits)
    if not incumbent.done and sum(1 for spec in problem.topology.devices if spec.computes) > 1:
        _close(incumbent, least.shares)
    bound = incumbent.bound
    if bound.seconds > incumbent.best.seconds:
        bound = Bound(incumbent.best.seconds, bound.proof)
    return incumbent.best, bound


def _close(incumbent: Incumbent, shares: Shares) -> None:
    limits, timed = incumbent.limits, incumbent.timed
    if incumbent.problem.offload and not incumbent.done:
        _bound_streamed(incumbent, shares)
    binaries = shares.units * sum(len(kind.keys) for kind in shares.kinds)
    stacked = _STACKED * len(shares.counts) <= shares.units
    # the program knows no rings: with streaming it is worth a try where it is small
    if binaries <= (_STREAMED_BINARIES if incumbent.problem.offload else _BINARIES) and not stacked:
        solve_program(incumbent, shares, limits.until(0.6))
    parts = [] if incumbent.done else list(part_by_home(incumbent.problem, shares))
    columns = Columns(incumbent, shares, parts, stacked=stacked)
    if stacked and not incumbent.problem.offload and not incumbent.done:
        _split_finely(incumbent)
    if stacked and not incumbent.problem.offload:
        columns.run_early()
    search_labels(incumbent, shares, parts)
    if timed and _BINARIES < binaries <= _MANY_BINARIES and not stacked:
        solve_program(incumbent, shares, limits.until(0.6))
    proven = not timed and incumbent.bound.seconds >= incumbent.best.seconds * (1 - _PROVEN)
    if timed or not (proven or (incumbent.problem.offload and incumbent.problem.streams)):
        columns.run(limits.until(0.98))
    if timed:
        if binaries <= _MANY_BINARIES and (limits.left or 0.0) > _PROGRAM_SECONDS:
            solve_program(incumbent, shares, limits.until(0.6))  # it overruns
        search_wider(incumbent, parts)
        incumbent.refine_to_the_end()


def _bound_streamed(incumbent: Incumbent, shares: Shares) -> None:
    """By how much there is of each sort, and by prices and labels; those first that prove more."""
    timed, limits = incumbent.timed, incumbent.limits
    if sum(1 for spec in incumbent.problem.topology.devices if spec.is_accelerator) > 1:
        _count(incumbent, shares)
        if timed and not incumbent.done:
            bound_by_leads(incumbent, limits.until(_LEADS))
        return
    bound_by_leads(incumbent, limits.until(_LEADS))
    if not incumbent.done:
        _count(incumbent, shares)


def _split_finely(incumbent: Incumbent) -> None:
    """In a stack, what a device holds more or less than its neighbour is a projection or two."""
    limits = incumbent.limits
    each = _SPLIT_SECONDS * len(incumbent.problem.graph.operations)
    if sum(1 for spec in incumbent.problem.topology.devices if spec.is_accelerator) < _MANY:
        each *= 3
    for small_first, share in ((True, _SPLITTING), (False, _AGAIN)):
        if not incumbent.done and (limits.left is None or each <= share * limits.left):
            found = finer_split(incumbent.problem, incumbent.best, small_first=small_first)
            if found is not None:
                incumbent.adopt(found)


def _count(incumbent: Incumbent, shares: Shares) -> None:
    """Bound what is streamed by how much there is of each sort."""
    limits = incumbent.limits.until(0.3)
    seconds, sorts = count_units(
        shares,
        upper=incumbent.best.seconds,
        gap=ENOUGH / 2,
        programs=_MOST_PROGRAMS if incumbent.timed else _COUNTING_PROGRAMS,
        patience=None if incumbent.timed else _PATIENCE,
        deadline=limits.deadline,
    )
    proof = f"program of the counts of {sorts} sorts of operations"
    incumbent.raise_bound(seconds * (1 - _LP_TOLERANCE), proof)
