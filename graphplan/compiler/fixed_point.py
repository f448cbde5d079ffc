"""Place calls until the bytes are those of the placement itself: its moves may make operations take more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphplan.capture.captured_graph import Capture
from graphplan.compiler.compile_state import Choice, CompileState, Member
from graphplan.compiler.formulation import Formulation
from graphplan.devices.topology import DISK
from graphplan.ir.constraints import Constraints
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

_ROUNDS = 4  # times that a placement is made again because its own moves made operations take more
_NOT_ON_DISK = (
    "with calls= no weight is left on 'disk'; give the most important example inputs alone to use it"
)


def place_calls(state: CompileState, known: Sequence[Solution] | None = None) -> list[Choice]:
    """Place the calls, all over one placement of weights; as is ``known``, if it is.

    The graphs are those of the returned placement: their bytes are exact.

    Raises:
        InfeasibleError: no placement fits.
    """
    formulation, members = state.formulation, state.members
    captures = [member.annotator.capture for member in members]
    calls = [_posed(formulation, member, captures) for member in members]
    if formulation.committed.homes is None or len(calls) > 1:
        _check_named(formulation.options.constraints, calls)
    near: list[Assignment] | None = None
    bounds: list[Bound] = []  # of the plain graphs, whose operations take least
    for _ in range(_ROUNDS):
        solutions = known or _place(state, calls, near)
        known = None
        bounds = bounds or [one.bound for one in solutions]
        near = [one.evaluation.schedule.assignment for one in solutions]
        exact = [
            _moved(formulation, member, captures, call, found)
            for member, call, found in zip(members, calls, solutions, strict=True)
        ]
        again = fit_together([call.with_homes({}) for call in exact], near)
        if all(found.feasible for found in again):
            return _chosen(members, exact, again, bounds)
        calls = [_upper_bound_call(old, new) for old, new in zip(calls, exact, strict=True)]
    last = [one.evaluation for one in _place(state, calls, near)]
    return _chosen(members, calls, last, bounds)


def _chosen(
    members: Sequence[Member], calls: Sequence[Call], found: Sequence[Evaluation], bounds: Sequence[Bound]
) -> list[Choice]:
    """With the bounds of the first round, as far as they are of placements such as these."""
    return [
        Choice(
            member, call, certify(one, bound if holds_for(bound.scope, call.with_homes({}), one) else Bound())
        )
        for member, call, one, bound in zip(members, calls, found, bounds, strict=True)
    ]


def _posed(formulation: Formulation, member: Member, together: Sequence[Capture]) -> Call:
    plain = formulation.plain(member.annotator, member.call, together)
    return Call(plain, formulation.options.constraints.within(plain.graph), member.weight)


def _place(
    state: CompileState, calls: Sequence[Call], near: Sequence[Assignment] | None
) -> Sequence[Solution]:
    """One call by itself, where weights may stay on disk; several jointly."""
    formulation = state.formulation
    if len(calls) == 1:
        problem = calls[0].with_homes({})
        known = near[0] if near else formulation.committed.known_for(problem.graph)
        return [place_or_map(problem, formulation.mappable, state.limits, near=known)]
    if DISK in formulation.topology:
        warn(_NOT_ON_DISK)
    return place_jointly(calls, state.limits, near=near)


def _moved(
    formulation: Formulation, member: Member, together: Sequence[Capture], call: Call, found: Solution
) -> Call:
    """The call with the bytes that it has when values are moved as its solution says."""
    graph = formulation.graph(member.annotator, found.evaluation.schedule, together)
    return replace(call, problem=replace(call.problem, graph=graph))


def _upper_bound_call(old: Call, new: Call) -> Call:
    graph = upper_bound_graph(old.problem.graph, new.problem.graph)
    return replace(new, problem=replace(new.problem, graph=graph))


def _check_named(constraints: Constraints, calls: Sequence[Call]) -> None:
    """Raise PlanError for a name that the caller gives and that runs in none of the calls."""
    pinned = {name for call in calls for name in call.constraints.pin}
    grouped = {name for call in calls for group in call.constraints.groups for name in group}
    lost = [name for group in constraints.groups for name in group if name not in grouped]
    pin = {name: key for name, key in constraints.pin.items() if name not in pinned}
    constrain(calls[0].problem, replace(constraints, pin=pin, together=lost))
