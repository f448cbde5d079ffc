"""Parse command-line options of the form ``KEY=VALUE`` into arguments of :func:`graphplan.plan`.

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

_LEAST_WITHOUT_UNIT = 1024  # bytes: a smaller number must lack its unit


def read_key(text: str) -> DeviceKey:
    """Return a device key: ``"0" -> 0``; other text stays as it is."""
    return int(text) if text.isdigit() else text


def _split_pairs(
    words: Iterable[str], option: str, form: str, error: type[GraphplanError]
) -> Iterator[tuple[str, str]]:
    """Yield the parts before and after the last ``=`` of each word.

    Raise ``error`` for a word that is not of this ``form``, or a key that occurs twice.
    """
    seen: set[DeviceKey] = set()
    for word in words:
        key, _, value = word.rpartition("=")
        if not (key and value):
            raise error(f"{option} {word!r}: write {form}")
        if read_key(key) in seen:
            raise error(f"{option} names {key!r} twice")
        seen.add(read_key(key))
        yield key, value


def read_budgets(words: Sequence[str]) -> dict[DeviceKey, str] | None:
    """Return device key -> size, from words ``KEY=BYTES``, also several with commas; None for no words."""
    budgets: dict[DeviceKey, str] = {}
    parts = (part for whole in words for part in whole.split(","))
    for key, size in _split_pairs(parts, "--max-memory", "KEY=BYTES, as 0=24GiB or cpu=64GiB", BudgetError):
        if size.isdigit() and 0 < int(size) < _LEAST_WITHOUT_UNIT:
            raise BudgetError(
                f"--max-memory {key}={size} is {size} bytes: write {key}={size}GiB for as many GiB"
            )
        budgets[read_key(key)] = size
    return budgets or None


def read_links(words: Sequence[str]) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    """Return links from words ``KEY-KEY=BYTES``, such as ``0-1=450GB``: bytes/s in both directions."""
    links: dict[tuple[DeviceKey, DeviceKey], Link] = {}
    form = "KEY-KEY=BYTES a second, above 0, as 0-1=450GB"
    for pair, speed in _split_pairs(words, "--link", form, DeviceError):
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
            raise DeviceError(f"--link '{pair}={speed}': both devices are the same")
        links[read_key(source), read_key(destination)] = Link(bandwidth)
    return links


def read_pins(words: Sequence[str]) -> dict[str, DeviceKey]:
    """Return name -> device key, from words ``NAME=KEY`` such as ``lm_head=0``.

    Raises:
        PlanError: a word has another form, or a name is given twice.
    """
    pairs = _split_pairs(words, "--pin", "NAME=KEY, as lm_head=0", PlanError)
    return {name: read_key(key) for name, key in pairs}


def read_topology(
    max_memory: list[str] | None,
    device: list[str] | None,
    link: list[str] | None,
    measured: Path | None,
    reserve: str,
) -> Topology:
    """Return the devices that the options of a command describe."""
    budgets, links = read_budgets(max_memory or ()), read_links(link or ())
    if measured is not None and device:
        raise DeviceError("give --measured or --device, not both")
    gpus = _split_pairs(device or (), "--device", "KEY=GPU, as 0=H100", DeviceError)
    speeds: Any = {read_key(key): name for key, name in gpus} or None
    if measured is not None:
        speeds = Measurements.load_json(measured)
    return with_speeds(read_max_memory(budgets, links, reserve), speeds)
