"""Training steps of small models beside eager, on budgets that are too small for them; writes JSON.

python tests/sweep/training_sweep.py [--only STEM ...] [--resume]

Every transformers architecture of tests/helpers/architectures.py, shrunken, in train mode, and every plain
module: each with half, and 0.7, of what its step takes on one simulated accelerator, and the CPU, and on two
accelerators of 0.65. Three forward and backward passes (losses and gradients within 1e-5 of eager), measured
bytes below the plan's, and 50 steps of AdamW, after which weights are within 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
sys.path += [str(_ROOT / "tests" / "helpers"), str(_ROOT / "benchmarks")]

import torch
from architectures import TABLE
from plain_modules import PLAIN
from report import RESULTS, write
from shortcuts import short_search
from torch import nn
from training_steps import CONFIGURATIONS, budgets_of, check_training, example, needed

from graphplan.message_text import first_line

# Adam divides a gradient by its size: one that is zero but for rounding, such as that of a key's bias in
# attention, would move its weight by the learning rate
ADAMW = partial(torch.optim.AdamW, eps=1e-3)
FURTHER = 48  # steps beside the two of the check


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in train mode, and its inputs."""
    for architecture in TABLE:
        if architecture.stem == name:
            return example(architecture)
    torch.manual_seed(0)
    make, inputs = PLAIN[name]
    return make(), {"x": inputs()}


def row_of(name: str, size: int, configuration: int) -> dict[str, Any]:
    """What came of one configuration."""
    row: dict[str, Any] = {"model": name, "shares": str(CONFIGURATIONS[configuration]), "needed": size}
    start = time.process_time()
    try:
        model, inputs = build(name)
        with short_search():
            plan = check_training(
                model,
                inputs,
                budgets_of(size, configuration),
                optimizer=ADAMW,
                exact=False,
                further=FURTHER,
            )
    except Exception as error:  # whatever it is, it is what came of it
        return {**row, "ok": False, "error": first_line(error)}
    operations = plan.graph.operations.values()
    return {
        **row,
        "ok": True,
        "planned": {str(key): nbytes for key, nbytes in plan.peak_bytes.items()},
        "recomputed": sum(bool(one.repeats) for one in operations),
        "offloaded": sum(one.offloads for one in operations),
        "streamed_bytes": plan.streamed_bytes,
        "seconds": round(time.process_time() - start, 1),
    }


def rows_of(name: str) -> list[dict[str, Any]]:
    """The configurations of a model."""
    try:
        model, inputs = build(name)
        with short_search():
            size = needed(model, inputs, optimizer=ADAMW)
    except Exception as error:  # likewise
        return [{"model": name, "ok": False, "error": first_line(error)}]
    return [row_of(name, size, configuration) for configuration in range(len(CONFIGURATIONS))]


def main() -> None:
    """Run, print, and write after every model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="stems of architectures, or names of plain modules")
    parser.add_argument("--resume", action="store_true", help="keep the rows of other models")
    parser.add_argument("--into", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    names = arguments.only or [architecture.stem for architecture in TABLE] + list(PLAIN)
    path = arguments.into / "training_sweep.json"
    rows = json.loads(path.read_text())["rows"] if arguments.resume and path.exists() else []
    if arguments.resume and not arguments.only:
        names = [name for name in names if name not in {row["model"] for row in rows}]
    for name in names:
        found = rows_of(name)
        rows = [row for row in rows if row["model"] != name] + found
        write("training_sweep", {"rows": rows}, arguments.into)
        print(name, *("ok" if row["ok"] else row["error"] for row in found), flush=True)


if __name__ == "__main__":
    main()
