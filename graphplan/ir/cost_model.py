"""Seconds for an operation on a device and for a value over a link.

An operation takes the longer of its arithmetic and its memory traffic (the roofline model: Williams,
Waterman, Patterson, CACM 2009), plus the device's overhead; one that only makes views takes none. Where it is
known what a type of operation reaches of both figures, and its own overhead, that counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from graphplan.devices.topology import DeviceKey, DeviceSpec, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.schedule import Load, Move


def operation_seconds(operation: Operation, device: DeviceSpec) -> float:
    """Estimated seconds of one operation; infinite where the device does not compute."""
    if not device.computes:
        return math.inf
    if operation.host_only or not (operation.flops or operation.bytes_accessed):
        return 0.0
    arithmetic, memory = operation.flops / device.flops, operation.bytes_accessed / device.bandwidth
    reached = device.efficiency.get(operation.type) if device.efficiency else None
    overhead = device.overhead
    if reached is not None:
        arithmetic, memory = arithmetic / reached.flops, memory / reached.bandwidth
        overhead = overhead if reached.overhead is None else reached.overhead
    return overhead + max(arithmetic, memory)


def optimizer_seconds(graph: Graph, topology: Topology, homes: Mapping[str, DeviceKey]) -> float:
    """Estimated seconds of an optimizer's step over parameters where they reside.

    It takes as long as its memory traffic; devices work side by side.

    Args:
        graph: of a training step.
        topology: of its devices.
        homes: name of each weight -> where it resides.
    """
    taken: dict[DeviceKey, float] = defaultdict(float)
    for weight in graph.weights.values():
        if weight.step_traffic:
            home = homes[weight.name]
            taken[home] += weight.step_traffic / topology[home].bandwidth
    return max(taken.values(), default=0.0)


def move_seconds(move: Move | Load, topology: Topology) -> float:
    """Estimated seconds of one copy between devices."""
    return topology.link(move.source, move.destination).seconds(move.nbytes)
