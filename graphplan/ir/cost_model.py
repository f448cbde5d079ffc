"""Seconds for an operation on a device and for a value over a link.

An operation takes the longer of its arithmetic and its memory traffic (the roofline model: Williams,
Waterman, Patterson, CACM 2009), plus the device's overhead; one that only makes views takes none. Where it is
known what a type of operation reaches of both figures, and its own overhead, that counts.
"""

from __future__ import annotations

import math

from graphplan.devices.topology import DeviceSpec, Topology
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


def move_seconds(move: Move | Load, topology: Topology) -> float:
    """Estimated seconds of one copy between devices."""
    return topology.link(move.source, move.destination).seconds(move.nbytes)
