"""One placed stage on its rank, for the first call and for calls of other sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from graphplan.analysis.plan import Plan
from graphplan.api.placer import Placer
from graphplan.compiler.cluster.cluster_call import Wires
from graphplan.compiler.cluster.stage_compiler import (
    StageSource,
    buffer_bytes,
    summing_bytes,
    with_buffers,
    withholding,
)
from graphplan.compiler.cluster.stage_step import in_pipeline, with_step
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.devices.max_memory import require_present
from graphplan.devices.topology import Topology
from graphplan.errors import InfeasibleError
from graphplan.ir.cluster.flight import Flight
from graphplan.ir.cluster.machine_stage import MachineStage
from graphplan.passes.pipeline.cut_capture import results_of
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.distributed.stage_runner import make_ready


@dataclass(frozen=True, slots=True)
class RankStage:
    """A placed stage.

    Attributes:
        index: index of the stage among all stages.
        after: number of stages that follow it.
        machine: the machine's devices, without the memory of its other stages.
        compiler: the stage's compiler.
        placed: the stage's placed module.
    """

    index: int
    after: int
    machine: Topology
    compiler: Compiler
    placed: nn.Module

    @classmethod
    def place(
        cls,
        index: int,
        stage: MachineStage[Plan],
        cut: StageSource,
        machine: Topology,
        options: Options,
        source: Checkpoint | None,
        *,
        after: int,
        shared: Set[str],
    ) -> RankStage:
        """Return a stage, placed as planned over the devices of its machine.

        ``after`` stages follow it; other stages read the parameters ``shared`` too.
        """
        devices = withholding(machine, stage.beside_bytes)
        topology = with_buffers(devices, stage.buffer_bytes)
        options = in_pipeline(options, stage.plan.graph.in_flight, shared)
        require_present(topology)
        if options.training is not None:
            cut = with_step(cut)
        compiler = cut.compiler(topology, options, stage.plan)
        planned = compiler.plan(cut.example("cpu"))
        compiler.commit(planned)
        placer = Placer(topology, options, strict=True, source=source, plan=stage.plan)
        return cls(index, after, devices, compiler, placer.attached(cut.module, compiler, [planned]))

    def serve(
        self,
        cut: StageSource,
        wires: Wires,
        inputs: Mapping[str, Any],
        flight: Flight,
        *,
        trains: bool,
    ) -> StageSource:
        """Let the stage serve calls of other sizes, and return ``cut``, with its training step if it has one.

        Args:
            cut: the stage, cut out of such a call.
            wires: the tensors on the network in it.
            inputs: the model's inputs in it by name.
            flight: the microbatches and their schedule.
            trains: whether the call is a planned training step.

        Raises:
            InfeasibleError: the stage has no room for the call.
        """
        if not cut.cut.outputs:  # it computes nothing in such calls, as an encoder in a decode step
            return cut
        values = [inputs[name] if name in inputs else wires.of(name).empty(1) for name in cut.cut.inputs]
        topology = self.compiler.topology
        if trains:
            cut = with_step(cut, values)
            if self._has_step(cut, values):
                return cut
            trains = cut.step is not None
        cut.adopt_in(self.compiler)
        try:
            if cut.step is not None:
                self.compiler.topology = self._with_buffers(cut, wires, flight)
            make_ready(self.placed, values, cut.cut.trace, trains=trains)
        except InfeasibleError:
            cut.drop_from(self.compiler)
            raise
        finally:
            self.compiler.topology = topology
        return cut

    def _has_step(self, cut: StageSource, values: Sequence[Any]) -> bool:
        """Whether a training step of these sizes is placed already, such as the example's."""
        state: Any = self.placed._graphplan
        steps = (program for program in state.programs if program.backward is not None)
        call = cut.example(values=values)
        return cut.step is not None and any(step.signature.mismatch(call) is None for step in steps)

    def _with_buffers(self, cut: StageSource, wires: Wires, flight: Flight) -> Topology:
        """Return the machine with memory withheld for the network buffers of a training step."""
        names = cut.cut.received, cut.cut.sent, results_of(wires.capture, caches_stay=False)
        received, sent, results = (sum(map(wires.nbytes, each)) for each in names)
        buffers = buffer_bytes(received, sent, results, flight, last=not self.after)
        training, weights = self.compiler.options.training, cut.model_copy.weights.tensors
        shared = frozenset() if training is None else training.shared & weights.keys()
        gradients = (weights[name].nbytes for name in shared)
        return with_buffers(self.machine, buffers + summing_bytes(self.machine, gradients))
