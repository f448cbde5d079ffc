"""One stage of a model over several machines, cut out of a capture: placed and lowered as a model is."""

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
from graphplan.compiler.compile_state import Choice, Member
from graphplan.compiler.earlier_plans import Commitments
from graphplan.compiler.formulation import Formulation, Options
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
from graphplan.passes.placement.calls.joint import Call
from graphplan.passes.placement.certificate import Bound, certify
from graphplan.passes.placement.evaluate import evaluate


class StageModule(nn.Module):
    """Holds weights under the names that they have in the model; its placed copy runs the stage's graph."""

    def forward(self, *values: torch.Tensor, **trace: tuple[()]) -> Any:
        """Nothing: only its graph says what it computes."""
        del values, trace
        raise InputError(
            "a stage runs only as the model was placed: under the same autocast, with the same parameters "
            "requiring gradients. Place the model again after such a change, on all ranks"
        )


@dataclass(frozen=True, slots=True)
class StageSource:
    """A stage, cut out, before it is placed anywhere.

    Attributes:
        cut: its capture.
        module: holds the weights that it reads.
        model_copy: of ``module``.
        annotator: of the capture.
        trained: values that it takes or computes and that depend on a parameter which requires a gradient.
        how: what its training step differentiates; None for a forward pass alone.
        step: of the training step, likewise.
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
        """Of what is placed: the training step if there is one."""
        return self.step or self.annotator

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

    def example(self, device: str = "meta", values: Sequence[Any] = ()) -> BoundCall:
        """A call of the stage, of the sizes that the plan is for, or with these values."""
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
        """Plans and lowers calls of the stage on one machine."""
        made = Compiler(self.model_copy, topology, options, given=given)
        self.adopt_in(made)
        return made

    def adopt_in(self, compiler: Compiler) -> None:
        """Let a compiler serve calls of the stage; it plans the training step first if there is one."""
        compiler.model_copy.step = None
        compiler.captures.adopt(self.annotator)
        if self.step is not None:
            compiler.model_copy.step = self.how
            compiler.captures.adopt(self.step)

    def drop_from(self, compiler: Compiler) -> None:
        """Undo :meth:`adopt_in`, where there was no room."""
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
    """The stage of the operations from ``start`` to ``end`` of an annotated call, of whose values some are
    ``trained``, as :func:`graphplan.compiler.training.trained_values` has found; ``trace`` is as in
    :class:`~graphplan.passes.pipeline.cut_capture.StageCapture`.
    """
    cut = cut_capture(annotator.capture, boundaries, start, end, trace)
    read = dict.fromkeys(cut.capture.weights.values())
    module = _partial_model(weights, [name for name in read if name not in cut.capture.constants])
    model_copy = ModelCopy(module)
    own = annotator.of(cut.capture, model_copy.weights)
    return StageSource(cut, module, model_copy, own, frozenset(trained & {*cut.inputs, *cut.outputs}))


def _partial_model(weights: ModelWeights, names: Iterable[str]) -> StageModule:
    """A module with these weights of a model, which it shares: each under all of its names."""
    root, wanted = StageModule(), set(names)
    for name, first in weights.first.items():  # in the order of the model, so that first names stay first
        if first in wanted and name not in weights.noted:  # what is comes with its parameter
            path, _, own = name.rpartition(".")
            part, tensor = module_at(root, path), weights.tensors[first]
            if name in weights.parameters:
                part.register_parameter(own, tensor)  # type: ignore[arg-type]  # it is one in the model
            else:
                part.register_buffer(own, tensor, persistent=name in weights.persistent)
    if lost := wanted - named_tensors(root).keys():
        raise PlanError(
            f"{min(lost)!r} is an attribute of a parameter that is in another stage: register it as a buffer"
        )
    return root.eval()


def buffer_bytes(received: int, sent: int, flight: Flight, *, last: bool) -> int:
    """Bytes of network buffers of a stage: both directions, all microbatches.

    A microbatch brings ``received`` bytes, and leaves with ``sent``; nothing comes back to the last stage.
    """
    return flight.microbatches * (flight.crossings * received + (1 if last else flight.crossings) * sent)


def with_buffers(topology: Topology, nbytes: int) -> Topology:
    """The devices of a machine, less what its network buffers take of the CPU's budget, if it has one."""
    return withholding(topology, {spec.key: nbytes for spec in topology.devices if spec.device == CPU})


def withholding(topology: Topology, nbytes: Mapping[DeviceKey, int]) -> Topology:
    """The devices of a machine, less these bytes of their budgets."""
    devices = (replace(spec, taken=spec.taken + nbytes.get(spec.key, 0)) for spec in topology.devices)
    return replace(topology, devices=tuple(devices))


def plan_like(
    source: StageSource, topology: Topology, options: Options, assignment: Assignment, bound: Bound
) -> Plan | None:
    """The plan of a stage that is placed as an equal one was; None where it does not fit so.

    The assignment is that of the equal stage, in the names of this one; so is the bound.
    """
    formulation = Formulation(topology, options, Commitments())
    call = source.example()
    plain = formulation.plain(source.planned, call)
    schedule = Schedule((), assignment, plain.host, plain.returns_to_host)
    problem = replace(plain, graph=formulation.graph(source.planned, schedule))
    found = evaluate(problem, assignment)
    if not found.feasible:
        return None
    asked = Call(problem, options.constraints.within(problem.graph), 1.0)
    choice = Choice(Member(source.planned, 1.0, call), asked, certify(found, bound))
    check_budgets([choice])
    return plan_of(choice)
