"""Estimated seconds and bytes of every stretch between two candidate cuts, by class of machines.

Estimates are cheap and usually a little low: operations run on the fastest device of the machine, weights
that its accelerators cannot hold are streamed from the host during computation, and each further accelerator
costs one transfer. The chosen stages are then placed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from graphplan.devices.speeds import Speed
from graphplan.devices.topology import CPU, DeviceSpec, Link, Topology
from graphplan.ir import cost_model
from graphplan.ir.cluster.flight import Flight
from graphplan.ir.graph import Graph
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.stage_dp import Floats, StageCosts


@dataclass(frozen=True)
class Estimates:
    """Tables of stretches, by the candidate cuts where they start (rows) and end (columns).

    Attributes:
        boundaries: boundaries of the graph.
        cuts: candidate positions, both ends included.
        machines: one machine of each class.
        network: the link between any two machines.
        flight: the microbatches in flight.
        exact: (class, start, end) -> seconds of a stretch that was placed; infinite if nothing fits.
        scale: (class, whether weights are streamed) -> correction factor of estimates, by these placements.
        refused: (class, start, end, microbatches that a training step saves) of stretches that do not fit;
            those that contain them, and receive and send as much, do not fit either.
        assumes: whether all that need as many bytes of each kind are taken not to fit. That is usually so,
            but one weight may be too large for a device that holds many small ones.
    """

    boundaries: Boundaries
    cuts: NDArray[np.int64]
    machines: Sequence[Topology]
    network: Link
    flight: Flight = field(default_factory=Flight)
    exact: dict[tuple[int, int, int], float] = field(default_factory=dict)
    scale: dict[tuple[int, bool], float] = field(default_factory=dict)
    refused: set[tuple[int, int, int, int]] = field(default_factory=set)
    assumes: bool = True

    @property
    def graph(self) -> Graph:
        """The graph whose order is cut."""
        return self.boundaries.graph

    def costs(self) -> StageCosts:
        """Return the costs for each class of machines, exact ones in place of estimates where known."""
        receive, send = self.transfers[:, None], self.transfers[None, :]
        seconds = self.seconds()
        return StageCosts(
            [compute + send for compute in seconds], [receive + compute + send for compute in seconds]
        )

    def seconds(self) -> list[Floats]:
        """Return for each class of machines (cuts, cuts) seconds of a stretch, without its sends."""
        tables = [
            moves + work * np.where(streams, self.scale.get((c, True), 1.0), self.scale.get((c, False), 1.0))
            for c, (work, moves, streams) in enumerate(
                zip(self._work, self._moves, self._streams, strict=True)
            )
        ]
        for (c, start, end), value in self.exact.items():
            tables[c][start, end] = value
        for c, start, end, saved in self.refused:
            if not saved:
                tables[c][self._as_large(start, end)] = np.inf
        for table in tables:
            table[np.tri(len(self.cuts), dtype=bool)] = np.inf  # empty or backwards
        return tables

    def calibrate(self) -> None:
        """Scale the estimated work by the median ratio of placed to estimated seconds."""
        ratios = defaultdict[tuple[int, bool], list[float]](list)
        for (c, *stretch), value in self.exact.items():
            edge = tuple(stretch)
            estimate, placed = float(self._work[c][edge]), value - float(self._moves[c][edge])
            if estimate > 0 and 0 < placed < math.inf:
                ratios[c, bool(self._streams[c][edge])].append(placed / estimate)
        self.scale.update({key: float(np.median(values)) for key, values in ratios.items()})

    @cached_property
    def transfers(self) -> Floats:
        """(cuts,) seconds on the network of the tensors that cross a cut; 0 at both ends."""
        seconds = self.boundaries.seconds(self.network)[self.cuts]
        seconds[[0, -1]] = 0.0
        return self.flight.crossings * seconds

    @cached_property
    def buffers(self) -> Floats:
        """(cuts, cuts) bytes that a stretch receives and returns, of all microbatches.

        The stages of ``torch.distributed.pipelining`` keep both until the batch is through.
        """
        nbytes = self.boundaries.crossing_bytes[self.cuts]
        arriving = nbytes.copy()
        arriving[0] = 0.0
        crossing = self.flight.crossings * (arriving[:, None] + nbytes[None, :])
        results = nbytes[-1] if self.flight.results_on_all else 0.0
        return np.asarray(self.flight.microbatches * np.maximum(crossing, results))

    def fits(self, c: int, later_stages: int) -> NDArray[np.bool_]:
        """Return (cuts, cuts) whether the activations saved for backward fit, with so many later stages.

        A training step may save less, by an amount that is not estimated: so there a stage is excluded only
        if it, or one no larger, did not fit with as few microbatches.
        """
        saved = self.flight.kept_microbatches(later_stages)
        if self.flight.train:
            fitting = np.ones((len(self.cuts), len(self.cuts)), dtype=bool)
            for refused_class, start, end, refused_saved in self.refused:
                if refused_class == c and refused_saved <= saved:
                    fitting[self._as_large(start, end)] = False
            return fitting
        return np.asarray(self.needs(saved) <= sum(s.room for s in self.machines[c].computing))

    def _as_large(self, start: int, end: int) -> NDArray[np.bool_]:
        """Return (cuts, cuts) whether a stretch contains this one, or needs as many bytes of each kind."""
        as_large: NDArray[np.bool_] = np.asarray(self.buffers >= self.buffers[start, end])
        if self.assumes:
            for nbytes in (self.weights, self._live, self._saved):
                as_large &= nbytes >= nbytes[start, end]
        else:
            as_large[start + 1 :] = False
            as_large[:, :end] = False
        return as_large

    def needs(self, saved: int) -> Floats:
        """Return (cuts, cuts) bytes of weights, and of activations with ``saved`` microbatches."""
        return np.asarray(self.weights + saved * self._saved + self._live)

    # -- tables ----------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> Floats:
        """(cuts, cuts) bytes of the distinct weights that a stretch needs."""
        graph, cuts = self.graph, self.cuts
        alone = np.zeros(len(graph.operations) + 1)  # with gradients and optimizer state
        shared = np.zeros((len(cuts), len(cuts)))
        for weight in graph.weights.values():
            readers = self.boundaries.needed_at[weight.name]
            if len(readers) == 1:
                alone[readers[0]] += weight.held_bytes
            elif readers:
                starts, ends = cuts[:, None], cuts[None, :]
                read = np.zeros(shared.shape, dtype=bool)
                for reader in readers:
                    read |= (starts <= reader) & (reader < ends)
                shared += weight.held_bytes * read
        prefix = np.concatenate([[0.0], alone.cumsum()])[cuts]
        return np.asarray(shared + np.maximum(prefix[None, :] - prefix[:, None], 0.0))

    @cached_property
    def live_bytes(self) -> Floats:
        """(operations,) bytes of activations and workspace at each operation, all on one device."""
        graph, last = self.graph, self.boundaries.last_needed
        operations = list(graph.operations.values())
        until: dict[str, int] = {}
        for value in graph.values.values():
            root = graph.root(value.name)
            until[root] = max(until.get(root, -1), last.get(value.name, -1))
        change = np.zeros(len(operations) + 2)
        for position, operation in enumerate(operations):
            for name in operation.outputs:
                if nbytes := graph.values[name].nbytes:
                    change[position] += nbytes
                    change[max(position, until.get(name, position)) + 1] -= nbytes
        workspace = np.array([max(operation.workspace.values(), default=0) for operation in operations])
        return np.asarray(change.cumsum()[: len(operations)] + workspace)

    @cached_property
    def _live(self) -> Floats:
        """(cuts, cuts) peak bytes of activations and workspace."""
        pieces = [self.live_bytes[a:b].max(initial=0.0) for a, b in pairwise(self.cuts)]
        peaks = np.zeros((len(self.cuts), len(self.cuts)))
        for start in range(len(pieces)):
            peaks[start, start + 1 :] = np.maximum.accumulate(pieces[start:])
        return peaks

    @cached_property
    def _saved(self) -> Floats:
        """(cuts, cuts) bytes of all activations of one microbatch, which a backward pass may need."""
        graph = self.graph
        output_bytes = [sum(graph.values[v].nbytes for v in op.outputs) for op in graph.operations.values()]
        prefix = np.concatenate([[0.0], np.cumsum(output_bytes)])[self.cuts]
        return np.asarray(np.maximum(prefix[None, :] - prefix[:, None], 0.0))

    @cached_property
    def _work(self) -> list[Floats]:
        """For each class of machines: (cuts, cuts) seconds of operations and of streamed weights."""
        return [self._class_seconds(machine) for machine in self.machines]

    @cached_property
    def _moves(self) -> list[Floats]:
        """For each class: (cuts, cuts) seconds of received and sent tensors between host and accelerator."""
        return [
            self._host_transfers(machine, machine.accelerators[0])
            if machine.accelerators
            else np.zeros_like(self.buffers)
            for machine in self.machines
        ]

    @cached_property
    def _streams(self) -> list[NDArray[np.bool_]]:
        """For each class of machines: (cuts, cuts) whether a stretch exceeds its accelerators' memory."""
        rooms = [[spec.room for spec in machine.accelerators] for machine in self.machines]
        return [self.weights + self._live > (sum(room) if room else np.inf) for room in rooms]

    def _class_seconds(self, machine: Topology) -> Floats:
        accelerators = machine.accelerators
        hosts = [spec for spec in machine.devices if not spec.is_accelerator]
        host_room = np.zeros_like(self.buffers) + sum(spec.room for spec in hosts)
        if any(spec.device == CPU for spec in hosts):
            host_room = host_room - self.buffers
        need = self.weights + self._live
        fastest = operation_seconds(self.graph, accelerators or [s for s in hosts if s.computes])
        prefix = np.concatenate([[0.0], fastest.cumsum()])[self.cuts]
        seconds = prefix[None, :] - prefix[:, None]
        if not accelerators:
            return np.where(need <= host_room, seconds, np.inf)
        room = sum(spec.room for spec in accelerators)
        if len(accelerators) > 1:
            largest = max(spec.room for spec in accelerators)
            hop = machine.link(accelerators[0].key, accelerators[1].key)
            further = np.clip(np.ceil(need / max(largest, 1)) - 1, 0, len(accelerators) - 1)
            narrowest = float(min(self.boundaries.crossing_bytes[self.cuts][1:-1], default=0))
            seconds = seconds + further * (hop.latency + narrowest / hop.bandwidth)
        excess = np.maximum(0.0, need - room)
        host = next((spec.key for spec in hosts), CPU)
        # each stage on a shared machine has a share of its accelerators, and so streams more
        missing = np.minimum(np.maximum(0.0, need - room / self.flight.stages_per_machine), host_room)
        streamed = missing / machine.link(host, accelerators[0].key).bandwidth
        return np.where(excess <= host_room, np.maximum(seconds, streamed), np.inf)

    def _host_transfers(self, machine: Topology, device: DeviceSpec) -> Floats:
        host = machine.cpu or CPU
        to_device, to_host = machine.link(host, device.key), machine.link(device.key, host)
        arrive, leave = (self.boundaries.seconds(link)[self.cuts] for link in (to_device, to_host))
        return arrive[:, None] + leave[None, :]


def operation_seconds(graph: Graph, devices: Sequence[DeviceSpec]) -> Floats:
    """Return (operations,) seconds of each operation on the fastest of these devices."""
    operations = graph.operations.values()
    speeds = {repr(Speed.of(spec)): spec for spec in devices}
    by_speed = [
        [cost_model.operation_seconds(operation, spec) for operation in operations]
        for spec in speeds.values()
    ]
    return np.asarray(np.min(by_speed, axis=0))
