"""What types of operation reach of a device's figures: from operations that were timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphplan.devices.topology import DeviceSpec, Efficiency


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation that ran.

    Attributes:
        type: of the operation, as :attr:`graphplan.Operation.type`.
        flops: floating-point operations.
        bytes_accessed: bytes that it read and wrote.
        seconds: that it took.
    """

    type: str
    flops: int
    bytes_accessed: int
    seconds: float


def efficiencies(samples: Iterable[Sample], spec: DeviceSpec) -> dict[str, Efficiency]:
    """Of each type of operation, what of the device's figures explains the seconds that were measured.

    A sample tells of arithmetic or of memory, whichever takes longer by the device's figures. Where all
    samples of a type take hardly longer than the overhead, they tell nothing.

    Args:
        samples: of operations of one device.
        spec: the device, with its figures.
    """
    sums: dict[tuple[str, bool], list[float]] = {}
    for sample in samples:
        arithmetic, memory = sample.flops / spec.flops, sample.bytes_accessed / spec.bandwidth
        if max(arithmetic, memory) > 0:
            total = sums.setdefault((sample.type, arithmetic > memory), [0.0, 0.0, 0.0])
            total[0] += max(arithmetic, memory)
            total[1] += sample.seconds - spec.overhead
            total[2] += spec.overhead
    found: dict[str, dict[str, float]] = {}
    for (kind, arithmetical), (expected, measured, overhead) in sums.items():
        if measured > overhead:
            figure = "flops" if arithmetical else "bandwidth"
            found.setdefault(kind, {})[figure] = expected / measured
    return {kind: Efficiency(**shares) for kind, shares in found.items()}
