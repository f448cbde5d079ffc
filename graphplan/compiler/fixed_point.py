"""Place calls until the bytes are those of the placement itself: its moves may make operations take more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphplan.capture.signature import BoundCall
from graphplan.compiler.formulation import Company, Formulation
from graphplan.devices.topology import DISK
from graphplan.ir.constraints import Constraints
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.upper_bound_graph import upper_bound_graph
from graphplan.passes.placement.certificate import Bound, Solution, certify
from graphplan.passes.placement.constrain import constrain
from graphplan.passes.placement.disk import place_or_map
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.joint import Call, place_jointly
from graphplan.passes.placement.limits import Limits
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.shared_buffers import fit_together
from graphplan.warnings import warn

__all__ = ["Choice", "Member", "solve", "solve_together"]

_ROUNDS = 4  # times that a placement is made again because its own moves made operations take more
_NOT_ON_DISK = (
    "with several example calls no weight is left on 'disk'; give the most important call alone to use it"
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A capture, annotated, as a problem, and the solution of it.

    Attributes:
        annotator: of the capture.
        asked: the problem and the caller's constraints apart.
        problem: with them.
        solution: of the problem.
    """

    annotator: Annotator
    asked: Call
    problem: Problem
    solution: Solution

    @property
    def seconds(self) -> float:
        """Of one call, as modelled."""
        return self.solution.evaluation.seconds


@dataclass(frozen=True, slots=True)
class Member:
    """One of several calls that are planned together.

    Attributes:
        annotator: of what was captured.
        weight: how much its seconds count.
        call: the example.
    """

    annotator: Annotator
    weight: float
    call: BoundCall


def solve(formulation: Formulation, annotator: Annotator, call: BoundCall | None, limits: Limits) -> Choice:
    """Place a call.

    The graph that is returned is that of the returned placement: its bytes are exact.

    Raises:
        InfeasibleError: no placement fits.
    """
    plain = formulation.plain(annotator, call)
    constraints = formulation.constraints(plain.graph)
    asked, problem = Call(plain, constraints, 1.0), constrain(plain, constraints)
    near = formulation.committed.known_for(problem.graph)
    bound: Bound | None = None  # of the plain graph, whose operations take least
    for _ in range(_ROUNDS):
        solution = place_or_map(problem, formulation.mappable, limits, near=near)
        bound = bound or Bound(solution.lower_bound, solution.proof)
        near = solution.evaluation.schedule.assignment
        moved = formulation.graph(annotator, solution.evaluation.schedule)
        exact = constrain(replace(plain, graph=moved), constraints)
        if exact.graph == problem.graph:
            return Choice(annotator, asked, problem, certify(solution.evaluation, bound))
        again = evaluate(exact, solution.evaluation.schedule.assignment)
        if again.feasible:
            return Choice(annotator, asked, exact, certify(again, bound))
        problem = replace(exact, graph=upper_bound_graph(problem.graph, exact.graph))
    solution = place_or_map(problem, formulation.mappable, limits, near=near)
    return Choice(annotator, asked, problem, certify(solution.evaluation, bound or Bound()))


def solve_together(
    formulation: Formulation, members: Sequence[Member], *, advise: bool = True
) -> list[Choice]:
    """As :func:`solve`, for several calls over one placement of weights.

    ``advise`` as in :func:`graphplan.passes.placement.joint.place_jointly`.
    """
    if DISK in formulation.topology:
        warn(_NOT_ON_DISK)
    company = _company(members)
    calls = []
    for member in members:
        plain = formulation.plain(member.annotator, member.call, company)
        calls.append(Call(plain, formulation.options.constraints.within(plain.graph), member.weight))
    _check_named(formulation.options.constraints, calls)
    limits = Limits.within(formulation.options.time_limit)
    bounds: list[Bound] = []  # of the plain graphs, whose operations take least
    for _ in range(_ROUNDS):
        solutions = place_jointly(calls, limits, advise=advise)
        bounds = bounds or [Bound(one.lower_bound, one.proof) for one in solutions]
        exact = [
            _moved(formulation, member, company, call, found)
            for member, call, found in zip(members, calls, solutions, strict=True)
        ]
        again = fit_together(
            [call.with_homes({}) for call in exact],
            [found.evaluation.schedule.assignment for found in solutions],
        )
        if all(found.feasible for found in again):
            return _choices(members, exact, again, bounds)
        calls = [_upper_bound_call(old, new) for old, new in zip(calls, exact, strict=True)]
    last = place_jointly(calls, limits, advise=advise)
    return _choices(members, calls, [one.evaluation for one in last], bounds)


def _choices(
    members: Sequence[Member], calls: Sequence[Call], found: Sequence[Evaluation], bounds: Sequence[Bound]
) -> list[Choice]:
    return [
        Choice(member.annotator, call, call.with_homes({}), certify(one, bound))
        for member, call, one, bound in zip(members, calls, found, bounds, strict=True)
    ]


def _company(members: Sequence[Member]) -> Company:
    constants: dict[str, torch.Tensor] = {}
    for member in members:
        constants |= member.annotator.capture.constants
    return Company(constants, [name for member in members for name in member.annotator.capture.states])


def _moved(formulation: Formulation, member: Member, company: Company, call: Call, found: Solution) -> Call:
    """The call with the bytes that it has when values are moved as its solution says."""
    graph = formulation.graph(member.annotator, found.evaluation.schedule, company)
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
