"""Place calls until the graphs are those of the placement, whose transfers may make operations take more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphplan.compiler.compile_state import Choice, CompileState
from graphplan.compiler.formulation import Member
from graphplan.devices.topology import DISK
from graphplan.ir.constraints import Constraints
from graphplan.ir.graph import Graph
from graphplan.ir.schedule import Assignment
from graphplan.passes.frontend.two_readings import upper_bound_graph
from graphplan.passes.placement.calls.joint import Call, place_jointly
from graphplan.passes.placement.calls.shared_buffers import fit_together
from graphplan.passes.placement.certificate import Bound, Solution, certify
from graphplan.passes.placement.constrain import constrain
from graphplan.passes.placement.disk import place_or_map
from graphplan.passes.placement.driver import holds_for
from graphplan.passes.placement.evaluate import Evaluation
from graphplan.warnings import warn

_ROUNDS = 4  # placements at most, each with the bytes of the previous one's transfers
_NOT_ON_DISK = (
    "with calls= no weight is left on 'disk'; give the most important example inputs alone to use it"
)


def place_calls(state: CompileState, known: Sequence[Solution] | None = None) -> list[Choice]:
    """Place the calls over one placement of weights; ``known`` solutions replace the first search.

    The graphs are those of the returned placement: their bytes are exact.

    Raises:
        InfeasibleError: no placement fits.
    """
    formulation, members = state.formulation, state.members
    captures = [member.annotator.capture for member in members]
    calls = [formulation.call(member, captures) for member in members]
    if formulation.committed.homes is None or len(calls) > 1:
        _check_named(formulation.options.constraints, calls)
    warm_starts: list[Assignment] | None = None
    bounds: list[Bound] = []  # of the graphs before any transfer, whose operations take least
    for _ in range(_ROUNDS):
        solutions = known or _place(state, calls, warm_starts)
        known = None
        bounds = bounds or [solution.bound for solution in solutions]
        warm_starts = [solution.evaluation.schedule.assignment for solution in solutions]
        graphs = [  # with the transfers of these solutions
            formulation.graph(member.annotator, solution.evaluation.schedule, captures)
            for member, solution in zip(members, solutions, strict=True)
        ]
        exact = [_with_graph(call, graph) for call, graph in zip(calls, graphs, strict=True)]
        refitted = fit_together([call.with_homes({}) for call in exact], warm_starts)
        if all(evaluation.feasible for evaluation in refitted):
            return _chosen(members, exact, refitted, bounds)
        bounded = [upper_bound_graph(old.problem.graph, new) for old, new in zip(calls, graphs, strict=True)]
        calls = [_with_graph(call, graph) for call, graph in zip(calls, bounded, strict=True)]
    evaluations = [solution.evaluation for solution in _place(state, calls, warm_starts)]
    return _chosen(members, calls, evaluations, bounds)


def _chosen(
    members: Sequence[Member],
    calls: Sequence[Call],
    evaluations: Sequence[Evaluation],
    bounds: Sequence[Bound],
) -> list[Choice]:
    """Return the choices, with the bounds of the first round as far as they hold for these placements."""
    return [
        Choice(
            member,
            call,
            certify(
                evaluation, bound if holds_for(bound.scope, call.with_homes({}), evaluation) else Bound()
            ),
        )
        for member, call, evaluation, bound in zip(members, calls, evaluations, bounds, strict=True)
    ]


def _place(
    state: CompileState, calls: Sequence[Call], warm_starts: Sequence[Assignment] | None
) -> Sequence[Solution]:
    """Place one call by itself, where weights may stay on disk, or several jointly."""
    formulation = state.formulation
    if len(calls) == 1:
        problem = calls[0].with_homes({})
        known = warm_starts[0] if warm_starts else formulation.committed.assignment_for(problem.graph)
        return [place_or_map(problem, formulation.mappable, state.limits, warm_start=known)]
    if DISK in formulation.topology:
        warn(_NOT_ON_DISK)
    return place_jointly(calls, state.limits, warm_starts=warm_starts)


def _with_graph(call: Call, graph: Graph) -> Call:
    return replace(call, problem=replace(call.problem, graph=graph))


def _check_named(constraints: Constraints, calls: Sequence[Call]) -> None:
    """Raise PlanError if the constraints name something that runs in none of the calls."""
    pinned = {name for call in calls for name in call.constraints.pin}
    grouped = {name for call in calls for group in call.constraints.groups for name in group}
    unknown = [name for group in constraints.groups for name in group if name not in grouped]
    pin = {name: key for name, key in constraints.pin.items() if name not in pinned}
    constrain(calls[0].problem, replace(constraints, pin=pin, together=unknown))
