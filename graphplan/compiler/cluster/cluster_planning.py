"""Plan a model over several machines: cuts by estimates, each chosen stage placed for true, and again.

Estimates of stretches that were placed give way to what the placement takes, and the cuts are searched
again: lazy evaluation of edges, as in LazySP (Dellin and Srinivasa, ICAPS 2016). The best pipeline of placed
stages is the plan. In a training step a stage is another one for each number of microbatches that it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.compiler.cluster.stage_placement import StagePlacement, Stretch
from graphplan.compiler.cluster.stage_step import StepPlan
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.compiler.training import trainable
from graphplan.devices.topology import DeviceKey, Link, Topology
from graphplan.errors import CaptureError, InfeasibleError, InputError
from graphplan.ir.cluster.cluster_plan_data import Objective
from graphplan.ir.cluster.flight import Flight
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
    """The machines, in the order of their ranks, the network between any two, and how they are used."""

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
    def class_machines(self) -> list[Topology]:
        """One of each class."""
        return [self.machines[members[0]] for members in self.classes]

    @property
    def counted(self) -> int:
        """Microbatches that the objective counts."""
        return 1 if self.objective == "latency" else self.flight.microbatches


def whole_compiler(model_copy: ModelCopy, cluster: Cluster, options: Options) -> Compiler:
    """What traces the whole model, as every rank does: it knows the kinds of devices of all machines."""
    specs = {spec.type: spec for machine in cluster.machines for spec in machine.computing}
    every = replace(cluster.machines[0], devices=tuple(specs.values()))
    return Compiler(model_copy, every, replace(options, grad=options.differentiates, training=None))


@dataclass
class StageSearch:
    """Finds stages, one on each machine that is used; ``annotator`` is of one microbatch.

    ``batch`` has the rows of the whole batch, 0 where it is not divided; ``fullest`` is what an error says of
    the machine that lacks most.
    """

    model_copy: ModelCopy
    annotator: Annotator
    cluster: Cluster
    options: Options
    batch: int
    boundaries: Boundaries = field(init=False)
    estimates: Estimates = field(init=False)
    placement: StagePlacement = field(init=False)
    placed: dict[Stretch, StepPlan | None] = field(init=False, default_factory=dict)
    known: dict[Hashable, StepPlan | None] = field(init=False, default_factory=dict)
    refused: CaptureError | None = field(init=False, default=None)
    fullest: str = field(init=False, default="")

    def run(self) -> ClusterPlan:
        """The best plan that is found.

        Raises:
            InfeasibleError: no cut into stages fits the machines.
            CaptureError: something crosses at each that cannot be sent.
            InputError: a training step by 1F1B has fewer microbatches than stages.
        """
        best = self.found()
        if best is None:
            raise self.refused or self.infeasible()
        return self._plan(best)

    def found(self) -> list[Stretch] | None:
        """The best stages that are found, in order; None where none fit."""
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
            self.boundaries,
            self.estimates.cuts.tolist(),
            cluster.class_machines,
            cluster.flight,
            limits,
        )
        best: list[Stretch] | None = None
        least, placed, refused = math.inf, 0, 0
        while placed < PARAMS.rounds and refused < (PARAMS.refusals if best is None else PARAMS.rounds):
            stages = self._not_refused()
            if stages is None and best is None and self.estimates.assumes:
                self.estimates = replace(self.estimates, assumes=False)
                stages = self._not_refused()
            if stages is None or self.estimated(stages) > least * (1 - PARAMS.worth):
                break
            fresh = [stage for stage in dict.fromkeys(stages) if stage not in self.placed]
            for stage in fresh:
                if best is not None and limits.over:
                    return best
                self._place(stage)
            if any(self.placed[stage] is None for stage in stages):
                refused += 1
            else:
                placed += 1
                seconds = self.seconds(stages)
                if seconds < least:
                    best, least = stages, seconds
            if not fresh:
                break
            self.estimates.calibrate()
        return best

    # -- stages ----------------------------------------------------------------------------------------

    @property
    def table_count(self) -> int:
        """Tables over stretches that the search goes through."""
        counts = [len(members) for members in self.cluster.classes]
        return len(states_of(counts)) * len(counts)

    @property
    def most_stages(self) -> int:
        """That there may be."""
        return len(self.cluster.machines)

    def estimates_for(self, cluster: Cluster) -> Estimates:
        """Of all stretches between candidate cuts, on machines like these."""
        boundaries = self.boundaries
        most = max(int(math.sqrt(PARAMS.cells / self.table_count)), 2 * self.most_stages + 2)
        every = [s for machine in cluster.machines for s in machine.computing]
        seconds = operation_seconds(boundaries.graph, every)
        progress = np.concatenate([[0.0], seconds.cumsum()]) / max(float(seconds.sum()), 1e-30)
        cuts = boundaries.candidates(min(most, PARAMS.cuts), progress)
        if self.cluster.flight.train:
            cuts = np.union1d(cuts[cuts <= np.flatnonzero(self.reads_trained)[-1]], cuts[-1:])
        return Estimates(boundaries, cuts, cluster.class_machines, cluster.network, cluster.flight)

    def stages(self, estimates: Estimates, cluster: Cluster, microbatches: int) -> list[Stretch] | None:
        """The stages of least seconds by estimate, in order; None where none fit."""
        flight = self.cluster.flight
        counts = [len(members) for members in cluster.classes]
        fits = estimates.fits if flight.grad else None
        found = StageDP(estimates.costs(), counts, fits).solve(microbatches)
        if found is None:
            return None
        last = len(found.classes) - 1
        kept = [flight.kept(last - index) if flight.train else 0 for index in range(last + 1)]
        return [
            Stretch(c, start, end, keeps)
            for c, start, end, keeps in zip(found.classes, found.cuts, found.cuts[1:], kept, strict=False)
        ]

    def _not_refused(self) -> list[Stretch] | None:
        """The best stages by estimate, none of them as one that was found not to fit."""
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
        return self.known.get(self.placement.structure(stretch), stretch) is None

    def _place(self, stretch: Stretch) -> None:
        """Place a stretch, unless an equal one was placed before."""
        key, edge = self.placement.structure(stretch), (stretch.machine, stretch.start, stretch.end)
        if key not in self.known:
            try:
                self.known[key] = self.placement.search(stretch)
            except InfeasibleError:
                self.known[key] = None
            except CaptureError as error:  # something crosses here that cannot be sent: cut elsewhere
                self.known[key], self.refused = None, error
                self.estimates.exact[edge] = math.inf
        placed = self.placed[stretch] = self.known[key]
        if placed is not None:
            self.estimates.exact[edge] = placed.plan.makespan
        else:
            self.refuse(stretch)

    def refuse(self, stretch: Stretch) -> None:
        """Let the estimates know that a stretch does not fit."""
        self.estimates.refused.add((stretch.machine, stretch.start, stretch.end, stretch.kept))

    @property
    def reads_trained(self) -> NDArray[np.bool_]:
        """(operations,) whether each reads a parameter that is trained: no cut is after the last."""
        graph, wanted = self.boundaries.graph, trainable(self.model_copy.weights)
        return np.array([any(graph.root(n) in wanted for n in op.inputs) for op in graph.operations.values()])

    def steps_of(self, stages: Sequence[Stretch]) -> list[StepPlan]:
        """What was placed."""
        return [placed for stage in stages if (placed := self.placed[stage]) is not None]

    def seconds(self, stages: Sequence[Stretch]) -> float:
        """Of what the objective counts, all placed."""
        return self._counted(stages, [placed.plan.makespan for placed in self.steps_of(stages)])

    def estimated(self, stages: Sequence[Stretch]) -> float:
        """As :meth:`seconds`, estimated where stages are not placed."""
        tables = self.estimates.seconds()
        return self._counted(stages, [float(tables[one.machine][one.start, one.end]) for one in stages])

    def _counted(self, stages: Sequence[Stretch], each: Sequence[float]) -> float:
        sent = self.estimates.transfers
        loads = [sent[one.start] + s + sent[one.end] for s, one in zip(each, stages, strict=True)]
        total = sum(s + sent[one.end] for s, one in zip(each, stages, strict=True))
        return float(total + (self.cluster.counted - 1) * max(loads))

    # -- the answer --------------------------------------------------------------------------------------

    def _plan(self, stages: Sequence[Stretch]) -> ClusterPlan:
        cluster, flight = self.cluster, self.cluster.flight
        if flight.grad and flight.schedule == "1f1b" and flight.microbatches < len(stages):
            raise InputError(
                f"schedule='1f1b' needs a microbatch for each stage, and there are {flight.microbatches} for "
                f"{len(stages)} stages: give microbatches={len(stages)} or more, or schedule='gpipe'"
            )
        made = [
            self.placement.stage(stretch, placed, machine)
            for stretch, placed, machine in zip(
                stages, self.steps_of(stages), self.machines_of(stages), strict=True
            )
        ]
        bound = self.bound()
        plan = ClusterPlan(
            stages=tuple(made),
            machines=len(cluster.machines),
            network=cluster.network,
            batch=self.batch,
            microbatches=flight.microbatches,
            schedule=flight.schedule,
            objective=cluster.objective,
            lower_bound=bound.seconds,
            proof=FORWARD if flight.train else bound.proof,
        )
        # without its bound where that is above it, which is a bug that must show
        found = checked(Bound(plan.lower_bound, plan.proof), plan.seconds)
        return replace(plan, lower_bound=found.seconds, proof=found.proof)

    @property
    def places(self) -> int:
        """Where the model can be cut."""
        return len(self.boundaries.allowed) - 2

    @property
    def least_cuts(self) -> int:
        """That are needed to use several machines."""
        return min(1, len(self.cluster.machines) - 1)

    def machines_of(self, stages: Sequence[Stretch]) -> list[int]:
        """The machine of each stage."""
        free = [iter(members) for members in self.cluster.classes]
        return [next(free[stage.machine]) for stage in stages]

    def bound(self) -> Bound:
        """On the seconds that the objective counts."""
        cluster = self.cluster
        found = bound_stages(self.boundaries, cluster.machines, cluster.network)
        return Bound(found.seconds(cluster.counted), PROOF)

    def infeasible(self) -> InfeasibleError:
        """The error, with budgets that would do, if they are found."""
        cluster, factor = self.cluster, 1.0
        weights = readable_bytes(self.boundaries.graph.held_bytes)
        what = "weights, gradients and optimizer state" if cluster.flight.train else "weights"
        said = f"no cut into contiguous stages fits the {len(cluster.machines)} machines: {weights} of {what}"
        if self.places < self.least_cuts:
            found = f"are {self.places} places" if self.places else "is no place"
            return InfeasibleError(f"{said}, and there {found} where the model can be cut")
        said += self.fullest
        searches = 0
        for _ in range(PARAMS.growths):
            factor *= PARAMS.growth
            grown = replace(cluster, machines=tuple(one.scaled(factor) for one in cluster.machines))
            # by all that a forward pass makes: how much less a training step saves is not estimated
            forward = replace(grown, flight=replace(cluster.flight, train=False))
            if searches == PARAMS.searches:
                break
            if self.stages(self.estimates_for(forward), forward, 1) is not None:
                searches += 1
                search = self._of(grown)
                if (stages := search.found()) is not None:
                    trimmed = self._trimmed(search, stages)
                    enough = grown if self._of(trimmed).found() is None else trimmed
                    budgets = [one.budgets for one in enough.machines]
                    needed = {(i, key): n for i, one in enumerate(budgets) for key, n in one.items()}
                    do = f"These budgets would do: machines={budgets}"
                    return InfeasibleError(f"{said}. {do}", needed=needed)
        return InfeasibleError(said)

    def _of(self, cluster: Cluster) -> StageSearch:
        return replace(self, cluster=cluster)

    def _trimmed(self, grown: StageSearch, stages: Sequence[Stretch]) -> Cluster:
        """The machines with no more beside their own budgets than stages of grown ones take."""
        memory: list[dict[DeviceKey, int]] = [one.budgets for one in self.cluster.class_machines]
        for stage, step in zip(stages, grown.steps_of(stages), strict=True):
            own, peaks = memory[stage.machine], step.plan.peak_bytes
            for spec in step.plan.topology.devices:
                own[spec.key] = max(own[spec.key], spec.withheld + peaks[spec.key])
        machines = list(self.cluster.machines)
        for members, budgets in zip(self.cluster.classes, memory, strict=True):
            for index in members:
                machines[index] = machines[index].with_memory(budgets)
        return replace(self.cluster, machines=tuple(machines))
