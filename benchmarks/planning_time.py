"""How planning time grows: stage by stage with the depth of a model, and of the search with operations.

python benchmarks/planning_time.py [--layers 2 32 80] [--operations 500 1000 2000 4000 8000]
                                   [--devices 2 4 8 16]

Llamas of the 70B's width on the meta device are planned over eight devices. The search alone is given two
kinds of graph: layers of a Llama on like cards, and random operations on cards of two speeds. For each kind
and number of devices, seconds = a * operations^p is fitted by least squares on logarithms. Seconds are those
of the processor, so that what else a machine does is not in them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from instances import Instance, random_chain, stack
from models import LLAMA_70B
from report import table, write
from transformers import LlamaForCausalLM

from graphplan.capture.model_copy import ModelCopy
from graphplan.compiler.options import Options
from graphplan.compiler.pipeline import Compiler, EntryCall
from graphplan.devices.max_memory import read_max_memory
from graphplan.passes.placement.driver import place

T = TypeVar("T")
MODEL_DEVICES = 8
LAYER = 15  # operations of a layer of ``stack``
KINDS: dict[str, Callable[[int, int], Instance]] = {
    "stack": lambda operations, devices: stack(round(operations / LAYER), devices),
    "random": random_chain,
}


# -- stage by stage --------------------------------------------------------------------------------


def stages(layers: int, devices: int = MODEL_DEVICES) -> dict[str, Any]:
    """Seconds of each stage of planning a Llama of the 70B's width."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA_70B(num_hidden_layers=layers)).to(torch.bfloat16).eval()
        ids = torch.zeros(1, 512, dtype=torch.long)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    topology = read_max_memory({i: int(size / devices * 1.15) + (6 << 30) for i in range(devices)})
    seconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        result = work()
        seconds[stage] = time.process_time() - start
        return result

    compiler = Compiler(timed("copy", lambda: ModelCopy(model)), topology, Options())
    call = compiler.model_copy.bind((), {"input_ids": ids})
    timed("capture", lambda: compiler.trace(call))
    timed("annotate", lambda: compiler.pose(EntryCall(call)))
    planned = timed("place", lambda: compiler.plan(call))
    operations, gap = len(planned.plan.graph.operations), planned.plan.gap
    return {"layers": layers, "operations": operations, "gap": gap, "seconds": seconds}


def stage_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each depth."""
    lines = []
    for row in rows:
        total = sum(row["seconds"].values())
        lines.append([row["layers"], row["operations"], *(f"{s:.2f}" for s in row["seconds"].values())])
        lines[-1] += [f"{total:.2f}", f"{total / row['layers']:.3f}", f"{100 * row['gap']:.2f} %"]
    return table(["layers", "operations", *rows[0]["seconds"], "total s", "s / layer", "gap"], lines)


# -- the search alone ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One search: its size, the processor's seconds, its proven gap as a share."""

    kind: str
    operations: int
    devices: int
    seconds: float
    gap: float


@dataclass(frozen=True, slots=True)
class Law:
    """seconds = scale * operations^exponent, of one kind of graph on so many devices."""

    kind: str
    devices: int
    scale: float
    exponent: float


def search(kind: str, operations: int, devices: int) -> Row:
    """Place one instance."""
    problem = KINDS[kind](operations, devices).problem
    start = time.process_time()
    found = place(problem)
    seconds = time.process_time() - start
    gap = 1 - found.lower_bound / found.evaluation.seconds
    return Row(kind, len(problem.graph.operations), devices, seconds, gap)


def laws(rows: Sequence[Row]) -> list[Law]:
    """The power law nearest to the logarithms, for each kind and number of devices with two sizes."""
    found = []
    for kind, devices in dict.fromkeys((row.kind, row.devices) for row in rows):
        mine = [row for row in rows if (row.kind, row.devices) == (kind, devices)]
        if len({row.operations for row in mine}) > 1:
            sizes, seconds = np.log([(row.operations, row.seconds) for row in mine]).T
            exponent, constant = np.polyfit(sizes, seconds, 1)
            found.append(Law(kind, devices, float(np.exp(constant)), float(exponent)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 32, 80])
    parser.add_argument("--operations", type=int, nargs="+", default=[500, 1000, 2000, 4000, 8000])
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8, 16])
    asked = parser.parse_args()
    stages(1, 2)  # imports and first-use caches
    models = [stages(layers) for layers in asked.layers]
    print(stage_table(models))
    rows: list[Row] = []
    for kind in KINDS:
        search(kind, asked.operations[0], asked.devices[0])  # first-use caches
        rows += [search(kind, size, cards) for size in asked.operations for cards in asked.devices]
    lines = [[r.kind, r.operations, r.devices, f"{r.seconds:.2f}", f"{100 * r.gap:.1f} %"] for r in rows]
    print("\n" + table(["graph", "operations", "devices", "CPU s", "gap"], lines))
    for law in laws(rows):
        print(f"{law.kind}, {law.devices} devices: {law.scale:.3g} s x operations^{law.exponent:.2f}")
    searches = {"searches": [asdict(row) for row in rows], "laws": [asdict(law) for law in laws(rows)]}
    print(f"wrote {write('planning_time', {'devices': MODEL_DEVICES, 'rows': models, **searches})}")


if __name__ == "__main__":
    main()
