"""How planning time grows with operations and devices.

python benchmarks/scaling.py [--operations 500,1000,2000,4000,8000] [--devices 2,4,8,16]

Two kinds of graph: layers of a Llama on like cards, and random operations on cards of two speeds.
A power law, seconds = a * operations^p * devices^q, is fitted to each by least squares on logarithms.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from instances import Instance, random_chain, stack
from report import table, write

from graphplan.passes.place import place

LAYER = 15  # operations of a layer of ``stack``


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: its size, its seconds of planning, its proven gap as a share."""

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
    start = time.perf_counter()
    found = place(problem)
    seconds = time.perf_counter() - start
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
    laws: dict[str, Law] = {}
    rows: list[Row] = []
    for kind in kinds:
        measure(kind, operations[0], devices[0])  # imports and first-use caches
        mine = []
        for count in operations:
            for cards in devices:
                mine.append(measure(kind, count, cards))
                print(f"{kind} {count} x {cards}: {mine[-1].seconds:.2f} s", flush=True)
        rows += mine
        if len(operations) > 1 and len(devices) > 1:
            laws[kind] = fit(mine)
    for kind in kinds:
        print(f"\n{kind}: seconds of planning (proven gap)")
        print(_grid([row for row in rows if row.kind == kind], devices))
        if kind in laws:
            print(f"planning takes {laws[kind]}")
    if len(rows) == len(KINDS) * 20:
        data = {"rows": [asdict(row) for row in rows], "laws": {k: asdict(law) for k, law in laws.items()}}
        print(f"wrote {write('scaling', data)}")


def _grid(rows: Sequence[Row], devices: Sequence[int]) -> str:
    cells = {(row.operations, row.devices): f"{row.seconds:.2f} ({100 * row.gap:.1f} %)" for row in rows}
    sizes = sorted({row.operations for row in rows})
    header = ["operations", *(f"{cards} devices" for cards in devices)]
    return table(header, [[size, *(cells[size, cards] for cards in devices)] for size in sizes])


if __name__ == "__main__":
    main()
