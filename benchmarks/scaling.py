"""How planning time grows with operations and devices.

python benchmarks/scaling.py [--operations 500,1000,2000,4000,8000] [--devices 2,4,8,16]

Two kinds of graph: layers of a Llama on like cards, and random operations on cards of two speeds.
A power law, seconds = a * operations^p * devices^q, is fitted to each by least squares on logarithms.
Seconds are those of the processor, so that what else a machine does is not in them. Results are written
after each plan, in place of older ones of the same size.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from instances import Instance, random_chain, stack
from planner_api import place
from report import RESULTS, table, write

LAYER = 15  # operations of a layer of ``stack``


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: its size, the processor's seconds of planning, its proven gap as a share."""

    kind: str
    operations: int
    devices: int
    seconds: float
    gap: float


@dataclass(frozen=True, slots=True)
class Law:
    """seconds = scale * operations^by_operations * devices^by_devices.

    ``spread`` is the factor by which a measurement typically differs from it.
    """

    scale: float
    by_operations: float
    by_devices: float
    spread: float

    def __str__(self) -> str:
        power = f"operations^{self.by_operations:.2f} x devices^{self.by_devices:.2f}"
        return f"{self.scale:.3g} s x {power} (within a factor of {self.spread:.2f})"


def _stacked(operations: int, devices: int) -> Instance:
    return stack(max(1, round(operations / LAYER)), devices)


KINDS: dict[str, Callable[[int, int], Instance]] = {"stack": _stacked, "random": random_chain}


def measure(kind: str, operations: int, devices: int) -> Row:
    """Plan one instance."""
    instance = KINDS[kind](operations, devices)
    problem = instance.problem
    start = time.process_time()
    found = place(problem)
    seconds = time.process_time() - start
    gap = 1 - found.lower_bound / found.evaluation.seconds
    return Row(kind, len(instance.graph.operations), devices, seconds, gap)


def fit(rows: Sequence[Row]) -> Law:
    """The power law nearest to the logarithms of what was measured."""
    logs = np.log([[row.operations, row.devices, row.seconds] for row in rows])
    system = np.column_stack([np.ones(len(rows)), logs[:, :2]])
    solution = np.linalg.lstsq(system, logs[:, 2], rcond=None)[0]
    error = np.sqrt(np.mean((system @ solution - logs[:, 2]) ** 2))
    return Law(float(np.exp(solution[0])), float(solution[1]), float(solution[2]), float(np.exp(error)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", default="500,1000,2000,4000,8000")
    parser.add_argument("--devices", default="2,4,8,16")
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    operations = [int(n) for n in options.operations.split(",")]
    devices = [int(n) for n in options.devices.split(",")]
    kinds = options.kinds.split(",")
    rows: list[Row] = []
    for kind in kinds:
        measure(kind, operations[0], devices[0])  # imports and first-use caches
        for count in operations:
            for cards in devices:
                row = measure(kind, count, cards)
                print(f"{kind} {count} x {cards}: {row.seconds:.2f} s", flush=True)
                rows = keep(row)
    for kind in kinds:
        mine = [row for row in rows if row.kind == kind]
        print(f"\n{kind}: the processor's seconds of planning (proven gap)")
        print(grid(mine))
        if law := law_of(mine):
            print(f"planning takes {law}")


def keep(row: Row, results: Path = RESULTS) -> list[Row]:
    """Write a row beside those that are known, in place of an older one; returns all."""
    path = results / "scaling.json"
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    known = {(old["kind"], old["operations"], old["devices"]): Row(**old) for old in before}
    known[row.kind, row.operations, row.devices] = row
    rows = [known[key] for key in sorted(known)]
    laws = {kind: law_of([r for r in rows if r.kind == kind]) for kind in KINDS}
    kept = {kind: asdict(law) for kind, law in laws.items() if law is not None}
    write("scaling", {"rows": [asdict(r) for r in rows], "laws": kept}, results)
    return rows


def law_of(rows: Sequence[Row]) -> Law | None:
    """The law of what was measured; None for less than two sizes, or two numbers of devices."""
    varied = len({row.operations for row in rows}) > 1 and len({row.devices for row in rows}) > 1
    return fit(rows) if varied else None


def grid(rows: Sequence[Row]) -> str:
    """A table with a line for each number of operations."""
    cells = {(row.operations, row.devices): f"{row.seconds:.2f} ({100 * row.gap:.1f} %)" for row in rows}
    sizes, devices = sorted({row.operations for row in rows}), sorted({row.devices for row in rows})
    header = ["operations", *(f"{cards} devices" for cards in devices)]
    return table(header, [[size, *(cells.get((size, cards), "-") for cards in devices)] for size in sizes])


if __name__ == "__main__":
    main()
