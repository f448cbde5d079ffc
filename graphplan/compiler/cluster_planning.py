"""Plan a model over several machines: cuts by estimates, each chosen stage placed for true, and again.

Estimates of stretches that were placed give way to what the placement takes, and the cuts are searched
again: lazy evaluation of edges, as in LazySP (Dellin and Srinivasa, ICAPS 2016). The best pipeline of placed
stages is the plan. In a training step a stage is another one for each number of microbatches that it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.analysis.plan import Plan
from graphplan.capture.model_copy import ModelCopy
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.compiler.stage_compiler import (
    StageSource,
    buffer_bytes,
    plan_like,
    stage_source,
    with_buffers,
    withholding,
)
from graphplan.compiler.stage_step import Kept, StepPlan, plan_step, with_step
from graphplan.compiler.training import trainable, trained_values
from graphplan.devices.topology import Link, Topology
from graphplan.errors import CaptureError, InfeasibleError, InputError, readable_bytes
from graphplan.ir.cluster_plan_data import MachineStage, Objective
from graphplan.ir.graph import Graph
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_params import PARAMS
from graphplan.passes.pipeline.estimates import Estimates, Flight, operation_seconds
from graphplan.passes.pipeline.stage_bound import FORWARD, PROOF, bound_stages
from graphplan.passes.pipeline.stage_dp import Segments, StageDP, states_of
from graphplan.passes.pipeline.structural_hash import renamed, structure_of
from graphplan.passes.placement.certificate import Bound, checked


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines, and how they are used.

    Attributes:
        machines: the devices of each, in the order of their ranks.
        network: between any two.
        flight: microbatches and their schedule.
        objective: what to minimise.
    """

    machines: tuple[Topology, ...]
    network: Link
    flight: Flight
    objective: Objective = "latency"

    @property
    def classes(self) -> list[list[int]]:
        """Machines that are equal in everything, by index, in order."""
        found: dict[Hashable, list[int]] = {}
        for index, machine in enumerate(self.machines):
            found.setdefault(repr(machine), []).append(index)
        return list(found.values())

    @property
    def counted(self) -> int:
        """Microbatches that the objective counts."""
        return 1 if self.objective == "latency" else self.flight.microbatches


def whole_compiler(model_copy: ModelCopy, cluster: Cluster, options: Options) -> Compiler:
    """What traces the whole model, as every rank does: it knows the kinds of devices of all machines."""
    specs = {spec.type: spec for machine in cluster.machines for spec in machine.devices if spec.computes}
    every = replace(cluster.machines[0], devices=tuple(specs.values()))
    return Compiler(model_copy, every, replace(options, grad=options.differentiates, training=None))


def plan_cluster(
    model_copy: ModelCopy, annotator: Annotator, batch: int, cluster: Cluster, options: Options
) -> ClusterPlan:
    """Plan one call of a model, of which ``annotator`` has one microbatch.

    ``batch`` has the rows of the whole batch; 0 where it is not divided.

    Raises:
        InfeasibleError: no cut into stages fits the machines.
        InputError: a training step by 1F1B has fewer microbatches than stages.
    """
    return _Search(model_copy, annotator, cluster, options, batch).run()


_Stage = tuple[int, int, int, int]
"""Class of machines, candidate cuts where it starts and ends, microbatches that a training step keeps."""


@dataclass
class _Search:
    model_copy: ModelCopy
    annotator: Annotator
    cluster: Cluster
    options: Options
    batch: int
    boundaries: Boundaries = field(init=False)
    estimates: Estimates = field(init=False)
    sources: dict[tuple[int, int, int], StageSource] = field(default_factory=dict)
    placed: dict[_Stage, StepPlan | None] = field(default_factory=dict)
    known: dict[Hashable, StepPlan | None] = field(default_factory=dict)
    refused: CaptureError | None = None

    def run(self) -> ClusterPlan:
        graph, training = self.annotator.graph(), self.options.training
        if training is not None:
            graph = training.held(graph, self.annotator.capture, frozenset())
        self.boundaries = Boundaries(graph)
        classes = self.cluster.classes
        self.estimates = self._estimates(self.cluster)
        best: list[_Stage] | None = None
        least = math.inf
        for number in range(PARAMS.rounds + PARAMS.refusals):
            if number >= PARAMS.rounds and best is not None:
                break
            found = self._stages(self.estimates, self.cluster.counted)
            if found is None:
                break
            stages = self._with_kept(found)
            fresh = [stage for stage in stages if stage not in self.placed]
            for stage in fresh:
                self._place(*stage)
            seconds = self._seconds(stages)
            if seconds < least:
                best, least = stages, seconds
            if not fresh:
                break
            self.estimates.calibrate()
        if best is None:
            raise self.refused or self._infeasible()
        flight = self.cluster.flight
        if flight.grad and flight.schedule == "1f1b" and flight.microbatches < len(best):
            raise InputError(
                f"schedule='1f1b' needs a microbatch for each stage, and there are {flight.microbatches} for "
                f"{len(best)} stages: give microbatches={len(best)} or more, or schedule='gpipe'"
            )
        return self._plan(best, classes)

    def _estimates(self, cluster: Cluster) -> Estimates:
        boundaries, classes = self.boundaries, cluster.classes
        steps = len(states_of([len(members) for members in classes])) * len(classes)
        most = max(int(math.sqrt(PARAMS.cells / steps)), 2 * len(cluster.machines) + 2)
        every = [s for machine in cluster.machines for s in machine.devices if s.computes]
        seconds = operation_seconds(boundaries.graph, every)
        progress = np.concatenate([[0.0], seconds.cumsum()]) / max(float(seconds.sum()), 1e-30)
        cuts = boundaries.candidates(min(most, PARAMS.cuts), progress)
        if self._trained:
            cuts = np.union1d(cuts[cuts <= self._last_trained], cuts[-1:])
        machines = [cluster.machines[members[0]] for members in classes]
        return Estimates(boundaries, cuts, machines, cluster.network, cluster.flight)

    def _stages(self, estimates: Estimates, microbatches: int) -> Segments | None:
        counts = [len(members) for members in self.cluster.classes]
        fits = estimates.fits if self.cluster.flight.grad else None
        return StageDP(estimates.costs(), counts, fits).solve(microbatches)

    def _with_kept(self, found: Segments) -> list[_Stage]:
        """The stages, in order, each with the microbatches that it keeps in a training step."""
        flight, last = self.cluster.flight, len(found.classes) - 1
        kept = [flight.kept(last - index) if flight.train else 0 for index in range(last + 1)]
        return list(zip(found.classes, found.cuts, found.cuts[1:], kept, strict=False))

    # -- stages placed -----------------------------------------------------------------------------------

    def _place(self, c: int, start: int, end: int, kept: int) -> None:
        """Place a stretch on a class of machines, unless an equal one was placed before."""
        key = c, kept, self._structure(start, end)
        if key not in self.known:
            try:
                self.known[key] = self._search(c, start, end, kept)
            except InfeasibleError:
                self.known[key] = None
            except CaptureError as error:  # something crosses here that cannot be sent: cut elsewhere
                self.known[key], self.refused = None, error
                self.estimates.exact[c, start, end] = math.inf
        placed = self.placed[c, start, end, kept] = self.known[key]
        if placed is not None:
            self.estimates.exact[c, start, end] = placed.plan.makespan
        elif kept:
            self.estimates.refused.add((c, start, end, kept))
        else:
            self.estimates.exact[c, start, end] = math.inf

    def _search(self, c: int, start: int, end: int, kept: int) -> StepPlan:
        """Place a stretch.

        Raises:
            InfeasibleError: it does not fit.
            CaptureError: something crosses that cannot be sent, or of which no gradient can come back.
        """
        source, topology = self._source(c, start, end), self._topology(c, start, end)
        if source.step is None:
            return StepPlan(source.compiler(topology, self.options).plan(source.example()).plan, {}, {})

        def plan_beside(others: Kept) -> Plan:
            return source.compiler(withholding(topology, others), self.options).plan(source.example()).plan

        return plan_step(plan_beside, kept - 1, self._shared(start, end))

    def _own_plan(self, c: int, start: int, end: int, kept: int) -> StepPlan:
        """The plan of a stretch, in its own names, that was placed as an equal one was."""
        placed, source = self.placed[c, start, end, kept], self._source(c, start, end)
        assert placed is not None
        plan, graph = placed.plan, source.planned.graph()
        if graph.weights.keys() == plan.graph.weights.keys() and _runs(graph) == _runs(plan.graph):
            return placed
        topology = withholding(self._topology(c, start, end), placed.kept_bytes)
        if not plan.graph.parts and len(graph.operations) == len(plan.graph.operations):
            assignment = renamed(plan.schedule.assignment, plan.graph, graph)
            bound = Bound(plan.lower_bound, plan.proof)
            found = plan_like(source, topology, self.options, assignment, bound)
            if found is not None and math.isclose(found.makespan, plan.makespan):
                return replace(placed, plan=found)
        return self._search(c, start, end, kept)

    def _shared(self, start: int, end: int) -> frozenset[str]:
        """Parameters that a stretch reads, and others too."""
        graph, cuts = self.boundaries.graph, self.estimates.cuts
        own = set(list(graph.operations)[int(cuts[start]) : int(cuts[end])])
        return frozenset(
            name for name, readers in graph.readers.items() if own & set(readers) and set(readers) - own
        )

    def _structure(self, start: int, end: int) -> Hashable:
        graph, cuts = self.boundaries.graph, self.estimates.cuts
        first, last = int(cuts[start]), int(cuts[end])
        crossing = self.boundaries.crossing
        return structure_of(graph, first, last, crossing(first), crossing(last))

    @cached_property
    def _trained(self) -> frozenset[str]:
        """Values of which gradients are sent back."""
        if not self.cluster.flight.train:
            return frozenset()
        return trained_values(self.annotator.capture, trainable(self.model_copy.weights))

    @property
    def _last_trained(self) -> int:
        """Position of the last operation that reads a parameter which is trained: no cut is after it."""
        graph, wanted = self.boundaries.graph, trainable(self.model_copy.weights)
        every = enumerate(graph.operations.values())
        return max(at for at, op in every if any(graph.root(name) in wanted for name in op.inputs))

    def _source(self, c: int, start: int, end: int) -> StageSource:
        """A stretch, as a class of machines runs it: devices decide of which kernels a training step is."""
        key = (c if self._trained else 0), start, end
        if key not in self.sources:
            cuts, weights = self.estimates.cuts, self.model_copy.weights
            first, last = int(cuts[start]), int(cuts[end])
            made = stage_source(self.annotator, self.boundaries, weights, first, last, self._trained)
            self.sources[key] = with_step(made, self.estimates.machines[c].computing_types)
        return self.sources[key]

    def _buffer_bytes(self, c: int, start: int, end: int) -> int:
        """Bytes of what is received and sent, and of gradients that come back; of results there are none."""
        source, last = self._source(c, start, end), end == len(self.estimates.cuts) - 1
        received, sent = (sum(one.nbytes for one in side) for side in (source.receives, source.sends))
        return buffer_bytes(received, sent, self.cluster.flight, last=last)

    def _topology(self, c: int, start: int, end: int) -> Topology:
        return with_buffers(self.estimates.machines[c], self._buffer_bytes(c, start, end))

    def _seconds(self, stages: Sequence[_Stage]) -> float:
        """Of what the objective counts; infinite where a stage does not fit."""
        every = [self.placed[stage] for stage in stages]
        if any(placed is None for placed in every):
            return math.inf
        sent = self.estimates.transfers
        each = [placed.plan.makespan for placed in every if placed is not None]
        loads = [sent[a] + s + sent[b] for s, (_, a, b, _) in zip(each, stages, strict=True)]
        total = sum(s + sent[b] for s, (_, _, b, _) in zip(each, stages, strict=True))
        return float(total + (self.cluster.counted - 1) * max(loads))

    # -- the answer --------------------------------------------------------------------------------------

    def _plan(self, stages: Sequence[_Stage], classes: list[list[int]]) -> ClusterPlan:
        free = [iter(members) for members in classes]
        made: list[MachineStage[Plan]] = []
        for c, start, end, kept in stages:
            source, own = self._source(c, start, end), self._own_plan(c, start, end, kept)
            sends = source.sends if end < len(self.estimates.cuts) - 1 else ()
            cuts, nbytes = self.estimates.cuts, self._buffer_bytes(c, start, end)
            span, receives = (int(cuts[start]), int(cuts[end])), source.receives
            made.append(MachineStage(next(free[c]), *span, receives, sends, nbytes, own.plan, own.kept_bytes))
        cluster = self.cluster
        bound = bound_stages(self.boundaries, cluster.machines, cluster.network)
        plan_of_all = ClusterPlan(
            tuple(made),
            len(cluster.machines),
            cluster.network,
            self.batch,
            cluster.flight.microbatches,
            cluster.flight.schedule,
            cluster.objective,
            bound.seconds(cluster.flight.microbatches),
            FORWARD if cluster.flight.train else PROOF,
        )
        return _certified(plan_of_all)

    def _infeasible(self) -> InfeasibleError:
        """The error, with budgets that would do as far as estimates tell."""
        cluster, factor = self.cluster, 1.0
        weights = readable_bytes(self.boundaries.graph.held_bytes)
        what = "weights, gradients and optimizer state" if cluster.flight.train else "weights"
        said = f"no cut into contiguous stages fits the {len(cluster.machines)} machines: {weights} of {what}"
        if len(self.boundaries.allowed) == 2 and len(cluster.machines) > 1:
            return InfeasibleError(f"{said}, and there is no place where the model can be cut")
        for _ in range(PARAMS.growths):
            factor *= PARAMS.growth
            machines = tuple(one.scaled(factor) for one in cluster.machines)
            # by all that a forward pass makes: how much less a training step saves is not estimated
            grown = replace(cluster, machines=machines, flight=replace(cluster.flight, train=False))
            if self._stages(self._estimates(grown), 1) is not None:
                budgets = [{s.key: s.memory for s in one.devices} for one in grown.machines]
                return InfeasibleError(f"{said}. By estimate these budgets would do: machines={budgets}")
        return InfeasibleError(said)


def _runs(graph: Graph) -> list[str]:
    """The operations that are there whatever is saved."""
    return [op.name for op in graph.operations.values() if not op.repeats and not op.offloads]


def _certified(plan: ClusterPlan) -> ClusterPlan:
    """The plan; without its bound where that is above it, which is a bug that must show."""
    found = checked(Bound(plan.lower_bound, plan.proof), plan.makespan)
    return replace(plan, lower_bound=found.seconds, proof=found.proof)
