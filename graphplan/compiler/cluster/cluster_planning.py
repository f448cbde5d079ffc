"""Plan a model over several machines: search cuts by estimates, place each chosen stage, and repeat.

The seconds of a placed stretch replace its estimate, and the cuts are searched again: lazy evaluation of
edges, as in LazySP (Dellin and Srinivasa, ICAPS 2016). The best pipeline of placed stages is the plan. In a
training step, a stretch is placed for each number of microbatches that it keeps in flight.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.analysis.plan import Plan
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.compiler.cluster.stage_placement import StagePlacement, Stretch
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.compiler.training import trainable
from graphplan.devices.topology import DeviceKey, Link, Topology
from graphplan.errors import CaptureError, InfeasibleError
from graphplan.ir.cluster.cluster_plan_data import Objective
from graphplan.ir.cluster.flight import Flight
from graphplan.ir.cluster.machine_stage import stage_seconds
from graphplan.ir.cluster.pipeline_order import batch_seconds
from graphplan.message_text import readable_bytes
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_params import PARAMS
from graphplan.passes.pipeline.estimates import Estimates, operation_seconds
from graphplan.passes.pipeline.stage_bound import FORWARD, PROOF, bound_stages
from graphplan.passes.pipeline.stage_dp import StageDP, states_of
from graphplan.passes.placement.certificate import Bound, checked
from graphplan.passes.placement.params import Limits


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines in the order of their ranks, their network, the pipeline schedule and the objective."""

    machines: tuple[Topology, ...]
    network: Link
    flight: Flight
    objective: Objective = "throughput"

    @property
    def classes(self) -> list[list[int]]:
        """Classes of identical machines, each a list of their indices in order."""
        groups: dict[Hashable, list[int]] = {}
        for index, machine in enumerate(self.machines):
            groups.setdefault(repr(machine), []).append(index)
        return list(groups.values())

    @property
    def class_machines(self) -> list[Topology]:
        """One machine of each class."""
        return [self.machines[members[0]] for members in self.classes]

    @property
    def counted(self) -> int:
        """Number of microbatches whose seconds the objective counts."""
        return 1 if self.objective == "latency" else self.flight.microbatches


def whole_compiler(model_copy: ModelCopy, cluster: Cluster, options: Options) -> Compiler:
    """Return the compiler with which each rank traces the whole model, for all machines' device types."""
    specs = {spec.type: spec for machine in cluster.machines for spec in machine.computing}
    all_devices = replace(cluster.machines[0], devices=tuple(specs.values()))
    options = replace(options, grad=options.differentiates, training=None, stores=False)
    return Compiler(model_copy, all_devices, options)


@dataclass
class StageSearch:
    """Finds stages, one on each machine that is used.

    Attributes:
        annotator: annotator of one microbatch.
        batch: rows of the whole batch, 0 if it is not divided.
        placed: stretch -> its plan, or None if it does not fit.
        by_structure: the same by structure, since equal stretches are placed once.
        refused: the error of a stretch that needs something sent that cannot be sent.
        fullest: the part of an error's text about the machine that lacks most memory.
    """

    model_copy: ModelCopy
    annotator: Annotator
    cluster: Cluster
    options: Options
    batch: int
    placed: dict[Stretch, Plan | None] = field(init=False, default_factory=dict)
    by_structure: dict[Hashable, Plan | None] = field(init=False, default_factory=dict)
    refused: CaptureError | None = field(init=False, default=None)
    fullest: str = field(init=False, default="")

    def __post_init__(self) -> None:
        graph, training, cluster = self.annotator.graph(), self.options.training, self.cluster
        limits = Limits.within(self.options.time_limit)
        if training is not None:
            graph = training.held(graph, self.annotator.capture, frozenset())
        self.boundaries = Boundaries(graph)
        self.estimates = self.estimates_for(cluster)
        self.placement = StagePlacement(
            self.model_copy,
            self.annotator,
            self.options,
            boundaries=self.boundaries,
            cuts=self.estimates.cuts.tolist(),
            machines=cluster.class_machines,
            flight=cluster.flight,
            limits=limits,
        )

    def run(self) -> ClusterPlan:
        """Return the best plan found.

        Raises:
            InfeasibleError: no cut into stages fits the machines.
            CaptureError: each cut that was tried is crossed by a value that cannot be sent.
        """
        best = self.best_stages()
        if best is None:
            raise self.refused or self.infeasible()
        return self._plan(best)

    def best_stages(self) -> list[Stretch] | None:
        """Return the best stages found, in order; None if none fit."""
        best: list[Stretch] | None = None
        best_seconds, placed, refused = math.inf, 0, 0
        while placed < PARAMS.rounds and refused < (PARAMS.refusals if best is None else PARAMS.rounds):
            stages = self._next_candidate()
            if stages is None and best is None and self.estimates.assumes:
                self.estimates = replace(self.estimates, assumes=False)
                stages = self._next_candidate()
            if stages is None:
                break
            if best is not None and self.estimated(stages) > self.estimated(best) * (1 - PARAMS.worth):
                break
            fresh = [stage for stage in dict.fromkeys(stages) if stage not in self.placed]
            for stage in fresh:
                if best is not None and self.placement.limits.over:
                    return best
                self._place(stage)
            if any(self.placed[stage] is None for stage in stages):
                refused += 1
            else:
                placed += 1
                seconds = self.seconds(stages)
                if seconds < best_seconds:
                    best, best_seconds = stages, seconds
            if not fresh:
                break
            self.estimates.calibrate()
        return best

    # -- stages ----------------------------------------------------------------------------------------

    @property
    def table_count(self) -> int:
        """Number of tables over stretches that the search goes through."""
        counts = [len(members) for members in self.cluster.classes]
        return len(states_of(counts)) * len(counts)

    @property
    def most_stages(self) -> int:
        """Largest number of stages; PyTorch's 1F1B needs a microbatch for each."""
        machines, flight = len(self.cluster.machines), self.cluster.flight
        return min(machines, flight.microbatches) if self._is_one_forward_one_backward else machines

    @property
    def _is_one_forward_one_backward(self) -> bool:
        return self.cluster.flight.grad and self.cluster.flight.schedule == "1f1b"

    def estimates_for(self, cluster: Cluster) -> Estimates:
        """Return the estimates of all stretches between candidate cuts, on these machines."""
        boundaries = self.boundaries
        max_cuts = max(int(math.sqrt(PARAMS.cells / self.table_count)), 2 * self.most_stages + 2)
        devices = [s for machine in cluster.machines for s in machine.computing]
        seconds = operation_seconds(boundaries.graph, devices)
        progress = np.concatenate([[0.0], seconds.cumsum()]) / max(float(seconds.sum()), 1e-30)
        cuts = boundaries.candidates(min(max_cuts, PARAMS.cuts), progress)
        if self.cluster.flight.train:
            cuts = np.union1d(cuts[cuts <= np.flatnonzero(self.reads_trained)[-1]], cuts[-1:])
        return Estimates(
            boundaries, cuts, cluster.class_machines, network=cluster.network, flight=cluster.flight
        )

    def stages(self, estimates: Estimates, cluster: Cluster, microbatches: int) -> list[Stretch] | None:
        """Return the stages of least estimated seconds, in order; None if none fit."""
        flight = self.cluster.flight
        counts = [len(members) for members in cluster.classes]
        fits = estimates.fits if flight.grad else None
        found = StageDP(estimates.costs(), counts, fits, self.most_stages).solve(microbatches)
        if found is None:
            return None
        last = len(found.classes) - 1
        in_flight = [
            flight.kept_microbatches(last - index) if flight.train else 0 for index in range(last + 1)
        ]
        return [
            Stretch(c, start, end, kept)
            for c, start, end, kept in zip(found.classes, found.cuts, found.cuts[1:], in_flight, strict=False)
        ]

    def _next_candidate(self) -> list[Stretch] | None:
        """Return the best stages by estimate, none of which is equal to one that did not fit."""
        while True:
            stages = self.stages(self.estimates, self.cluster, self.cluster.counted)
            refused = [stage for stage in dict.fromkeys(stages or ()) if self._is_refused(stage)]
            if not refused:
                return stages
            for stage in refused:
                self._place(stage)

    def _is_refused(self, stretch: Stretch) -> bool:
        if stretch in self.placed:
            return self.placed[stretch] is None
        return self.by_structure.get(self.placement.structure(stretch), stretch) is None

    def _place(self, stretch: Stretch) -> None:
        """Place a stretch, unless an equal one was placed before."""
        key, edge = self.placement.structure(stretch), (stretch.machine, stretch.start, stretch.end)
        if key not in self.by_structure:
            try:
                self.by_structure[key] = self.placement.search(stretch)
            except InfeasibleError:
                self.by_structure[key] = None
            except CaptureError as error:  # a value that crosses cannot be sent: cut elsewhere
                self.by_structure[key], self.refused = None, error
                self.estimates.exact[edge] = math.inf
        placed = self.placed[stretch] = self.by_structure[key]
        if placed is not None:
            self.estimates.exact[edge] = placed.makespan
        else:
            self.refuse(stretch)

    def refuse(self, stretch: Stretch) -> None:
        """Record in the estimates that a stretch does not fit."""
        self.estimates.refused.add((stretch.machine, stretch.start, stretch.end, stretch.kept_microbatches))

    @property
    def reads_trained(self) -> NDArray[np.bool_]:
        """(operations,) whether each needs a trained parameter: no cut comes after the last that does."""
        wanted = trainable(self.model_copy.weights)
        return np.array([not names.isdisjoint(wanted) for names in self.boundaries.weights_needed])

    def plans_of(self, stages: Sequence[Stretch]) -> list[Plan]:
        """Return the plans of the stages, which were placed."""
        return [placed for stage in stages if (placed := self.placed[stage]) is not None]

    def seconds(self, stages: Sequence[Stretch]) -> float:
        """Return the seconds that the objective counts, of placed stages."""
        flight = replace(self.cluster.flight, microbatches=self.cluster.counted)
        sent = self.estimates.transfers / flight.crossings
        stage_times = [
            stage_seconds(placed, float(sent[stage.end]), trains=flight.train)
            for placed, stage in zip(self.plans_of(stages), stages, strict=True)
        ]
        return batch_seconds(flight.order(len(stages)), stage_times)

    def estimated(self, stages: Sequence[Stretch]) -> float:
        """Return the formula of :mod:`graphplan.passes.pipeline.stage_dp` for these stages."""
        costs = self.estimates.costs()
        edges = [(stage.machine, (stage.start, stage.end)) for stage in stages]
        total = sum(float(costs.seconds[c][edge]) for c, edge in edges)
        return total + (self.cluster.counted - 1) * max(float(costs.load[c][edge]) for c, edge in edges)

    # -- the plan ----------------------------------------------------------------------------------------

    def _plan(self, stages: Sequence[Stretch]) -> ClusterPlan:
        cluster, flight = self.cluster, self.cluster.flight
        stage_plans = [
            self.placement.stage(stretch, placed, machine)
            for stretch, placed, machine in zip(
                stages, self.plans_of(stages), self.machines_of(stages), strict=True
            )
        ]
        bound = self.bound()
        plan = ClusterPlan(
            stages=tuple(stage_plans),
            machines=len(cluster.machines),
            network=cluster.network,
            batch=self.batch,
            microbatches=flight.microbatches,
            schedule=flight.schedule,
            objective=cluster.objective,
            lower_bound=bound.seconds,
            proof=FORWARD if flight.train else bound.proof,
            results_on_all=flight.results_on_all,
        )
        # a bound above the plan's seconds is a bug: it is reported, and dropped
        checked_bound = checked(Bound(plan.lower_bound, plan.proof), plan.seconds)
        return replace(plan, lower_bound=checked_bound.seconds, proof=checked_bound.proof)

    @property
    def places(self) -> int:
        """Number of positions where the model can be cut."""
        return len(self.boundaries.allowed) - 2

    @property
    def least_cuts(self) -> int:
        """Fewest cuts that use several machines."""
        return min(1, len(self.cluster.machines) - 1)

    def machines_of(self, stages: Sequence[Stretch]) -> list[int]:
        """Return the machine of each stage."""
        free = [iter(members) for members in self.cluster.classes]
        return [next(free[stage.machine]) for stage in stages]

    def bound(self) -> Bound:
        """Return a lower bound on the seconds that the objective counts."""
        cluster = self.cluster
        stage_bound = bound_stages(self.boundaries, cluster.machines, cluster.network)
        return Bound(stage_bound.seconds(cluster.counted), PROOF)

    def infeasible(self) -> InfeasibleError:
        """Return the error, with budgets that suffice if some are found."""
        weights = readable_bytes(self.boundaries.graph.held_bytes)
        what = "weights, gradients and optimizer state" if self.cluster.flight.train else "weights"
        machines = len(self.cluster.machines)
        text = f"no cut into contiguous stages fits the {machines} machines: {weights} of {what}"
        if self._is_one_forward_one_backward and self.most_stages < machines:
            limit = f"schedule='1f1b' allows one stage for each of the {self.most_stages} microbatches"
            text = f"{text}; {limit}: give microbatches={machines} or schedule='gpipe' to use all machines"
        if self.places < self.least_cuts:
            found = f"are {self.places} places" if self.places else "is no place"
            return InfeasibleError(f"{text}, and there {found} where the model can be cut")
        enough = self._larger_machines()
        if enough is None:
            return InfeasibleError(f"{text}{self.fullest}")
        budgets = [one.budgets for one in enough.machines]
        needed = {(i, key): n for i, one in enumerate(budgets) for key, n in one.items()}
        advice = f"These budgets suffice: machines={budgets}"
        return InfeasibleError(f"{text}{self.fullest}. {advice}", needed=needed)

    def _larger_machines(self) -> Cluster | None:
        """Return the machines with larger budgets that suffice; None if none are found."""
        cluster, factor, searches = self.cluster, 1.0, 0
        for _ in range(PARAMS.growths):
            factor *= PARAMS.growth
            grown = replace(cluster, machines=tuple(one.scaled(factor) for one in cluster.machines))
            # count all activations of a forward pass: how much less a step can save is not estimated
            forward = replace(grown, flight=replace(cluster.flight, train=False))
            if searches == PARAMS.searches:
                return None
            if self.stages(self.estimates_for(forward), forward, 1) is not None:
                searches += 1
                search = self._of(grown)
                if (stages := search.best_stages()) is not None:
                    trimmed = self._trimmed(search, stages)
                    return grown if self._of(trimmed).best_stages() is None else trimmed
        return None

    def _of(self, cluster: Cluster) -> StageSearch:
        return replace(self, cluster=cluster)

    def _trimmed(self, grown: StageSearch, stages: Sequence[Stretch]) -> Cluster:
        """Return the machines with their budgets raised to the bytes that stages of ``grown`` take."""
        memory: list[dict[DeviceKey, int]] = [one.budgets for one in self.cluster.class_machines]
        for stage, step in zip(stages, grown.plans_of(stages), strict=True):
            own, peaks = memory[stage.machine], step.peak_bytes
            for spec in step.topology.devices:
                own[spec.key] = max(own[spec.key], spec.withheld + peaks[spec.key])
        machines = list(self.cluster.machines)
        for members, budgets in zip(self.cluster.classes, memory, strict=True):
            for index in members:
                machines[index] = machines[index].with_memory(budgets)
        return replace(self.cluster, machines=tuple(machines))
