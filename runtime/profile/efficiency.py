"""Estimate what share of a device's nominal speeds each operation type reaches, from timed operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from graphplan.devices.topology import DeviceSpec, Efficiency


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed operation.

    Attributes:
        type: operation type, as :attr:`graphplan.Operation.type`.
        flops: floating-point operations.
        bytes_accessed: bytes that it read and wrote.
        seconds: measured time.
    """

    type: str
    flops: int
    bytes_accessed: int
    seconds: float


def efficiencies(samples: Iterable[Sample], spec: DeviceSpec) -> dict[str, Efficiency]:
    """Return operation type -> the efficiency that explains the measured seconds.

    A sample measures arithmetic or memory, whichever takes longer by the device's nominal speeds. If a type
    has more samples than unknowns, its own overhead is fitted too, by least squares. Otherwise samples tell
    nothing unless their mean time is above twice the device's overhead.

    Args:
        samples: timed operations of one device.
        spec: the device, with its nominal speeds.
    """
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for sample in samples:
        arithmetic, memory = sample.flops / spec.flops, sample.bytes_accessed / spec.bandwidth
        if max(arithmetic, memory) > 0:
            limit = (arithmetic, 0.0) if arithmetic > memory else (0.0, memory)
            rows.setdefault(sample.type, []).append((*limit, sample.seconds))
    fitted = {name: _fitted(np.array(type_rows), spec.overhead) for name, type_rows in rows.items()}
    return {name: efficiency for name, efficiency in fitted.items() if efficiency is not None}


def _fitted(rows: NDArray[np.float64], overhead: float) -> Efficiency | None:
    """Fit the efficiency of one type to (samples, 3) seconds: nominal arithmetic and memory, measured."""
    measured, limits = rows[:, 2], {"flops": rows[:, 0], "bandwidth": rows[:, 1]}
    limits = {figure: expected for figure, expected in limits.items() if expected.any()}
    unknowns = np.column_stack([np.ones(len(rows)), *limits.values()])
    if len(rows) > unknowns.shape[1] == np.linalg.matrix_rank(unknowns):
        (own_overhead, *factors), _ = nnls(unknowns, measured)
        shares = {
            figure: 1 / float(factor) for figure, factor in zip(limits, factors, strict=True) if factor > 0
        }
        return Efficiency(**shares, overhead=float(own_overhead))
    shares = {}
    for figure, expected in limits.items():
        seconds = measured[expected > 0]
        if seconds.sum() > 2 * overhead * len(seconds):
            shares[figure] = float(expected.sum() / (seconds - overhead).sum())
    return Efficiency(**shares) if shares else None
