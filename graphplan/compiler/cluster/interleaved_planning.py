"""Plan a model over several machines that take stages in turn, for Interleaved 1F1B.

Stages of a machine divide its budgets: each has a share, as large as its part of what they are estimated to
need, and is placed within it. Where that is too little for one, its estimate grows, and so does its share,
until its machine is full and cuts have to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from graphplan.compiler.cluster.cluster_planning import Cluster, StageSearch
from graphplan.compiler.cluster.stage_placement import Stretch
from graphplan.devices.topology import Topology
from graphplan.ir.cluster.interleaved_order import play
from graphplan.ir.cluster.machine_stage import stage_seconds
from graphplan.message_text import readable_bytes
from graphplan.passes.pipeline.cut_params import PARAMS
from graphplan.passes.pipeline.estimates import Estimates
from graphplan.passes.pipeline.interleaved_dp import InterleavedDP
from graphplan.passes.pipeline.stage_bound import bound_interleaved
from graphplan.passes.pipeline.stage_dp import Floats
from graphplan.passes.placement.certificate import Bound


@dataclass
class InterleavedSearch(StageSearch):
    """Finds stages, several on each machine.

    Attributes:
        growth: class of machines -> (cuts, cuts) factors by which stretches need more than was estimated.
    """

    growth: dict[int, Floats] = field(init=False, default_factory=dict)

    @property
    def table_count(self) -> int:
        """Tables over stretches that the search goes through."""
        return self.most_stages

    @property
    def most_stages(self) -> int:
        """That there may be, and are."""
        flight = self.cluster.flight
        return flight.machines * flight.stages_per_machine

    @property
    def places(self) -> int:
        """Where the model can be cut; in training, so that each later stage has a trained parameter."""
        if not self.cluster.flight.train:
            return super().places
        before = self._trained_before(self.estimates)
        return int((before == 0).sum()) - 1 + len(np.unique(before[before > 0])) - 1

    @property
    def least_cuts(self) -> int:
        """That are needed."""
        return self.most_stages - 1

    def stages(self, estimates: Estimates, cluster: Cluster, microbatches: int) -> list[Stretch] | None:
        """The stages of least seconds by estimate, in order; None where none fit."""
        flight, count = self.cluster.flight, self.most_stages
        class_of = {machine: c for c, members in enumerate(cluster.classes) for machine in members}
        classes = [class_of[index % flight.machines] for index in range(count)]
        kept = [flight.kept(count - 1 - index) for index in range(count)]
        # how much less a training step saves is not estimated: all of it decides shares, and weights cuts
        needs = [self._asked(estimates, c, estimates.needs(k)) for c, k in zip(classes, kept, strict=True)]
        least = [self._asked(estimates, c, estimates.weights) for c in classes] if flight.train else needs
        costs, rooms = estimates.costs(), [_room(machine) for machine in cluster.machines]
        loads = [np.where(self._passes_no_gradient(estimates), np.inf, costs.load[c]) for c in classes]
        found = InterleavedDP(loads, least, rooms, microbatches).solve()
        if found is None or found.excess > 0:
            if estimates is self.estimates:
                self.fullest = _fullest(found.cuts if found else None, least, rooms)
            return None
        pairs = list(pairwise(found.cuts))
        asked = [float(need[pair]) for need, pair in zip(needs, pairs, strict=True)]
        shares = _shares(asked, flight.machines)
        keeps = kept if flight.train else [0] * count
        return [
            Stretch(c, *pair, keep, share)
            for c, pair, keep, share in zip(classes, pairs, keeps, shares, strict=True)
        ]

    def refuse(self, stretch: Stretch) -> None:
        """Let the estimates know that a stretch, and all that contain it, need more."""
        size = len(self.estimates.cuts)
        factors = self.growth.setdefault(stretch.machine, np.ones((size, size)))
        factors[: stretch.start + 1, stretch.end :] *= PARAMS.lack

    def estimated(self, stages: Sequence[Stretch]) -> float:
        """Of a batch in which no machine waits, estimated where stages are not placed."""
        flight, costs = self.cluster.flight, self.estimates.costs()
        busy = [0.0] * flight.machines
        for machine, one in zip(self.machines_of(stages), stages, strict=True):
            busy[machine] += flight.microbatches * float(costs.load[one.machine][one.start, one.end])
        return max(busy)

    def seconds(self, stages: Sequence[Stretch]) -> float:
        """Of a batch, all placed."""
        flight = self.cluster.flight
        sent = self.estimates.transfers / flight.crossings
        each = [
            stage_seconds(placed.plan, float(sent[one.end]), trains=flight.train)
            for placed, one in zip(self.steps_of(stages), stages, strict=True)
        ]
        return max(one.end for one in play(flight.machines, flight.microbatches, each))

    def machines_of(self, stages: Sequence[Stretch]) -> list[int]:
        """The machine of each stage: they take turns."""
        return [index % self.cluster.flight.machines for index in range(len(stages))]

    def bound(self) -> Bound:
        """On the seconds that the objective counts."""
        cluster = self.cluster
        return bound_interleaved(self.boundaries, cluster.machines, cluster.network, cluster.flight)

    # -- cuts and shares -------------------------------------------------------------------------------

    def _asked(self, estimates: Estimates, c: int, nbytes: Floats) -> Floats:
        """(cuts, cuts) bytes with the buffers of a machine that streams, and what placements have added."""
        buffers = estimates.buffers if estimates.machines[c].cpu is not None else 0.0
        growth = self.growth.get(c, 1.0) if estimates is self.estimates else 1.0
        return np.asarray((nbytes + buffers) * growth)

    def _trained_before(self, estimates: Estimates) -> NDArray[np.int64]:
        """(cuts,) how many operations before each read a parameter that is trained."""
        return np.concatenate([[0], np.cumsum(self.reads_trained)])[estimates.cuts]

    def _passes_no_gradient(self, estimates: Estimates) -> NDArray[np.bool_]:
        """(cuts, cuts) whether gradients would have to pass a stretch without a parameter of its own."""
        size = len(estimates.cuts)
        if not self.cluster.flight.train:
            return np.zeros((size, size), dtype=bool)
        before = self._trained_before(estimates)
        return np.asarray((before[:, None] == before[None, :]) & (before[:, None] > 0))


def _room(machine: Topology) -> float:
    return float(sum(spec.room for spec in machine.devices))


def _shares(needs: Sequence[float], machines: int) -> list[int]:
    """For each stage, its part of the budgets of its machine, of ``PARAMS.shares``."""
    found = [0] * len(needs)
    for machine in range(machines):
        own = range(machine, len(needs), machines)
        whole = sum(needs[stage] for stage in own)
        for stage in own:
            found[stage] = max(1, int(PARAMS.shares * needs[stage] / max(whole, 1.0)))
        largest = max(own, key=lambda stage: needs[stage])
        found[largest] += PARAMS.shares - sum(found[stage] for stage in own)
    return found


def _fullest(cuts: Sequence[int] | None, needs: Sequence[Floats], rooms: Sequence[float]) -> str:
    """The machine that lacks most, with its bytes."""
    machines = len(rooms)
    if cuts is None:
        smallest = min(range(machines), key=lambda machine: rooms[machine])
        return f". Machine {smallest} may hold {readable_bytes(int(rooms[smallest]))}"
    held = [0.0] * machines
    for stage, need in enumerate(needs):
        held[stage % machines] += float(need[cuts[stage], cuts[stage + 1]])
    worst = max(range(machines), key=lambda machine: held[machine] / max(rooms[machine], 1.0))
    stages = ", ".join(str(stage) for stage in range(worst, len(needs), machines))
    return (
        f". By estimate machine {worst} holds {readable_bytes(int(held[worst]))} in its stages {stages}, and "
        f"may hold {readable_bytes(int(rooms[worst]))}"
    )
