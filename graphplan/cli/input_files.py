"""Files that the command line names: plans and measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from graphplan.analysis.plan import Plan
from graphplan.devices.speeds import Measurements
from graphplan.errors import PlanError

__all__ = ["read_measurements", "read_plan"]

Held = TypeVar("Held")


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
