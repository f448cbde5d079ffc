"""What the passes of the planner hand on to each other: calls, what is placed of each, and its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graphplan.capture.captured_graph import Part
from graphplan.capture.signature import BoundCall
from graphplan.compiler.formulation import Formulation
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.slicing import slice_weights
from graphplan.passes.placement.calls.joint import Call
from graphplan.passes.placement.certificate import Solution
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
class Choice:
    """A capture, annotated, as a problem, and the solution of it."""

    annotator: Annotator  # of the capture
    asked: Call  # the problem and the caller's constraints apart
    problem: Problem  # with them
    solution: Solution  # of the problem

    @property
    def seconds(self) -> float:
        """Of one call, as estimated."""
        return self.solution.evaluation.seconds


@dataclass(frozen=True, slots=True)
class CompileState:
    """How far the planning of calls has come; there are no ``choices`` before they are placed."""

    formulation: Formulation
    members: Sequence[Member]
    limits: Limits = field(default_factory=Limits)
    choices: Sequence[Choice] = ()
