"""Seconds for an operation on a device and for a value over a link.

An operation takes the longer of its arithmetic and its memory traffic (the roofline model: Williams,
Waterman, Patterson, CACM 2009), plus the device's overhead; one that only makes views takes none.
"""

from __future__ import annotations

from graphplan.device import DeviceSpec, Topology
from graphplan.graph import Operation
from graphplan.schedule import Load, Move

__all__ = ["move_seconds", "operation_seconds"]


def operation_seconds(operation: Operation, device: DeviceSpec) -> float:
    """Modelled seconds of one operation; infinite where the device does not compute."""
    if not device.computes:
        return float("inf")
    if operation.host_only or not (operation.flops or operation.bytes_accessed):
        return 0.0
    work = max(operation.flops / device.flops, operation.bytes_accessed / device.bandwidth)
    return device.overhead + work


def move_seconds(move: Move | Load, topology: Topology) -> float:
    """Modelled seconds of one copy between devices."""
    return topology.link(move.source, move.destination).seconds(move.nbytes)
