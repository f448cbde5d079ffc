"""Stretches of the order of operations, each placed on a machine of a class."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from graphplan.analysis.plan import Plan
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.compiler.cluster.stage_compiler import (
    StageSource,
    buffer_bytes,
    plan_like,
    stage_source,
    with_buffers,
    withholding,
)
from graphplan.compiler.cluster.stage_step import Kept, StepPlan, plan_step, with_step
from graphplan.compiler.formulation import Options
from graphplan.compiler.training import trainable, trained_values
from graphplan.devices.topology import DeviceKey, Topology
from graphplan.ir.cluster.flight import Flight
from graphplan.ir.cluster.machine_stage import MachineStage
from graphplan.ir.graph import Graph
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_params import PARAMS
from graphplan.passes.pipeline.structural_hash import renamed, structure_of
from graphplan.passes.placement.certificate import Bound
from graphplan.passes.placement.params import Limits

_LEAST = 1e-3
"""Seconds: a limit is positive, and once it is over, the first placement that is found is enough."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the order on a machine.

    Attributes:
        machine: class of the machine.
        start: candidate cut where it starts.
        end: candidate cut where it ends.
        kept: microbatches that a training step keeps.
        share: parts of the machine's budgets, of ``PARAMS.shares``.
    """

    machine: int
    start: int
    end: int
    kept: int = 0
    share: int = PARAMS.shares


@dataclass
class StagePlacement:
    """Places stretches of one microbatch's graph between ``cuts``, on ``machines``: one of each class."""

    model_copy: ModelCopy
    annotator: Annotator
    options: Options
    boundaries: Boundaries
    cuts: Sequence[int]
    machines: Sequence[Topology]
    flight: Flight
    limits: Limits = field(default_factory=Limits)
    sources: dict[tuple[int, int, int], StageSource] = field(default_factory=dict)

    def search(self, stretch: Stretch) -> StepPlan:
        """Place a stretch.

        Raises:
            InfeasibleError: it does not fit.
            CaptureError: something crosses that cannot be sent, or of which no gradient can come back.
        """
        source, topology = self.source(stretch), self._topology(stretch)
        if source.step is None:
            return StepPlan(source.compiler(topology, self._timed).plan(source.example()).plan, {}, {})

        def plan_beside(others: Kept) -> Plan:
            return source.compiler(withholding(topology, others), self._timed).plan(source.example()).plan

        return plan_step(plan_beside, stretch.kept - 1, self._shared(stretch), self.limits)

    @property
    def _timed(self) -> Options:
        """The caller's options, with a part of the time that is left."""
        left = self.limits.left
        if left is None:
            return self.options
        return replace(self.options, time_limit=max(left * PARAMS.time_share, _LEAST))

    def stage(self, stretch: Stretch, placed: StepPlan, machine: int) -> MachineStage[Plan]:
        """A stretch on a machine, as it was placed, or an equal one."""
        source, own = self.source(stretch), self._own_plan(stretch, placed)
        return MachineStage(
            machine=machine,
            start=self.cuts[stretch.start],
            end=self.cuts[stretch.end],
            receives=source.receives,
            sends=source.sends if stretch.end < len(self.cuts) - 1 else (),
            buffer_bytes=self._buffer_bytes(stretch),
            plan=own.plan,
            kept_bytes=own.kept_bytes,
            beside_bytes=self._beside(stretch),
        )

    def structure(self, stretch: Stretch) -> Hashable:
        """Equal for stretches that are placed alike."""
        first, last = self.cuts[stretch.start], self.cuts[stretch.end]
        crossing = self.boundaries.crossing
        found = structure_of(self.boundaries.graph, first, last, crossing(first), crossing(last))
        return stretch.machine, stretch.kept, stretch.share, found

    def source(self, stretch: Stretch) -> StageSource:
        """A stretch, as a class of machines runs it: devices decide of which kernels a training step is."""
        key = (stretch.machine if self.trained else 0), stretch.start, stretch.end
        if key not in self.sources:
            first, last = self.cuts[stretch.start], self.cuts[stretch.end]
            weights = self.model_copy.weights
            made = stage_source(self.annotator, self.boundaries, weights, first, last, self.trained)
            self.sources[key] = with_step(made)
        return self.sources[key]

    @cached_property
    def trained(self) -> frozenset[str]:
        """Values of which gradients are sent back."""
        if not self.flight.train:
            return frozenset()
        return trained_values(self.annotator.capture, trainable(self.model_copy.weights))

    def _own_plan(self, stretch: Stretch, placed: StepPlan) -> StepPlan:
        """The plan of a stretch, in its own names, that was placed as an equal one was."""
        source, plan = self.source(stretch), placed.plan
        graph = source.planned.graph()
        if graph.weights.keys() == plan.graph.weights.keys() and _runs(graph) == _runs(plan.graph):
            return placed
        topology = withholding(self._topology(stretch), placed.kept_bytes)
        if not plan.graph.parts and len(graph.operations) == len(plan.graph.operations):
            assignment = renamed(plan.schedule.assignment, plan.graph, graph)
            bound = Bound(plan.lower_bound, plan.proof)
            found = plan_like(source, topology, self.options, assignment, bound)
            if found is not None and math.isclose(found.makespan, plan.makespan):
                return replace(placed, plan=found)
        return self.search(stretch)

    def _shared(self, stretch: Stretch) -> frozenset[str]:
        """Parameters that a stretch reads, and others too."""
        graph = self.boundaries.graph
        own = set(list(graph.operations)[self.cuts[stretch.start] : self.cuts[stretch.end]])
        return frozenset(
            name for name, readers in graph.readers.items() if own & set(readers) and set(readers) - own
        )

    def _buffer_bytes(self, stretch: Stretch) -> int:
        """Bytes of what is received and sent, and of gradients that come back; of results there are none."""
        source, last = self.source(stretch), stretch.end == len(self.cuts) - 1
        received, sent = (sum(one.nbytes for one in side) for side in (source.receives, source.sends))
        return buffer_bytes(received, sent, self.flight, last=last)

    def _beside(self, stretch: Stretch) -> dict[DeviceKey, int]:
        """Bytes of each device that are for other stages of the machine."""
        if stretch.share == PARAMS.shares:
            return {}
        devices = self.machines[stretch.machine].devices
        return {spec.key: spec.room - spec.room * stretch.share // PARAMS.shares for spec in devices}

    def _topology(self, stretch: Stretch) -> Topology:
        machine = with_buffers(self.machines[stretch.machine], self._buffer_bytes(stretch))
        return withholding(machine, self._beside(stretch))


def _runs(graph: Graph) -> list[str]:
    """The operations that are there whatever is saved."""
    return [op.name for op in graph.operations.values() if not op.repeats and not op.offloads]
