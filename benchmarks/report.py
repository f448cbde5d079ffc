"""Shared functions of the benchmarks: timing, tables, and JSON results with machine and versions."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from graphplan.report.text import table_lines

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"
_WARM = 2  # rounds that are not counted


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser whose help is a script's docstring."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def machine() -> dict[str, Any]:
    """Return a description of the machine and the versions of libraries."""
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
    """Return name -> seconds of each round, in processor time by default.

    In each round, all calls run one after another. Garbage collection is off.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds + _WARM):
            for name, call in calls.items():
                start = clock()
                call()
                times[name].append(clock() - start)
    finally:
        gc.enable()
    return {name: seconds[_WARM:] for name, seconds in times.items()}


def finished(call: Callable[[], T], device: torch.device) -> T:
    """Return the result of a call after synchronizing the device."""
    result = call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return result


def quickest(
    call: Callable[[], object],
    device: torch.device,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the least seconds of a call, its work on the device included."""
    return min(in_turn({"": partial(finished, call, device)}, rounds, clock)[""])


def set_up(make: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """Return what ``make`` returns, and its wall seconds; the peak of the GPU is counted from here on."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    return finished(make, device), time.perf_counter() - start


def require_cuda() -> None:
    """End the script if there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table with a column for each key of any row; nested keys become ``outer inner``."""
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
    """Return the data of ``results/name.json``; an empty dict if there is no file."""
    path = results / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def write(name: str, data: Mapping[str, Any], results: Path = RESULTS) -> Path:
    """Write ``results/name.json``, with machine and versions first."""
    results.mkdir(exist_ok=True)
    path = results / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **data}, indent=1) + "\n", encoding="utf-8")
    return path
