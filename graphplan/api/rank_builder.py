"""What one rank runs of a model over several machines, of the first call and of calls of other sizes."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphplan._compat.torch import group_of
from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.analysis.plan import Plan
from graphplan.api.arguments import Request
from graphplan.api.placer import Placer, Recipe
from graphplan.capture.model_copy import ModelCopy
from graphplan.capture.model_weights import ModelWeights
from graphplan.capture.signature import BoundCall
from graphplan.compiler.cluster_call import Wires, rebuild_result, traced_inputs
from graphplan.compiler.cluster_planning import Cluster
from graphplan.compiler.pipeline import AHEAD, Compiler
from graphplan.compiler.stage_compiler import (
    StageSource,
    buffer_bytes,
    stage_source,
    with_buffers,
    withholding,
)
from graphplan.compiler.stage_step import Kept, plan_step, with_step
from graphplan.compiler.training import trainable, trained_values
from graphplan.devices.max_memory import require_present
from graphplan.devices.topology import Topology
from graphplan.errors import InfeasibleError, InputError
from graphplan.integrations.transformers.cluster_generate import generator_of
from graphplan.ir.machine_stage import MachineStage
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_capture import results_of
from graphplan.passes.pipeline.stage_positions import stage_positions
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.distributed.agreement import on_all, require_same, tell_all
from graphplan.runtime.distributed.cluster_module import ClusterCall, ClusterModule, Form, Loss
from graphplan.runtime.distributed.sent_weights import ranks_without_data, send_weights
from graphplan.runtime.distributed.shared_gradients import SharedGradients
from graphplan.runtime.distributed.stage_runner import StageProgram, StageRunner, make_ready
from graphplan.runtime.weights.storage import like

logger = logging.getLogger("graphplan")


@dataclass(slots=True)
class RankBuilder:
    """Makes what one rank runs.

    Attributes:
        request: the whole model, whose weights may be on the meta device, and the caller's options.
        annotated: traces one microbatch, for its sizes or larger ones.
        cluster: all machines.
        plan: of all machines.
        source: a checkpoint to read weights from.
        everywhere: whether all ranks get results.
        compiler: of this rank's stage.
        placed: this rank's stage.
        order: the operations of the plan's call.
        cuts: by the trace of a call, and what :meth:`_key` adds.
        runners: by that and by the sizes of what crosses the network.
        traffic: bytes that this rank has sent, by name of the value.
        group: of the ranks that have stages; None for all.
    """

    request: Request
    annotated: Callable[[BoundCall, float], Annotator]
    cluster: Cluster
    plan: ClusterPlan
    source: Checkpoint | None
    everywhere: bool = field(kw_only=True)
    compiler: Compiler | None = None
    placed: nn.Module | None = None
    order: tuple[str, ...] = ()
    cuts: dict[Hashable, _RankCut] = field(default_factory=dict)
    runners: dict[Any, StageRunner] = field(default_factory=dict)
    traffic: Counter[str] = field(default_factory=Counter)
    group: dist.ProcessGroup | None = None

    def build(self, annotator: Annotator) -> ClusterModule:
        """The module that the rank calls."""
        self.group = group_of(self._ranks)
        rank = dist.get_rank()
        stage = next(iter(self.plan.stages_of(rank)), None)
        boundaries = Boundaries(annotator.graph())
        self.order = tuple(boundaries.graph.operations)
        weights, cut = self._weights(), None
        if stage is not None:
            trained = self._trained(annotator) if self.cluster.flight.train else frozenset[str]()
            cut = stage_source(annotator, boundaries, weights, stage.start, stage.end, trained)
        if stage is not None and cut is not None:
            topology = with_buffers(self.cluster.machines[rank], stage.buffer_bytes)
            topology = withholding(topology, stage.kept_bytes)
            self.placed = on_all("placing the stages", lambda: self._place(stage, cut, topology))
        else:
            tell_all("placing the stages", None)
        model, options = self.request.model, self.request.options
        made = ClusterModule(
            self.plan,
            self.placed,
            self.request.model_copy.signature,
            self.prepare,
            training=model.training,
            everywhere=self.everywhere,
            traffic=self.traffic,
            shared=SharedGradients(self._shared_parameters() if options.differentiates else {}),
        )
        made.generate_with(generator_of(model, made.forward_in_place, self._ranks[-1], self.traffic))
        return made

    @property
    def _ranks(self) -> list[int]:
        return [stage.machine for stage in self.plan.stages]

    def _shared_parameters(self) -> dict[str, tuple[int, ...]]:
        """Parameter that several stages read -> their ranks."""
        parameters, readers = self.request.model_copy.weights.parameters, dict[str, tuple[int, ...]]()
        for stage in self.plan.stages:
            for name in stage.plan.graph.weights.keys() & parameters:
                readers[name] = (*readers.get(name, ()), stage.machine)
        return {name: ranks for name, ranks in sorted(readers.items()) if len(ranks) > 1}

    def _weights(self) -> ModelWeights:
        """The model's, with the data from rank 0 of what this rank's stage reads and has no data for."""
        weights = self.request.model_copy.weights
        if self.source is not None:
            return weights
        lacking = ranks_without_data(weights.tensors)
        wanted = {
            stage.machine: [n for n in stage.plan.graph.weights if n in weights.tensors]
            for stage in self.plan.stages
            if stage.machine in lacking
        }
        found = copy.copy(weights)
        found.tensors = dict(weights.tensors)
        for name, data in send_weights(weights.tensors, wanted).items():
            found.tensors[name] = like(weights.tensors[name], data, {})
        return found

    def _place(self, stage: MachineStage[Plan], cut: StageSource, topology: Topology) -> nn.Module:
        require_present(topology)
        model_copy = ModelCopy(cut.module)
        cut = replace(
            cut, model_copy=model_copy, annotator=cut.annotator.of(cut.cut.capture, model_copy.weights)
        )
        if self.cluster.flight.train:
            cut = with_step(cut, topology.computing_types)
        self.compiler = cut.compiler(topology, self.request.options, stage.plan)
        placer = Placer(
            Recipe(topology, self.request.options, strict=True), self.source, compiler=self.compiler
        )
        return placer.place(cut.module, model_copy, cut.example("cpu"))

    def prepare(self, micro: BoundCall, form: Form) -> ClusterCall:
        """How calls like this one are run, on all ranks at once: traced anew where sizes are new.

        While text is generated, there is to be room for more of it, if there is.

        Raises:
            InputError: the call takes caches, which only ``generate`` keeps where they are.
        """
        for ahead in AHEAD if form.caches_stay else ():
            try:
                return self._prepared(micro, form, ahead)
            except InfeasibleError as error:
                logger.info("no room for such sizes: %s", error)
        return self._prepared(micro, form, 0.0)

    def _prepared(self, micro: BoundCall, form: Form, ahead: float) -> ClusterCall:
        stay = form.caches_stay
        annotator = self._annotated(micro, form, ahead)
        capture, key = annotator.capture, self._key(annotator, form)
        if capture.caches and not stay:
            raise InputError(f"{', '.join(capture.caches)}: over several machines, generate() keeps caches")
        wires = Wires(capture, micro, self._trained(annotator))
        if key not in self.cuts:
            self.cuts[key] = on_all(
                "placing a call of other sizes", lambda: self._cut(annotator, wires, form)
            )
        return ClusterCall(
            self._runner(key, wires, 1 if stay else self.plan.microbatches),
            lambda part: traced_inputs(capture, part),
            [wires.of(name) for name in results_of(capture, caches_stay=stay)],
            lambda results, call: rebuild_result(capture, wires, results, call),
            self._ranks[-1],
            lambda loss: self._trainer(
                key, wires, lambda made: rebuild_result(capture, wires, made, micro), loss
            ),
        )

    def _annotated(self, micro: BoundCall, form: Form, ahead: float) -> Annotator:
        """The call, traced; only where that is new, ranks tell each other."""
        try:
            found = self.annotated(micro, ahead)
        except Exception as error:  # whatever it is, all ranks are to hear of it
            tell_all("tracing the model", error)
            raise
        if self._key(found, form) not in self.cuts:
            tell_all("tracing the model", None)
            require_same({"the inputs of this call": repr(form)})
        return found

    def _key(self, annotator: Annotator, form: Form) -> Hashable:
        """What a call is cut by: a training step has sizes of its own, a forward pass serves several."""
        planned = form.trains and self.cluster.flight.train
        return id(annotator), form.caches_stay, form.call if planned else None

    def _trained(self, annotator: Annotator) -> frozenset[str]:
        """Values of which gradients are sent back in a training step."""
        if not self.request.options.differentiates:
            return frozenset()
        return trained_values(annotator.capture, trainable(self.request.model_copy.weights))

    def _cut(self, annotator: Annotator, wires: Wires, form: Form) -> _RankCut:
        """The stages of a call, this rank's placed."""
        rank, trains = dist.get_rank(), form.trains and self.cluster.flight.train
        boundaries = Boundaries(annotator.graph(), form.caches_stay)
        positions = self._positions(boundaries)
        crossing = tuple(name for position in positions[1:-1] for name in boundaries.crossing(position))
        if rank not in self._ranks:
            return _RankCut(None, crossing)
        assert self.compiler is not None
        assert self.placed is not None
        index, weights = self._ranks.index(rank), self.request.model_copy.weights
        trained = wires.trained if trains else frozenset[str]()
        cut = stage_source(annotator, boundaries, weights, positions[index], positions[index + 1], trained)
        if not cut.cut.outputs:  # it has nothing to compute in such calls, as encoders in a decode step
            return _RankCut(cut, crossing)
        values, usual = [wires.example(name) for name in cut.cut.inputs], self.compiler.topology
        if trains:
            cut = with_step(cut, usual.computing_types, values)
            if self._has_step(cut, values):
                return _RankCut(cut, crossing)
        cut.adopt_in(self.compiler)
        try:
            if cut.step is not None:
                self._withhold(cut, wires, values)
            make_ready(self.placed, values, trains=trains)
        except InfeasibleError:
            cut.drop_from(self.compiler)
            raise
        finally:
            self.compiler.topology = usual
        return _RankCut(cut, crossing)

    def _has_step(self, cut: StageSource, values: Sequence[Any]) -> bool:
        """Whether a training step of these sizes has been placed, as that of the example."""
        assert self.placed is not None
        state: Any = self.placed._graphplan
        steps = (program for program in state.programs if program.backward is not None)
        call = cut.example(values=values)
        return cut.step is not None and any(step.signature.mismatch(call) is None for step in steps)

    def _withhold(self, cut: StageSource, wires: Wires, values: Sequence[Any]) -> None:
        """Let the compiler leave room for the microbatches in flight of a training step of these sizes."""
        flight, rank, compiler = self.cluster.flight, dist.get_rank(), self.compiler
        assert compiler is not None
        after = len(self._ranks) - 1 - self._ranks.index(rank)
        received, sent = (sum(map(wires.nbytes, names)) for names in (cut.cut.received, cut.cut.sent))
        buffers = buffer_bytes(received, sent, flight, last=not after)
        machine = with_buffers(self.cluster.machines[rank], buffers)

        def plan_beside(others: Kept) -> Plan:
            compiler.topology = withholding(machine, others)
            return compiler.plan(cut.example(values=values)).plan

        shared = {name for name, ranks in self._shared_parameters().items() if rank in ranks}
        found = plan_step(plan_beside, flight.kept(after) - 1, shared)
        compiler.topology = withholding(machine, found.withheld)

    def _positions(self, boundaries: Boundaries) -> list[int]:
        if tuple(boundaries.graph.operations) == self.order:
            return [0, *(stage.end for stage in self.plan.stages)]
        return stage_positions(boundaries, [set(stage.plan.graph.weights) for stage in self.plan.stages])

    def _runner(self, key: Hashable, wires: Wires, microbatches: int) -> StageRunner | None:
        """What runs this rank's stage, if it has one: another on all ranks where any size is new."""
        known = self.cuts[key]
        if known.source is None or self.placed is None:
            return None
        sizes = key, tuple(map(wires.of, known.crossing))
        if sizes not in self.runners:
            program = self._program(known.source, wires)
            self.runners[sizes] = StageRunner(program, microbatches, self.traffic, self.group)
        return self.runners[sizes]

    def _program(self, source: StageSource, wires: Wires) -> StageProgram:
        assert self.placed is not None
        cut = source.cut
        received, sent = ([wires.of(name) for name in names] for names in (cut.received, cut.sent))
        return StageProgram(self.placed, cut.inputs, cut.outputs, received, sent, self._ranks)

    def _trainer(
        self, key: Hashable, wires: Wires, rebuild: Callable[[Mapping[str, Any]], Any], loss: Loss
    ) -> StageRunner | None:
        """What runs this rank's stage forward and backward, if it has one."""
        known, schedule = self.cuts[key], self.plan.schedule
        if known.source is None or not self.request.options.differentiates:
            return None
        program = self._program(known.source, wires)
        names = [wire.name for wire in program.sent]

        def loss_of(made: Sequence[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
            return loss(rebuild(dict(zip(names, made, strict=True))), target)

        return StageRunner(
            program, self.plan.microbatches, self.traffic, self.group, schedule=schedule, loss=loss_of
        )


@dataclass(frozen=True, slots=True)
class _RankCut:
    """Where a call is cut.

    Attributes:
        source: this rank's stage; None where it has none.
        crossing: the names of the values at all cuts, the same on all ranks.
    """

    source: StageSource | None
    crossing: tuple[str, ...]
