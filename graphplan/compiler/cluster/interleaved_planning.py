"""Plan a model over several machines that take stages in turn, for Interleaved 1F1B.

The stages of a machine divide its budgets: each is placed within a share, in proportion to the bytes that it
is estimated to need. If the share of a stage is too small, its estimate grows, and so does its share, until
the machine is full and cuts have to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from graphplan.compiler.cluster.cluster_planning import Cluster, StageSearch
from graphplan.compiler.cluster.stage_placement import Stretch
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
        growth: class of machines -> (cuts, cuts) factors by which stretches need more bytes than estimated.
    """

    growth: dict[int, Floats] = field(init=False, default_factory=dict)

    @property
    def table_count(self) -> int:
        """Number of tables over stretches that the search goes through."""
        return self.most_stages

    @property
    def most_stages(self) -> int:
        """Number of stages, which is fixed."""
        flight = self.cluster.flight
        return flight.machines * flight.stages_per_machine

    @property
    def places(self) -> int:
        """Number of positions for cuts; in training, such that each later stage has a trained parameter."""
        if not self.cluster.flight.train:
            return super().places
        before = self._trained_before(self.estimates)
        return int((before == 0).sum()) - 1 + len(np.unique(before[before > 0])) - 1

    @property
    def least_cuts(self) -> int:
        """Number of cuts, which is fixed."""
        return self.most_stages - 1

    def stages(self, estimates: Estimates, cluster: Cluster, microbatches: int) -> list[Stretch] | None:
        """Return the stages of least estimated seconds, in order; None if none fit."""
        flight, count = self.cluster.flight, self.most_stages
        class_of = {machine: c for c, members in enumerate(cluster.classes) for machine in members}
        classes = [class_of[index % flight.machines] for index in range(count)]
        in_flight = [flight.kept_microbatches(count - 1 - index) for index in range(count)]
        # how much less a step can save is not estimated: shares count all activations, cuts only weights
        needs = [
            self._bytes(estimates, c, estimates.needs(k)) for c, k in zip(classes, in_flight, strict=True)
        ]
        weight_needs = (
            [self._bytes(estimates, c, estimates.weights) for c in classes] if flight.train else needs
        )
        costs = estimates.costs()
        capacities = [float(sum(spec.room for spec in machine.devices)) for machine in cluster.machines]
        loads = [np.where(self._passes_no_gradient(estimates), np.inf, costs.load[c]) for c in classes]
        solution = InterleavedDP(loads, weight_needs, capacities, microbatches).solve()
        if solution is None or solution.excess > 0:
            if estimates is self.estimates:
                self.fullest = _fullest_text(solution.cuts if solution else None, weight_needs, capacities)
            return None
        pairs = list(pairwise(solution.cuts))
        needed = [float(need[pair]) for need, pair in zip(needs, pairs, strict=True)]
        shares = _shares(needed, flight.machines)
        kept_activations = in_flight if flight.train else [0] * count
        return [
            Stretch(c, *pair, kept, share)
            for c, pair, kept, share in zip(classes, pairs, kept_activations, shares, strict=True)
        ]

    def refuse(self, stretch: Stretch) -> None:
        """Raise the estimated bytes of a stretch that does not fit, and of all that contain it."""
        size = len(self.estimates.cuts)
        factors = self.growth.setdefault(stretch.machine, np.ones((size, size)))
        factors[: stretch.start + 1, stretch.end :] *= PARAMS.lack

    def estimated(self, stages: Sequence[Stretch]) -> float:
        """Return the estimate of :mod:`graphplan.passes.pipeline.interleaved_dp` for these stages."""
        flight, costs = self.cluster.flight, self.estimates.costs()
        loads = [float(costs.load[stage.machine][stage.start, stage.end]) for stage in stages]
        busiest = max(sum(loads[machine :: flight.machines]) for machine in range(flight.machines))
        return flight.microbatches * busiest + (flight.machines - 1) * max(loads)

    def machines_of(self, stages: Sequence[Stretch]) -> list[int]:
        """Return the machine of each stage: machines take turns."""
        return [index % self.cluster.flight.machines for index in range(len(stages))]

    def bound(self) -> Bound:
        """Return a lower bound on the seconds that the objective counts."""
        cluster = self.cluster
        return bound_interleaved(self.boundaries, cluster.machines, cluster.network, cluster.flight)

    # -- cuts and shares -------------------------------------------------------------------------------

    def _bytes(self, estimates: Estimates, c: int, nbytes: Floats) -> Floats:
        """(cuts, cuts) bytes with network buffers if the CPU has a budget, and with growth after refusals."""
        buffers = estimates.buffers if estimates.machines[c].cpu is not None else 0.0
        growth = self.growth.get(c, 1.0) if estimates is self.estimates else 1.0
        return np.asarray((nbytes + buffers) * growth)

    def _trained_before(self, estimates: Estimates) -> NDArray[np.int64]:
        """(cuts,) number of operations before each cut that read a trained parameter."""
        return np.concatenate([[0], np.cumsum(self.reads_trained)])[estimates.cuts]

    def _passes_no_gradient(self, estimates: Estimates) -> NDArray[np.bool_]:
        """(cuts, cuts) whether gradients would have to pass through a stretch without a trained parameter."""
        size = len(estimates.cuts)
        if not self.cluster.flight.train:
            return np.zeros((size, size), dtype=bool)
        before = self._trained_before(estimates)
        return np.asarray((before[:, None] == before[None, :]) & (before[:, None] > 0))


def _shares(needs: Sequence[float], machines: int) -> list[int]:
    """Return each stage's share of its machine's budgets, in units of one ``PARAMS.shares``-th."""
    shares = [0] * len(needs)
    for machine in range(machines):
        own = range(machine, len(needs), machines)
        whole = sum(needs[stage] for stage in own)
        for stage in own:
            shares[stage] = max(1, int(PARAMS.shares * needs[stage] / max(whole, 1.0)))
        largest = max(own, key=lambda stage: needs[stage])
        shares[largest] += PARAMS.shares - sum(shares[stage] for stage in own)
    return shares


def _fullest_text(cuts: Sequence[int] | None, needs: Sequence[Floats], capacities: Sequence[float]) -> str:
    """Return the text of an error about the machine that lacks most memory."""
    machines = len(capacities)
    if cuts is None:
        smallest = min(range(machines), key=lambda machine: capacities[machine])
        return f". Machine {smallest} may hold {readable_bytes(int(capacities[smallest]))}"
    held = [0.0] * machines
    for stage, need in enumerate(needs):
        held[stage % machines] += float(need[cuts[stage], cuts[stage + 1]])
    worst = max(range(machines), key=lambda machine: held[machine] / max(capacities[machine], 1.0))
    stages = ", ".join(str(stage) for stage in range(worst, len(needs), machines))
    return (
        f". By estimate, machine {worst} needs {readable_bytes(int(held[worst]))} for its stages {stages}, "
        f"and may hold {readable_bytes(int(capacities[worst]))}"
    )
