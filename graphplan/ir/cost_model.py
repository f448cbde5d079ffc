"""Seconds for an operation on a device and for a value over a link.

An operation takes the longer of its arithmetic and its memory traffic (the roofline model: Williams,
Waterman, Patterson, CACM 2009), plus the device's overhead; one that only makes views takes none.
"""

from __future__ import annotations

from collections.abc import Iterable

from graphplan.devices.topology import DeviceSpec, Topology
from graphplan.ir.graph_elements import Operation
from graphplan.ir.schedule import Load, Move


def operation_seconds(operation: Operation, device: DeviceSpec) -> float:
    """Estimated seconds of one operation; infinite where the device does not compute."""
    return all_seconds((operation,), device)[0]


def all_seconds(operations: Iterable[Operation], device: DeviceSpec) -> list[float]:
    """Estimated seconds of each operation, in order."""
    if not device.computes:
        return [float("inf") for _ in operations]
    flops, bandwidth, overhead = device.flops, device.bandwidth, device.overhead
    return [
        overhead + max(operation.flops / flops, operation.bytes_accessed / bandwidth)
        if (operation.flops or operation.bytes_accessed) and not operation.host_only
        else 0.0
        for operation in operations
    ]


def move_seconds(move: Move | Load, topology: Topology) -> float:
    """Estimated seconds of one copy between devices."""
    return topology.link(move.source, move.destination).seconds(move.nbytes)
