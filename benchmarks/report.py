"""What every benchmark writes: a table for people, and JSON with the machine and the versions."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from graphplan.report.text import table_lines

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"
_WARM = 2  # rounds that are not counted


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser of options whose help is a script's docstring."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "python": platform.python_version(),
        "versions": {
            name: version(name) for name in ("torch", "transformers", "accelerate", "networkx", "numpy")
        },
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def in_turn(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Name -> seconds of each call, one after another in each round; garbage is not collected.

    They are the processor's unless another clock is given.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds + _WARM):
            for name, call in calls.items():
                start = clock()
                call()
                found[name].append(clock() - start)
    finally:
        gc.enable()
    return {name: taken[_WARM:] for name, taken in found.items()}


def finished(call: Callable[[], T], device: torch.device) -> T:
    """What a call returns, once the device has done all of it."""
    result = call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return result


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each row, a column for each figure that one has: those of a group are ``group figure``."""
    flat = [dict(_flat(row)) for row in rows]
    header = list(dict.fromkeys(name for row in flat for name in row))
    return "\n".join(table_lines(header, [[_cell(row.get(name)) for name in header] for row in flat]))


def _flat(row: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{group}{name} ")
        else:
            yield f"{group}{name}", value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def recorded(name: str, results: Path = RESULTS) -> dict[str, Any]:
    """What ``results/name.json`` has; nothing where it is not there."""
    path = results / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def write(name: str, data: Mapping[str, Any], results: Path = RESULTS) -> Path:
    """Write ``results/name.json``, machine and versions first."""
    results.mkdir(exist_ok=True)
    path = results / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **data}, indent=1) + "\n", encoding="utf-8")
    return path
