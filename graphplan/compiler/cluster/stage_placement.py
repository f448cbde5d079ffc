"""Place stretches of the order of operations, each on a machine of a class."""

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
    summing_bytes,
    with_buffers,
    withholding,
)
from graphplan.compiler.cluster.stage_step import in_pipeline, with_step
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
"""Seconds: least time limit of a search, since it must be positive; then the first placement suffices."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive operations on a machine.

    Attributes:
        machine: class of the machine.
        start: index of the candidate cut where it starts.
        end: index of the candidate cut where it ends.
        kept_microbatches: microbatches in flight whose activations a training step keeps.
        share: its share of the machine's budgets, in units of one ``PARAMS.shares``-th.
    """

    machine: int
    start: int
    end: int
    kept_microbatches: int = 0
    share: int = PARAMS.shares


@dataclass
class StagePlacement:
    """Places stretches of one microbatch's graph between ``cuts``, on ``machines``, one of each class."""

    model_copy: ModelCopy
    annotator: Annotator
    options: Options
    boundaries: Boundaries
    cuts: Sequence[int]
    machines: Sequence[Topology]
    flight: Flight
    limits: Limits
    sources: dict[tuple[int, int, int], StageSource] = field(init=False, default_factory=dict)

    def search(self, stretch: Stretch) -> Plan:
        """Place a stretch.

        Raises:
            InfeasibleError: the stretch does not fit.
            CaptureError: a value crosses that cannot be sent, or whose gradient cannot be sent back.
        """
        source, options, left = self.source(stretch), self._options(stretch), self.limits.seconds_left
        if left is not None:
            options = replace(options, time_limit=max(left * PARAMS.time_share, _LEAST))
        compiler = source.compiler(self._topology(stretch), options)
        return compiler.plan(source.example(), advise=False).plan

    def _options(self, stretch: Stretch) -> Options:
        return in_pipeline(self.options, stretch.kept_microbatches, self._shared(stretch))

    def stage(self, stretch: Stretch, placed: Plan, machine: int) -> MachineStage[Plan]:
        """Return a stretch as a stage of a machine, placed as it was, or as an equal one was."""
        source = self.source(stretch)
        return MachineStage(
            machine=machine,
            start=self.cuts[stretch.start],
            end=self.cuts[stretch.end],
            receives=source.receives,
            sends=source.sends if stretch.end < len(self.cuts) - 1 else (),
            buffer_bytes=self._buffer_bytes(stretch),
            plan=self._own_plan(stretch, placed),
            beside_bytes=self._reserved_bytes(stretch),
        )

    def structure(self, stretch: Stretch) -> Hashable:
        """Return a key that is equal for stretches with the same placement, up to names."""
        first, last = self.cuts[stretch.start], self.cuts[stretch.end]
        crossing = self.boundaries.crossing
        structure = structure_of(self.boundaries.graph, first, last, crossing(first), crossing(last))
        return stretch.machine, stretch.kept_microbatches, stretch.share, structure

    def source(self, stretch: Stretch) -> StageSource:
        """Return the stage of a stretch; in training for a class of machines: kernels differ by device."""
        key = (stretch.machine if self.trained else 0), stretch.start, stretch.end
        if key not in self.sources:
            first, last = self.cuts[stretch.start], self.cuts[stretch.end]
            weights = self.model_copy.weights
            stage = stage_source(self.annotator, self.boundaries, weights, first, last, self.trained)
            self.sources[key] = with_step(stage)
        return self.sources[key]

    @cached_property
    def trained(self) -> frozenset[str]:
        """Values whose gradients are sent back."""
        if not self.flight.train:
            return frozenset()
        return trained_values(self.annotator.capture, trainable(self.model_copy.weights))

    def _own_plan(self, stretch: Stretch, plan: Plan) -> Plan:
        """Return the plan of a stretch in its own names; ``plan`` may be that of an equal stretch."""
        source = self.source(stretch)
        graph = source.planned.graph()
        if graph.weights.keys() == plan.graph.weights.keys() and _runs(graph) == _runs(plan.graph):
            return plan
        if not plan.graph.parts and len(graph.operations) == len(plan.graph.operations):
            assignment = renamed(plan.schedule.assignment, plan.graph, graph)
            bound = Bound(plan.lower_bound, plan.proof)
            plan_here = plan_like(source, self._topology(stretch), self._options(stretch), assignment, bound)
            if plan_here is not None and math.isclose(plan_here.makespan, plan.makespan):
                return plan_here
        return self.search(stretch)

    def _shared(self, stretch: Stretch) -> frozenset[str]:
        """Return the trained parameters that operations inside and outside of a stretch need."""
        first, last = self.cuts[stretch.start], self.cuts[stretch.end]
        wanted = trainable(self.model_copy.weights)
        inside = {
            name: [first <= position < last for position in positions]
            for name, positions in self.boundaries.needed_at.items()
            if name in wanted
        }
        return frozenset(name for name, here in inside.items() if any(here) and not all(here))

    def _buffer_bytes(self, stretch: Stretch) -> int:
        """Return the bytes of network buffers for sending and receiving, gradients included."""
        source, last = self.source(stretch), stretch.end == len(self.cuts) - 1
        received, sent = (sum(value.nbytes for value in side) for side in (source.receives, source.sends))
        results = int(self.boundaries.crossing_bytes[-1])
        nbytes = buffer_bytes(received, sent, results, self.flight, last=last)
        shared = (self.boundaries.graph.weights[name].nbytes for name in self._shared(stretch))
        return nbytes + summing_bytes(self.machines[stretch.machine], shared if self.flight.train else ())

    def _reserved_bytes(self, stretch: Stretch) -> dict[DeviceKey, int]:
        """Return device -> bytes that are reserved for other stages of the machine."""
        if stretch.share == PARAMS.shares:
            return {}
        devices = self.machines[stretch.machine].devices
        return {spec.key: spec.room - spec.room * stretch.share // PARAMS.shares for spec in devices}

    def _topology(self, stretch: Stretch) -> Topology:
        machine = with_buffers(self.machines[stretch.machine], self._buffer_bytes(stretch))
        return withholding(machine, self._reserved_bytes(stretch))


def _runs(graph: Graph) -> list[str]:
    """Return the operations that do not depend on saved values."""
    return [op.name for op in graph.operations.values() if not op.repeats and not op.offloads]
