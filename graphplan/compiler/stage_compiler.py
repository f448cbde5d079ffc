"""One stage of a model over several machines, cut out of a capture: placed and lowered as a model is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphplan.analysis.plan import Plan
from graphplan.capture.model_copy import ModelCopy
from graphplan.capture.model_weights import ModelWeights
from graphplan.capture.partial_model import StageModule, partial_model
from graphplan.capture.signature import BoundCall
from graphplan.compiler.compile_state import Choice, CompileState, Member
from graphplan.compiler.earlier_plans import Commitments
from graphplan.compiler.formulation import Formulation, Options
from graphplan.compiler.pipeline import Compiler, check_budgets, plan_of
from graphplan.devices.topology import CPU, Topology
from graphplan.ir.cluster_plan_data import Crossing
from graphplan.ir.schedule import Assignment, Schedule
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.tensor_meta import dtype_name
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_capture import StageCapture, cut_capture
from graphplan.passes.placement.certificate import Bound, certify
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.joint import Call


@dataclass(frozen=True, slots=True)
class StageSource:
    """A stage, cut out, before it is placed anywhere.

    Attributes:
        cut: its capture.
        module: holds the weights that it reads.
        model_copy: of ``module``.
        annotator: of the capture.
    """

    cut: StageCapture
    module: StageModule
    model_copy: ModelCopy
    annotator: Annotator

    @property
    def receives(self) -> tuple[Crossing, ...]:
        """What comes from the stage before."""
        return self._crossings(self.cut.received)

    @property
    def sends(self) -> tuple[Crossing, ...]:
        """What goes to the stage after, or is returned."""
        return self._crossings(self.cut.sent)

    def _crossings(self, names: Sequence[str]) -> tuple[Crossing, ...]:
        sizes = self.cut.sizes
        return tuple(
            Crossing(name, sizes[name].copy_bytes, sizes[name].shape, dtype_name(sizes[name].dtype))
            for name in names
        )

    def example(self, device: str = "meta") -> BoundCall:
        """A call of the stage, of the sizes that the plan is for."""
        sizes, numbers = self.cut.sizes, self.cut.numbers
        values: list[Any] = [
            numbers[name]
            if name in numbers
            else torch.empty(sizes[name].shape, dtype=sizes[name].dtype, device=device)
            for name in self.cut.inputs
        ]
        return self.model_copy.bind(values, {})

    def compiler(self, topology: Topology, options: Options, given: Plan | None = None) -> Compiler:
        """Plans and lowers calls of the stage on one machine."""
        made = Compiler(self.model_copy, topology, options, given=given)
        made.adopt(self.annotator)
        return made


def stage_source(
    annotator: Annotator, boundaries: Boundaries, weights: ModelWeights, start: int, end: int
) -> StageSource:
    """The stage of the operations from ``start`` to ``end`` of an annotated call."""
    cut = cut_capture(annotator.capture, boundaries, start, end)
    read = dict.fromkeys(cut.capture.weights.values())
    module = partial_model(weights, [name for name in read if name not in cut.capture.constants])
    model_copy = ModelCopy(module)
    return StageSource(cut, module, model_copy, annotator.of(cut.capture, model_copy.weights))


def with_buffers(topology: Topology, nbytes: int) -> Topology:
    """The devices of a machine, less what its network buffers take of the CPU's budget, if it has one."""
    devices = (
        replace(spec, taken=spec.taken + nbytes) if spec.device == CPU else spec for spec in topology.devices
    )
    return replace(topology, devices=tuple(devices))


def plan_like(
    source: StageSource, topology: Topology, options: Options, assignment: Assignment, bound: Bound
) -> Plan | None:
    """The plan of a stage that is placed as an equal one was; None where it does not fit so.

    Args:
        source: the stage.
        topology: of its machine.
        options: of the compiler.
        assignment: of the equal stage, in the names of this one.
        bound: of the equal stage.
    """
    formulation = Formulation(topology, options, Commitments())
    call = source.example()
    plain = formulation.plain(source.annotator, call)
    schedule = Schedule((), assignment, plain.host, plain.returns_to_host)
    problem = replace(plain, graph=formulation.graph(source.annotator, schedule))
    found = evaluate(problem, assignment)
    if not found.feasible:
        return None
    asked = Call(problem, options.constraints.within(problem.graph), 1.0)
    choice = Choice(source.annotator, asked, asked.with_homes({}), certify(found, bound))
    check_budgets(CompileState(formulation, [Member(source.annotator, 1.0, call)], choices=[choice]))
    return plan_of(choice)
