"""What every benchmark writes: a table for people, and JSON with the machine and the versions."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from graphplan.report.text import table_lines

RESULTS = Path(__file__).parent / "results"


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


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as text."""
    return "\n".join(table_lines(header, [list(map(str, row)) for row in rows]))


def write(name: str, data: Mapping[str, Any], results: Path = RESULTS) -> Path:
    """Write ``results/name.json``, machine and versions first."""
    results.mkdir(exist_ok=True)
    path = results / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **data}, indent=1) + "\n", encoding="utf-8")
    return path
