"""A lower bound on every pipeline of contiguous stages of the order, cut anywhere.

Each operation takes at least its seconds on the fastest device of all machines, each cut at least the
seconds of its tensors on the network. Let ``P`` be prefix sums of the former and ``x`` the latter.

- One microbatch takes at least ``P[end]`` plus, if at least ``k`` machines are needed to hold the weights,
  ``k - 1`` times the least ``x``.
- The busiest machine takes at least the least ``T`` such that ``n`` stretches with ``x[i] + P[j] - P[i] +
  x[j] <= T``, each with weights that fit some machine, cover the order: the probe of chains on chains (Pinar
  and Aykanat, JPDC 2004). A running minimum of ``x - P`` gives the positions reachable with ``k`` stretches.

Interleaved stages share machines, and the second argument does not hold. A batch of ``m`` microbatches in
``n`` stages on ``p`` machines then takes at least

- ``m (P[end] + 2 (n - 1) x) / p``, with the least ``x``: a machine does one thing at a time, together they
  do all of this, and the busiest does at least the mean.
- ``P[end] + (n - 1) x + (m - 1) t`` for the operation of the longest ``t``: its machine runs it for each
  microbatch, and does nothing else meanwhile; the operations before precede its first run, those after
  follow its last.

Layout operations that are free if their input arrives dense count as free. A weight counts only at its first
reader, so that shared weights make the bound lower, but never invalid. Views of weights, which every stage
makes for itself, are not readers: the operations that read the views are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphplan.devices.topology import Link, Topology
from graphplan.ir.cluster.flight import Flight
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_params import PARAMS
from graphplan.passes.pipeline.estimates import operation_seconds
from graphplan.passes.pipeline.stage_dp import Floats
from graphplan.passes.placement.certificate import Bound
from graphplan.passes.placement.params import ROUNDING

INTERLEAVED = "work divided among all machines, operations at their fastest"
PROOF = "contiguous stages, operations at their fastest"
FORWARD = "the forward pass alone, in contiguous stages, operations at their fastest"
_FREE_WHERE_DENSE = ("reshape", "contiguous", "flatten", "clone", "to.")


@dataclass(frozen=True, slots=True)
class StageBound:
    """Lower bounds on the seconds of every contiguous pipeline.

    Attributes:
        total: seconds of one microbatch.
        slowest: seconds of the busiest machine for one microbatch.
    """

    total: float
    slowest: float

    def seconds(self, microbatches: int) -> float:
        """Return the bound for ``microbatches``: see :mod:`graphplan.passes.pipeline.stage_dp`."""
        return self.total + (microbatches - 1) * self.slowest


def bound_stages(boundaries: Boundaries, machines: Sequence[Topology], network: Link) -> StageBound:
    """Return the bounds for stages of a graph on at most these machines."""
    return bound_prefix(
        _fastest(boundaries, machines),
        boundaries.seconds(network),
        _first_reads(boundaries),
        [float(sum(spec.room for spec in machine.devices)) for machine in machines],
        boundaries.allowed,
    )


def bound_interleaved(
    boundaries: Boundaries, machines: Sequence[Topology], network: Link, flight: Flight
) -> Bound:
    """Return the bound on the seconds of a batch for interleaved stages on these machines."""
    seconds = bound_interleaved_batch(
        _fastest(boundaries, machines),
        boundaries.seconds(network)[boundaries.allowed[1:-1]],
        len(machines),
        flight.stages_per_machine,
        flight.microbatches,
    )
    return Bound(seconds, INTERLEAVED)


def bound_interleaved_batch(
    seconds: Floats, transfer: Floats, machines: int, stages_per_machine: int, microbatches: int
) -> float:
    """Return the bound of :func:`bound_interleaved` from plain figures.

    ``transfer``: (positions,) seconds of the tensors that cross each allowed cut, both ends excluded.
    """
    cuts, total = machines * stages_per_machine - 1, float(seconds.sum())
    cheapest_cut = float(transfer.min(initial=np.inf))
    mean_busy = microbatches * (total + 2 * cuts * cheapest_cut) / machines
    longest = total + cuts * cheapest_cut + (microbatches - 1) * float(seconds.max(initial=0.0))
    return max(mean_busy, longest)


def _fastest(boundaries: Boundaries, machines: Sequence[Topology]) -> Floats:
    """Return (operations,) seconds of each on the fastest device of all machines."""
    graph = boundaries.graph
    devices = [spec for machine in machines for spec in machine.computing]
    free = [
        op.target.startswith(_FREE_WHERE_DENSE) or name in boundaries.recomputed
        for name, op in graph.operations.items()
    ]
    return np.where(free, 0.0, operation_seconds(graph, devices))


def bound_prefix(
    seconds: Floats, transfer: Floats, weights: Floats, rooms: Sequence[float], allowed: NDArray[np.int64]
) -> StageBound:
    """Return the bounds of :func:`bound_stages` from plain figures.

    Args:
        seconds: (operations,) seconds of each.
        transfer: (operations + 1,) seconds of the tensors that cross each position.
        weights: (operations,) bytes of the weights that each is the first to read.
        rooms: bytes of each machine.
        allowed: positions that may be cut, both ends included.
    """
    prefix = np.concatenate([[0.0], seconds.cumsum()])[allowed]
    held = np.concatenate([[0.0], weights.cumsum()])[allowed]
    crossing = transfer[allowed].copy()
    crossing[[0, -1]] = 0.0
    largest = sorted(rooms, reverse=True)
    needed = int(np.searchsorted(np.cumsum(largest), held[-1])) + 1  # machines to hold the weights
    cheapest_cut = float(crossing[1:-1].min(initial=np.inf)) if needed > 1 else 0.0
    total = float(prefix[-1]) + ((needed - 1) * cheapest_cut if np.isfinite(cheapest_cut) else 0.0)
    first = np.searchsorted(held, held - largest[0] * (1 + ROUNDING), side="left")
    low, high = float(prefix[-1]) / len(rooms), float(prefix[-1])
    if _covers(low, prefix, crossing, first, len(rooms)):
        return StageBound(total, low)
    for _ in range(PARAMS.bisections):
        middle = (low + high) / 2
        if _covers(middle, prefix, crossing, first, len(rooms)):
            high = middle
        else:
            low = middle
    return StageBound(total, low)


def _covers(limit: float, prefix: Floats, crossing: Floats, first: NDArray[np.int64], machines: int) -> bool:
    """Whether ``machines`` stretches within a limit, each from ``first[end]`` or later, cover the order."""
    size = len(prefix)
    reached = np.zeros(size, dtype=bool)
    reached[0] = True
    ends = np.arange(size)
    for _ in range(machines):
        key = np.where(reached, crossing - prefix, np.inf)
        # a stretch that starts where it ends is empty, and changes nothing
        through = _window_minimum(key, first, ends) + prefix + crossing
        extended = reached | (through <= limit * (1 + ROUNDING))
        if extended[-1]:
            return True
        if (extended == reached).all():
            return False
        reached = extended
    return False


def _window_minimum(values: Floats, first: NDArray[np.int64], last: NDArray[np.int64]) -> Floats:
    """Return the least of ``values[first : last + 1]`` for each pair, by a sparse table of powers of two."""
    tables = [values]
    while (1 << len(tables)) <= len(values):
        width = 1 << (len(tables) - 1)
        previous = tables[-1]
        shifted = np.concatenate([previous[width:], np.full(width, np.inf)])
        tables.append(np.minimum(previous, shifted))
    level = np.floor(np.log2(last - first + 1)).astype(np.int64)
    table = np.stack(tables)
    return np.asarray(np.minimum(table[level, first], table[level, last - (1 << level) + 1]))


def _first_reads(boundaries: Boundaries) -> Floats:
    """Return (operations,) bytes of the weights that each operation is the first to need in its stage."""
    nbytes = np.zeros(len(boundaries.graph.operations))
    for name, positions in boundaries.needed_at.items():
        if positions:
            nbytes[positions[0]] += boundaries.graph.weights[name].nbytes
    return nbytes
