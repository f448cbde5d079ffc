"""What types of operation reach of a device's figures: from operations that were timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

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
    samples of a type take hardly longer than the overhead, they tell nothing. Where there are more samples
    than unknowns, the type has an overhead of its own, by least squares.

    Args:
        samples: of operations of one device.
        spec: the device, with its figures.
    """
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for sample in samples:
        arithmetic, memory = sample.flops / spec.flops, sample.bytes_accessed / spec.bandwidth
        if max(arithmetic, memory) > 0:
            limit = (arithmetic, 0.0) if arithmetic > memory else (0.0, memory)
            rows.setdefault(sample.type, []).append((*limit, sample.seconds))
    found = {kind: _explained(np.array(of_kind), spec.overhead) for kind, of_kind in rows.items()}
    return {kind: efficiency for kind, efficiency in found.items() if efficiency is not None}


def _explained(rows: NDArray[np.float64], overhead: float) -> Efficiency | None:
    """Of samples of one type: seconds of arithmetic or of memory by the device's figures, and measured."""
    measured, limits = rows[:, 2], {"flops": rows[:, 0], "bandwidth": rows[:, 1]}
    limits = {figure: expected for figure, expected in limits.items() if expected.any()}
    unknowns = np.column_stack([np.ones(len(rows)), *limits.values()])
    if len(rows) > unknowns.shape[1] == np.linalg.matrix_rank(unknowns):
        (own, *factors), _ = nnls(unknowns, measured)
        shares = {
            figure: 1 / float(factor) for figure, factor in zip(limits, factors, strict=True) if factor > 0
        }
        return Efficiency(**shares, overhead=float(own))
    shares = {}
    for figure, expected in limits.items():
        here = measured[expected > 0]
        if here.sum() > 2 * overhead * len(here):
            shares[figure] = float(expected.sum() / (here - overhead).sum())
    return Efficiency(**shares) if shares else None
