"""One measured call, in the words of the modelled one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphplan.devices.topology import DeviceKey
from graphplan.ir.timeline import Timeline

__all__ = ["Measured"]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one call took.

    Attributes:
        timeline: seconds since the call began, of each operation, move and copy of weights.
        peak_bytes: device key -> the most bytes that were allocated; devices that count none are left out.
    """

    timeline: Timeline
    peak_bytes: Mapping[DeviceKey, int]
