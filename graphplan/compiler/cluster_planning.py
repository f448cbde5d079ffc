"""Plan a model over several machines: cuts by estimates, each chosen stage placed for true, and again.

Estimates of stretches that were placed give way to what the placement takes, and the cuts are searched
again: lazy evaluation of edges, as in LazySP (Dellin and Srinivasa, ICAPS 2016). The best pipeline of placed
stages is the plan.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.analysis.plan import Plan
from graphplan.capture.model_copy import ModelCopy
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.compiler.stage_compiler import StageSource, plan_like, stage_source, with_buffers
from graphplan.devices.topology import Link, Topology
from graphplan.errors import CaptureError, InfeasibleError, InputError, readable_bytes
from graphplan.ir.cluster_plan_data import MachineStage, Objective
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_params import PARAMS
from graphplan.passes.pipeline.estimates import Estimates, Flight, operation_seconds
from graphplan.passes.pipeline.stage_bound import PROOF, bound_stages
from graphplan.passes.pipeline.stage_dp import Segments, StageDP, states_of
from graphplan.passes.pipeline.structural_hash import renamed, structure_of
from graphplan.passes.placement.certificate import Bound
from graphplan.warnings import warn


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
    return Compiler(model_copy, every, options)


def plan_cluster(
    model_copy: ModelCopy, annotator: Annotator, batch: int, cluster: Cluster, options: Options
) -> ClusterPlan:
    """Plan one call of a model.

    Args:
        model_copy: of the model.
        annotator: of the call of one microbatch.
        batch: rows of the whole batch; 0 where it is not divided.
        cluster: the machines.
        options: of the caller, for the placement on each machine.

    Raises:
        InfeasibleError: no cut into stages fits the machines.
        InputError: a training step by 1F1B has fewer microbatches than stages.
    """
    return _Search(model_copy, annotator, cluster, options, batch).run()


@dataclass(slots=True)
class _Search:
    model_copy: ModelCopy
    annotator: Annotator
    cluster: Cluster
    options: Options
    batch: int
    boundaries: Boundaries = field(init=False)
    estimates: Estimates = field(init=False)
    sources: dict[tuple[int, int], StageSource] = field(default_factory=dict)
    placed: dict[tuple[int, int, int], Plan | None] = field(default_factory=dict)
    known: dict[Hashable, Plan | None] = field(default_factory=dict)
    refused: CaptureError | None = None

    def run(self) -> ClusterPlan:
        self.boundaries = Boundaries(self.annotator.graph())
        classes = self.cluster.classes
        self.estimates = self._estimates(self.cluster)
        best: list[tuple[int, int, int]] | None = None
        least = math.inf
        for _ in range(PARAMS.rounds):
            found = self._stages(self.estimates, self.cluster.counted)
            if found is None:
                break
            stages = list(zip(found.classes, found.cuts, found.cuts[1:], strict=False))
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
        machines = [cluster.machines[members[0]] for members in classes]
        return Estimates(boundaries, cuts, machines, cluster.network, cluster.flight)

    def _stages(self, estimates: Estimates, microbatches: int) -> Segments | None:
        counts = [len(members) for members in self.cluster.classes]
        fits = estimates.fits if self.cluster.flight.grad else None
        return StageDP(estimates.costs(), counts, fits).solve(microbatches)

    # -- stages placed -----------------------------------------------------------------------------------

    def _place(self, c: int, start: int, end: int) -> None:
        """Place a stretch on a class of machines, unless an equal one was placed before."""
        key = c, self._structure(start, end)
        if key not in self.known:
            try:
                source = self._source(start, end)
                found = source.compiler(self._topology(c, start, end), self.options).plan(source.example())
                self.known[key] = found.plan
            except InfeasibleError:
                self.known[key] = None
            except CaptureError as error:  # something crosses here that cannot be sent: cut elsewhere
                self.known[key], self.refused = None, error
        plan = self.placed[c, start, end] = self.known[key]
        self.estimates.exact[c, start, end] = math.inf if plan is None else plan.makespan

    def _own_plan(self, c: int, start: int, end: int) -> Plan:
        """The plan of a stretch, in its own names, that was placed as an equal one was."""
        plan, source = self.placed[c, start, end], self._source(start, end)
        assert plan is not None
        graph = source.annotator.graph()
        if graph.operations.keys() == plan.graph.operations.keys():
            return plan
        topology = self._topology(c, start, end)
        if not plan.graph.parts and len(graph.operations) == len(plan.graph.operations):
            assignment = renamed(plan.schedule.assignment, plan.graph, graph)
            bound = Bound(plan.lower_bound, plan.proof)
            found = plan_like(source, topology, self.options, assignment, bound)
            if found is not None and math.isclose(found.makespan, plan.makespan):
                return found
        return source.compiler(topology, self.options).plan(source.example()).plan

    def _structure(self, start: int, end: int) -> Hashable:
        graph, cuts = self.boundaries.graph, self.estimates.cuts
        first, last = int(cuts[start]), int(cuts[end])
        crossing = self.boundaries.crossing
        return structure_of(graph, first, last, crossing(first), crossing(last))

    def _source(self, start: int, end: int) -> StageSource:
        if (start, end) not in self.sources:
            cuts, weights = self.estimates.cuts, self.model_copy.weights
            first, last = int(cuts[start]), int(cuts[end])
            self.sources[start, end] = stage_source(self.annotator, self.boundaries, weights, first, last)
        return self.sources[start, end]

    def _buffer_bytes(self, start: int, end: int) -> int:
        source = self._source(start, end)
        crossing = sum(one.nbytes for one in (*source.receives, *source.sends))
        return self.cluster.flight.microbatches * crossing

    def _topology(self, c: int, start: int, end: int) -> Topology:
        return with_buffers(self.estimates.machines[c], self._buffer_bytes(start, end))

    def _seconds(self, stages: Sequence[tuple[int, int, int]]) -> float:
        """Of what the objective counts; infinite where a stage does not fit."""
        plans = [self.placed[stage] for stage in stages]
        if any(plan is None for plan in plans):
            return math.inf
        sent = self.estimates.transfers
        each = [plan.makespan for plan in plans if plan is not None]
        loads = [sent[a] + s + sent[b] for s, (_, a, b) in zip(each, stages, strict=True)]
        total = sum(s + sent[b] for s, (_, _, b) in zip(each, stages, strict=True))
        return float(total + (self.cluster.counted - 1) * max(loads))

    # -- the answer --------------------------------------------------------------------------------------

    def _plan(self, stages: Sequence[tuple[int, int, int]], classes: list[list[int]]) -> ClusterPlan:
        free = [iter(members) for members in classes]
        made: list[MachineStage[Plan]] = []
        for c, start, end in stages:
            source, plan = self._source(start, end), self._own_plan(c, start, end)
            sends = source.sends if end < len(self.estimates.cuts) - 1 else ()
            cuts, nbytes = self.estimates.cuts, self._buffer_bytes(start, end)
            span = int(cuts[start]), int(cuts[end])
            made.append(MachineStage(next(free[c]), *span, source.receives, sends, nbytes, plan))
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
            PROOF,
        )
        return _certified(plan_of_all)

    def _infeasible(self) -> InfeasibleError:
        """The error, with budgets that would do as far as estimates tell."""
        cluster, factor = self.cluster, 1.0
        weights = readable_bytes(self.boundaries.graph.weight_bytes)
        said = (
            f"no cut into contiguous stages fits the {len(cluster.machines)} machines: {weights} of weights"
        )
        if len(self.boundaries.allowed) == 2 and len(cluster.machines) > 1:
            return InfeasibleError(f"{said}, and there is no place where the model can be cut")
        for _ in range(PARAMS.growths):
            factor *= PARAMS.growth
            grown = replace(cluster, machines=tuple(one.scaled(factor) for one in cluster.machines))
            if self._stages(self._estimates(grown), 1) is not None:
                budgets = [{s.key: s.memory for s in one.devices} for one in grown.machines]
                return InfeasibleError(f"{said}. By estimate these budgets would do: machines={budgets}")
        return InfeasibleError(said)


def _certified(plan: ClusterPlan) -> ClusterPlan:
    """The plan; without its bound where that is above it, which is a bug that must show."""
    if plan.lower_bound > plan.makespan * (1 + 1e-9):
        warn(
            f"the planner proved a lower bound of {plan.lower_bound:.6g} s for several machines and found a "
            f"plan of {plan.makespan:.6g} s: one of the two is wrong. The plan is returned without a bound; "
            "please report this with the model and machines"
        )
        return replace(plan, lower_bound=0.0, proof="no bound: the one that was found contradicts the plan")
    return plan
