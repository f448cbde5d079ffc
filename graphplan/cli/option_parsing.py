"""Words of the command line of the form ``KEY=VALUE``, read into what :func:`graphplan.plan` takes.

>>> read_budgets(["0=24GiB", "cpu=64GiB"])
{0: '24GiB', 'cpu': '64GiB'}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import convert_file_size_to_int

from graphplan.devices.max_memory import read_max_memory, read_size
from graphplan.devices.speeds import Measurements, Speed, with_speeds
from graphplan.devices.topology import CPU, DeviceKey, Link, Topology
from graphplan.errors import BudgetError, DeviceError, GraphplanError, PlanError

Held = TypeVar("Held")
_LEAST = 1024  # bytes: a smaller number without a unit is meant otherwise


def read_key(text: str) -> DeviceKey:
    """``"0"`` is accelerator 0; all else stays text."""
    return int(text) if text.isdigit() else text


def _pairs(
    words: Iterable[str], option: str, form: str, error: type[GraphplanError]
) -> Iterator[tuple[str, str]]:
    """What is before and behind the last ``=`` of each word; else ``error``, with the form that is wanted."""
    for word in words:
        left, _, right = word.rpartition("=")
        if not (left and right):
            raise error(f"{option} {word!r}: write {form}")
        yield left, right


def read_budgets(words: Sequence[str]) -> dict[DeviceKey, int | float | str] | None:
    """``KEY=BYTES`` each, several in one with commas; None where there are none.

    Raises:
        BudgetError: a word that is no such pair, or a key that is given twice.
    """
    found: dict[DeviceKey, int | float | str] = {}
    parts = (part for whole in words for part in whole.split(","))
    for key, size in _pairs(parts, "--max-memory", "KEY=BYTES, as 0=24GiB or cpu=64GiB", BudgetError):
        if read_key(key) in found:
            raise BudgetError(f"--max-memory names {key!r} twice")
        nbytes = read_size(size, f"--max-memory {key}")
        if size.isdigit() and 0 < nbytes < _LEAST:
            raise BudgetError(
                f"--max-memory {key}={size} is {size} bytes: write {key}={size}GiB for as many GiB"
            )
        found[read_key(key)] = size
    return found or None


def read_speeds(words: Sequence[str]) -> dict[DeviceKey, Speed]:
    """``KEY=CARD`` each, as ``0=H100``.

    Raises:
        DeviceError: a word that is no such pair, or a card that is not known.
    """
    found: dict[DeviceKey, Speed] = {}
    for key, name in _pairs(words, "--device", "KEY=CARD, as 0=H100", DeviceError):
        try:
            found[read_key(key)] = Speed.of_card(name)
        except DeviceError as error:
            raise DeviceError(f"--device '{key}={name}': {error}") from error
    return found


def read_links(
    words: Sequence[str], budgets: Iterable[DeviceKey] | None
) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    """``KEY-KEY=BYTES`` each: bytes per second in both directions, as ``0-1=450GB``.

    Args:
        words: of the command line.
        budgets: the devices that may be linked, the CPU beside them; None for any.

    Raises:
        DeviceError: a word that is none, or a device that has no budget.
    """
    found: dict[tuple[DeviceKey, DeviceKey], Link] = {}
    known, form = None if budgets is None else [*budgets, CPU], "KEY-KEY=BYTES a second, as 0-1=450GB"
    for pair, speed in _pairs(words, "--link", form, DeviceError):
        source, _, destination = pair.partition("-")
        try:
            bandwidth = float(convert_file_size_to_int(speed.removesuffix("/s")))
        except ValueError:
            bandwidth = 0.0
        if not (source and destination and bandwidth > 0):
            raise DeviceError(f"--link '{pair}={speed}': write {form}")
        ends = read_key(source), read_key(destination)
        for key in ends:
            if known is not None and key not in known:
                raise DeviceError(f"--link '{pair}={speed}': --max-memory names no {key!r}")
        found[ends] = Link(bandwidth)
    return found


def read_pins(words: Sequence[str]) -> dict[str, DeviceKey]:
    """``NAME=KEY`` each, as ``lm_head=0``.

    Raises:
        PlanError: a word that is none.
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
    budgets = read_budgets(max_memory or ())
    links = read_links(link or (), budgets)
    if measured is not None and device:
        raise DeviceError("give --measured or --device, not both")
    speeds: Any = read_speeds(device or ()) or None
    if measured is not None:
        speeds = Measurements.load_json(measured)
    return with_speeds(read_max_memory(budgets, links, reserve), speeds)
