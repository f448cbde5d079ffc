"""Words of the command line of the form ``KEY=VALUE``, read into what :func:`graphplan.plan` takes.

>>> read_budgets(["0=24GiB", "cpu=64GiB"])
{0: '24GiB', 'cpu': '64GiB'}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from graphplan.devices.max_memory import read_max_memory, text_bytes
from graphplan.devices.speeds import Measurements, with_speeds
from graphplan.devices.topology import DeviceKey, Link, Topology
from graphplan.errors import BudgetError, DeviceError, GraphplanError, PlanError

_LEAST = 1024  # bytes: a smaller number without a unit is meant otherwise


def read_key(text: str) -> DeviceKey:
    """``"0"`` is accelerator 0; all else stays text."""
    return int(text) if text.isdigit() else text


def _pairs(
    words: Iterable[str], option: str, form: str, error: type[GraphplanError]
) -> Iterator[tuple[str, str]]:
    """What is before and behind the last ``=`` of each word; ``error`` where it is not of the form that is
    wanted, or what is before comes twice.
    """
    seen: set[DeviceKey] = set()
    for word in words:
        left, _, right = word.rpartition("=")
        if not (left and right):
            raise error(f"{option} {word!r}: write {form}")
        if read_key(left) in seen:
            raise error(f"{option} names {left!r} twice")
        seen.add(read_key(left))
        yield left, right


def read_budgets(words: Sequence[str]) -> dict[DeviceKey, str] | None:
    """``KEY=BYTES`` each, several in one with commas; None where there are none."""
    found: dict[DeviceKey, str] = {}
    parts = (part for whole in words for part in whole.split(","))
    for key, size in _pairs(parts, "--max-memory", "KEY=BYTES, as 0=24GiB or cpu=64GiB", BudgetError):
        if size.isdigit() and 0 < int(size) < _LEAST:
            raise BudgetError(
                f"--max-memory {key}={size} is {size} bytes: write {key}={size}GiB for as many GiB"
            )
        found[read_key(key)] = size
    return found or None


def read_links(words: Sequence[str]) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    """``KEY-KEY=BYTES`` each: bytes per second in both directions, as ``0-1=450GB``."""
    found: dict[tuple[DeviceKey, DeviceKey], Link] = {}
    form = "KEY-KEY=BYTES a second, above 0, as 0-1=450GB"
    for pair, speed in _pairs(words, "--link", form, DeviceError):
        source, _, destination = pair.partition("-")
        try:
            bandwidth = float(text_bytes(speed.removesuffix("/s")))
        except (ValueError, OverflowError):
            bandwidth = math.nan
        if not (source and destination) or math.isnan(bandwidth):
            raise DeviceError(f"--link '{pair}={speed}': write {form}")
        if bandwidth <= 0:
            raise DeviceError(f"--link '{pair}={speed}': the bandwidth must be above 0")
        if source == destination:
            raise DeviceError(f"--link '{pair}={speed}': name two devices, this is one")
        found[read_key(source), read_key(destination)] = Link(bandwidth)
    return found


def read_pins(words: Sequence[str]) -> dict[str, DeviceKey]:
    """``NAME=KEY`` each, as ``lm_head=0``.

    Raises:
        PlanError: a word that is none, or a name that is given twice.
    """
    pairs = _pairs(words, "--pin", "NAME=KEY, as lm_head=0", PlanError)
    return {name: read_key(key) for name, key in pairs}


def read_topology(
    max_memory: list[str] | None,
    device: list[str] | None,
    link: list[str] | None,
    measured: Path | None,
    reserve: str,
) -> Topology:
    """The devices that the words of a command describe."""
    budgets, links = read_budgets(max_memory or ()), read_links(link or ())
    if measured is not None and device:
        raise DeviceError("give --measured or --device, not both")
    cards = _pairs(device or (), "--device", "KEY=CARD, as 0=H100", DeviceError)
    speeds: Any = {read_key(key): name for key, name in cards} or None
    if measured is not None:
        speeds = Measurements.load_json(measured)
    return with_speeds(read_max_memory(budgets, links, reserve), speeds)
