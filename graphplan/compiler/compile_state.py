"""State that the passes of the planner share: the calls to plan, and the placement of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from graphplan.capture.captured_graph import Part
from graphplan.compiler.formulation import Formulation, Member
from graphplan.ir.cost_model import optimizer_seconds
from graphplan.passes.frontend.slicing import slice_weights
from graphplan.passes.placement.calls.joint import Call
from graphplan.passes.placement.certificate import Bound, Solution
from graphplan.passes.placement.evaluate import Evaluation
from graphplan.passes.placement.params import Limits
from graphplan.passes.placement.problem import Problem


def in_parts(member: Member, parts: Sequence[Part]) -> Member:
    """Return the same call with weights sliced into these parts, if there are any."""
    annotator = member.annotator
    if not parts:
        return member
    return replace(member, annotator=annotator.of(slice_weights(annotator.capture, parts)))


@dataclass(frozen=True, slots=True)
class CompileState:
    """The calls to place, the formulation of their problems, and the limits of the search."""

    formulation: Formulation
    members: Sequence[Member]
    limits: Limits


@dataclass(frozen=True, slots=True)
class Trial:
    """A call with weights in parts or with less saved, and the placement of a quick search, if any."""

    member: Member
    evaluation: Evaluation | None

    @property
    def seconds(self) -> float:
        """Seconds of the call and of the optimizer's step after it; infinite without a placement."""
        return math.inf if self.evaluation is None else with_optimizer(self.evaluation)


def with_optimizer(evaluation: Evaluation) -> float:
    """Return the seconds of a call and of the optimizer's step after it."""
    problem = evaluation.problem
    return evaluation.seconds + optimizer_seconds(
        problem.graph, problem.topology, evaluation.assignment.weights
    )


@dataclass(frozen=True)
class Choice:
    """A placed call.

    Attributes:
        member: the call.
        call: its problem without the caller's constraints, and these constraints.
        solution: solution of the constrained problem.
    """

    member: Member
    call: Call
    solution: Solution

    @cached_property
    def problem(self) -> Problem:
        """The constrained problem."""
        return self.call.with_homes({})

    def with_bound(self, bound: Bound) -> Choice:
        """Return the choice with another lower bound."""
        return replace(self, solution=replace(self.solution, bound=bound))

    @property
    def seconds(self) -> float:
        """Estimated seconds of one call."""
        return self.solution.evaluation.seconds
