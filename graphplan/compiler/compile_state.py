"""What the passes of the planner hand on to each other: calls, and what is placed of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from graphplan.capture.captured_graph import Part
from graphplan.capture.signature import BoundCall
from graphplan.compiler.formulation import Formulation
from graphplan.ir.cost_model import optimizer_seconds
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.slicing import slice_weights
from graphplan.passes.placement.calls.joint import Call
from graphplan.passes.placement.certificate import Solution
from graphplan.passes.placement.evaluate import Evaluation
from graphplan.passes.placement.params import Limits
from graphplan.passes.placement.problem import Problem


@dataclass(frozen=True, slots=True)
class Member:
    """One of the calls that are planned together; ``weight`` says how much its seconds count."""

    annotator: Annotator
    weight: float
    call: BoundCall


def in_parts(member: Member, parts: Sequence[Part]) -> Member:
    """The same call, with some weights computed in parts."""
    annotator = member.annotator
    return replace(member, annotator=annotator.of(slice_weights(annotator.capture, parts)))


@dataclass(frozen=True, slots=True)
class CompileState:
    """The calls to place, beside what is settled, and how long the search may take."""

    formulation: Formulation
    members: Sequence[Member]
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Trial:
    """A call, with weights in parts or with less saved, and the placement that a quick search finds."""

    member: Member
    found: Evaluation | None

    @property
    def seconds(self) -> float:
        """Of the call and of the optimizer's step after it; infinite where nothing is found."""
        return math.inf if self.found is None else with_optimizer(self.found)


def with_optimizer(found: Evaluation) -> float:
    """Seconds of a call, and of the optimizer's step after it."""
    problem = found.problem
    return found.seconds + optimizer_seconds(problem.graph, problem.topology, found.assignment.weights)


@dataclass(frozen=True)
class Choice:
    """A call that is placed.

    Attributes:
        member: the call.
        asked: its problem, and the caller's constraints apart.
        solution: of the problem with them.
    """

    member: Member
    asked: Call
    solution: Solution

    @cached_property
    def problem(self) -> Problem:
        """With the constraints."""
        return self.asked.with_homes({})

    @property
    def seconds(self) -> float:
        """Of one call, as estimated."""
        return self.solution.evaluation.seconds
