"""What a page says about a plan in words, beside its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphplan.devices.topology import DeviceKey


@dataclass(frozen=True, slots=True)
class Remarks:
    """Words for a page.

    Attributes:
        advice: a sentence on what would save time.
        elsewhere: index of a stage -> other device -> what it would cost to run the stage there.
    """

    advice: str = ""
    elsewhere: Mapping[int, Mapping[DeviceKey, str]] = field(default_factory=dict)
