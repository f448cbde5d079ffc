"""Words of the command line of the form ``KEY=VALUE``, read into what :func:`graphplan.plan` takes.

>>> read_budgets(["0=24GiB", "cpu=64GiB"])
{0: '24GiB', 'cpu': '64GiB'}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from accelerate.utils import convert_file_size_to_int

from graphplan.analysis.plan import Plan
from graphplan.devices.datasheets import card_names, find_card
from graphplan.devices.speeds import Measurements, Speed
from graphplan.devices.topology import CPU, DeviceKey, Link
from graphplan.errors import BudgetError, DeviceError, PlanError

__all__ = [
    "read_budgets",
    "read_key",
    "read_links",
    "read_measurements",
    "read_pins",
    "read_plan",
    "read_speeds",
]

Held = TypeVar("Held")


def read_key(text: str) -> DeviceKey:
    """``"0"`` is accelerator 0; all else stays text."""
    return int(text) if text.isdigit() else text


def read_budgets(words: Sequence[str]) -> dict[DeviceKey, int | float | str] | None:
    """``KEY=BYTES`` each, several in one with commas; None where there are none.

    Raises:
        BudgetError: a word that is no such pair, or a key that is given twice.
    """
    found: dict[DeviceKey, int | float | str] = {}
    for word in (part for whole in words for part in whole.split(",")):
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise BudgetError(f"--max-memory {word!r}: write KEY=BYTES, as 0=24GiB or cpu=64GiB")
        if read_key(key) in found:
            raise BudgetError(f"--max-memory names {key!r} twice")
        found[read_key(key)] = value
    return found or None


def read_speeds(words: Sequence[str]) -> dict[DeviceKey, Speed]:
    """``KEY=CARD`` each, as ``0=H100``.

    Raises:
        DeviceError: a word that is no such pair, or a card that is not known.
    """
    found: dict[DeviceKey, Speed] = {}
    for word in words:
        key, _, name = word.partition("=")
        if not (key and name):
            raise DeviceError(f"--device {word!r}: write KEY=CARD, as 0=H100")
        card = find_card(name)
        if card is None:
            raise DeviceError(
                f"--device {word!r}: no card {name!r} is known; known are {', '.join(card_names())}"
            )
        found[read_key(key)] = Speed(card.flops, card.bandwidth)
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
    for word in words:
        pair, _, speed = word.partition("=")
        source, _, destination = pair.partition("-")
        try:
            bandwidth = float(convert_file_size_to_int(speed.removesuffix("/s")))
        except ValueError:
            bandwidth = 0.0
        if not (source and destination and bandwidth > 0):
            raise DeviceError(f"--link {word!r}: write KEY-KEY=BYTES a second, as 0-1=450GB")
        ends = read_key(source), read_key(destination)
        known = None if budgets is None else [*budgets, CPU]
        for key in ends:
            if known is not None and key not in known:
                raise DeviceError(f"--link {word!r}: --max-memory names no {key!r}")
        found[ends] = Link(bandwidth)
    return found


def read_pins(words: Sequence[str]) -> dict[str, DeviceKey]:
    """``NAME=KEY`` each, as ``lm_head=0``.

    Raises:
        PlanError: a word that is none.
    """
    found: dict[str, DeviceKey] = {}
    for word in words:
        name, _, key = word.rpartition("=")
        if not (name and key):
            raise PlanError(f"--pin {word!r}: write NAME=KEY, as lm_head=0")
        found[name] = read_key(key)
    return found


def read_plan(path: Path) -> Plan:
    """The plan of a JSON file.

    Raises:
        PlanError: the file holds none.
        OSError: it cannot be read.
    """
    return _read(path, Plan.from_json, repr(str(path)), "plan")


def read_measurements(path: Path) -> Measurements:
    """What the file that ``--measured`` names holds; raises as :func:`read_plan`."""
    return _read(path, Measurements.from_json, f"--measured {str(path)!r}", "measurements")


def _read(path: Path, decode: Callable[[str], Held], where: str, noun: str) -> Held:
    try:
        return decode(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise PlanError(f"{where} holds no {noun}: it is no text") from error
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
