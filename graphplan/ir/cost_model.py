"""The cost model: seconds of an operation on a device, and of a copy over a link.

An operation takes the longer of its arithmetic and its memory traffic (the roofline model: Williams,
Waterman, Patterson, CACM 2009), plus the device's overhead; an operation that only makes views takes no time.
A measured efficiency or overhead of an operation type replaces the device's figures.
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
    """Return the estimated seconds of one operation; infinite if the device does not compute."""
    if not device.computes:
        return math.inf
    if operation.host_only or not (operation.flops or operation.bytes_accessed):
        return 0.0
    arithmetic, memory = operation.flops / device.flops, operation.bytes_accessed / device.bandwidth
    efficiency = device.efficiency.get(operation.type) if device.efficiency else None
    overhead = device.overhead
    if efficiency is not None:
        arithmetic, memory = arithmetic / efficiency.flops, memory / efficiency.bandwidth
        overhead = overhead if efficiency.overhead is None else efficiency.overhead
    return overhead + max(arithmetic, memory)


def optimizer_seconds(graph: Graph, topology: Topology, homes: Mapping[str, DeviceKey]) -> float:
    """Return the estimated seconds of an optimizer's step over parameters where they reside.

    It takes as long as its memory traffic; devices work in parallel.

    Args:
        graph: graph of a training step.
        topology: its devices.
        homes: name of each weight -> the device where it resides.
    """
    seconds: dict[DeviceKey, float] = defaultdict(float)
    for weight in graph.weights.values():
        if weight.step_traffic:
            home = homes[weight.name]
            seconds[home] += weight.step_traffic / topology[home].bandwidth
    return max(seconds.values(), default=0.0)


def move_seconds(move: Move | Load, topology: Topology) -> float:
    """Return the estimated seconds of one copy between devices."""
    return topology.link(move.source, move.destination).seconds(move.nbytes)
