"""A stage of a model over several machines: cut out of a capture, then placed and lowered like a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphplan.analysis.plan import Plan
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import ModelWeights, module_at, named_tensors
from graphplan.capture.model.modes import Differentiation
from graphplan.capture.signature import BoundCall
from graphplan.compiler.compile_state import Choice
from graphplan.compiler.earlier_plans import Commitments
from graphplan.compiler.formulation import Formulation, Member, Options
from graphplan.compiler.pipeline import Compiler, check_budgets, plan_of
from graphplan.devices.topology import CPU, DeviceKey, Topology
from graphplan.errors import InputError, PlanError
from graphplan.ir.cluster.flight import Flight
from graphplan.ir.cluster.machine_stage import Crossing
from graphplan.ir.schedule import Assignment, Schedule
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.tensor_meta import dtype_name
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_capture import StageCapture, cut_capture
from graphplan.passes.placement.certificate import Bound, certify
from graphplan.passes.placement.evaluate import evaluate


class StageModule(nn.Module):
    """Holds weights under their names in the model; its placed copy runs the stage's graph."""

    def forward(self, *values: torch.Tensor, **trace: tuple[()]) -> Any:
        """Raise InputError: a stage has no code of its own, only a graph."""
        del values, trace
        raise InputError(
            "this call would need code that a stage does not have: autocast or requires_grad has changed "
            "since the model was placed. Place it again on all ranks"
        )


@dataclass(frozen=True, slots=True)
class StageSource:
    """A stage that is cut out of a capture, but not placed.

    Attributes:
        cut: its capture.
        module: holds the weights that it reads.
        model_copy: copy of ``module`` to trace.
        annotator: annotator of the capture.
        trained: its inputs and outputs that depend on a parameter which requires a gradient.
        how: results and parameters that its training step differentiates; None for a forward pass alone.
        step: annotator of the training step; None for a forward pass alone.
    """

    cut: StageCapture
    module: StageModule
    model_copy: ModelCopy
    annotator: Annotator
    trained: frozenset[str] = frozenset()
    how: Differentiation | None = None
    step: Annotator | None = None

    @property
    def planned(self) -> Annotator:
        """The annotator of the training step if there is one, else of the forward pass."""
        return self.step or self.annotator

    @property
    def receives(self) -> tuple[Crossing, ...]:
        """The tensors that come from the stage before."""
        return self._crossings(self.cut.received)

    @property
    def sends(self) -> tuple[Crossing, ...]:
        """The tensors that go to the stage after, or are returned."""
        return self._crossings(self.cut.sent)

    def _crossings(self, names: Sequence[str]) -> tuple[Crossing, ...]:
        sizes = self.cut.sizes
        return tuple(
            Crossing(name, sizes[name].copy_bytes, sizes[name].shape, dtype_name(sizes[name].dtype))
            for name in names
        )

    def example(self, device: str = "meta", values: Sequence[Any] = ()) -> BoundCall:
        """Return a call of the stage with these values, or with tensors of the sizes that the plan is for."""
        sizes, numbers = self.cut.sizes, self.cut.numbers
        given = list(values) or [
            numbers[name]
            if name in numbers
            else torch.empty(sizes[name].shape, dtype=sizes[name].dtype, device=device)
            for name in self.cut.inputs
        ]
        for name, value in zip(self.cut.inputs, given, strict=True):
            if name in self.trained and isinstance(value, torch.Tensor):
                value.requires_grad_()
        return self.model_copy.bind(given, {self.cut.trace: ()})

    def compiler(self, topology: Topology, options: Options, given: Plan | None = None) -> Compiler:
        """Return a compiler for calls of the stage on one machine."""
        compiler = Compiler(self.model_copy, topology, options, given_plan=given)
        self.adopt_in(compiler)
        return compiler

    def adopt_in(self, compiler: Compiler) -> None:
        """Let a compiler serve calls of the stage, first of its training step if there is one."""
        compiler.model_copy.step = None
        compiler.captures.adopt(self.annotator)
        if self.step is not None:
            compiler.model_copy.step = self.how
            compiler.captures.adopt(self.step)

    def drop_from(self, compiler: Compiler) -> None:
        """Undo :meth:`adopt_in`, after a placement found no room."""
        for annotator in (self.annotator, self.step):
            if annotator is not None:
                compiler.captures.drop(annotator)


def stage_source(
    annotator: Annotator,
    boundaries: Boundaries,
    weights: ModelWeights,
    start: int,
    end: int,
    trained: Set[str] = frozenset(),
    trace: str = "trace",
) -> StageSource:
    """Return the stage of the operations from ``start`` to ``end`` of an annotated call.

    ``trained`` is the result of :func:`graphplan.compiler.training.trained_values`; ``trace`` is as in
    :class:`~graphplan.passes.pipeline.cut_capture.StageCapture`.
    """
    cut = cut_capture(annotator.capture, boundaries, start, end, trace)
    read = dict.fromkeys(cut.capture.weights.values())
    module = _partial_model(weights, [name for name in read if name not in cut.capture.constants])
    model_copy = ModelCopy(module)
    own = annotator.of(cut.capture, model_copy.weights)
    return StageSource(
        cut, module, model_copy, annotator=own, trained=frozenset(trained & {*cut.inputs, *cut.outputs})
    )


def _partial_model(weights: ModelWeights, names: Iterable[str]) -> StageModule:
    """Return a module that shares these weights with the model, each under all of its names."""
    root, wanted = StageModule(), set(names)
    for name, first in weights.first.items():  # in the order of the model, so that first names stay first
        if first in wanted and name not in weights.parameter_attributes:  # these come with their parameters
            path, _, attribute = name.rpartition(".")
            part, tensor = module_at(root, path), weights.tensors[first]
            if name in weights.parameters:
                part.register_parameter(attribute, tensor)  # type: ignore[arg-type]  # it is one in the model
            else:
                part.register_buffer(attribute, tensor, persistent=name in weights.persistent)
    if lost := wanted - named_tensors(root).keys():
        raise PlanError(
            f"{min(lost)!r} is an attribute of a parameter that is in another stage: register it as a buffer"
        )
    return root.eval()


def buffer_bytes(received: int, sent: int, results: int, flight: Flight, *, last: bool) -> int:
    """Return the bytes of a stage's network buffers: both directions, all microbatches.

    A microbatch brings ``received`` bytes, and leaves with ``sent``; nothing comes back to the last stage.
    If all machines get ``results``, they come after the other buffers are freed.
    """
    crossing = flight.crossings * received + (1 if last else flight.crossings) * sent
    return flight.microbatches * max(crossing, results if flight.results_on_all else 0)


def summing_bytes(topology: Topology, gradients: Iterable[int]) -> int:
    """Return the bytes of host memory through which gradients of shared weights pass, one at a time."""
    return max(gradients, default=0) if topology.accelerators else 0


def with_buffers(topology: Topology, nbytes: int) -> Topology:
    """Return the machine with its network buffers withheld from the CPU's budget, if it has one."""
    return withholding(topology, {spec.key: nbytes for spec in topology.devices if spec.device == CPU})


def withholding(topology: Topology, nbytes: Mapping[DeviceKey, int]) -> Topology:
    """Return the machine with these bytes withheld from its devices' budgets."""
    devices = (replace(spec, taken=spec.taken + nbytes.get(spec.key, 0)) for spec in topology.devices)
    return replace(topology, devices=tuple(devices))


def plan_like(
    source: StageSource, topology: Topology, options: Options, assignment: Assignment, bound: Bound
) -> Plan | None:
    """Return the plan of a stage that is placed like an equal one; None if it does not fit.

    ``assignment`` and ``bound`` are those of the equal stage, the assignment in the names of this one.
    """
    formulation = Formulation(topology, options, Commitments())
    member = Member(source.planned, source.example())
    call = formulation.call(member)
    schedule = Schedule((), assignment, call.problem.host, call.problem.returns_to_host)
    problem = replace(call.problem, graph=formulation.graph(source.planned, schedule))
    evaluation = evaluate(problem, assignment)
    if not evaluation.feasible:
        return None
    choice = Choice(member, replace(call, problem=problem), certify(evaluation, bound))
    check_budgets([choice])
    return plan_of(choice)
