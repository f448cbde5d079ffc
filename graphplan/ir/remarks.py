"""Remarks in words about a plan, for the pages that show its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphplan.devices.topology import DeviceKey


@dataclass(frozen=True, slots=True)
class Remarks:
    """Remarks for a page.

    Attributes:
        advice: a sentence on changes that would save time.
        elsewhere: index of a stage -> another device -> the cost of running the stage there, in words.
    """

    advice: str = ""
    elsewhere: Mapping[int, Mapping[DeviceKey, str]] = field(default_factory=dict)
