"""Estimated seconds of generate(): of a prompt, and of each token after it, with the weights in one place.

python benchmarks/generation.py [--models llama-3-8b] [--cases 1x0.5]

Each card's budget is its share of the weights and 2 GiB; the CPU holds what does not fit. accelerate gets the
same budgets, and the same evaluator judges its maps, as if its hooks prefetched the weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from instances import GIB, A, Card, devices
from models import GENERATORS, PROMPT
from report import RESULTS, parser_of, recorded, table, write

from graphplan.analysis.plan import Plan
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.sizes.size_limits import SizeLimits
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.devices.topology import CPU, Topology
from graphplan.integrations.accelerate.comparison import device_maps
from graphplan.integrations.transformers.generate_plan import plan_first
from graphplan.passes.placement.problem import Problem

_LENGTH = 1024  # tokens, at most
_BESIDE = 2  # GiB of each card beside its share of the weights
# name -> share of the weights of each card
CASES = {"1x0.5": (0.5,), "1x0.25": (0.25,), "2x0.35": (0.35, 0.35)}


def measure(name: str, case: str) -> dict[str, Any]:
    """Return a row of the results: estimated seconds of a prompt and of a token, ours and accelerate's."""
    model = GENERATORS[name].build()
    model_copy = ModelCopy(model)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    topology = devices(
        [Card(A, share * nbytes / GIB + _BESIDE) for share in CASES[case]], cpu_gib=nbytes / GIB + 8
    )
    compiler = Compiler(model_copy, topology, Options(size_limits=SizeLimits(1, _LENGTH)))
    start = time.process_time()
    planned = plan_first(compiler, model_copy.bind((), GENERATORS[name].example()))
    row: dict[str, Any] = {"model": name, "case": case, "weights": nbytes}
    row["planning"] = time.process_time() - start  # with the traces
    no_split = sorted(getattr(model, "_no_split_modules", None) or [])
    for part, plan in (("prompt", planned[1].plan), ("token", planned[-1].plan)):
        row[part] = {
            "seconds": plan.makespan,
            "gap": plan.gap,
            "accelerate": _mapped(plan, topology, model, no_split),
        }
    return row


def _mapped(plan: Plan, topology: Topology, model: torch.nn.Module, no_split: Sequence[str]) -> float | None:
    """Return the estimated seconds of accelerate's map; None if it finds none within the budgets."""
    found = device_maps(Problem(plan.graph, topology, CPU), model, no_split)[0]
    return found.seconds if found.feasible else None


def keep(rows: Sequence[dict[str, Any]], results: Path = RESULTS) -> Path:
    """Write these rows, in place of older ones of the same model and budgets."""
    known = {
        (row["model"], row["case"]): row for row in (*recorded("generation", results).get("rows", ()), *rows)
    }
    ordered = [known[name, case] for name in GENERATORS for case in CASES if (name, case) in known]
    return write("generation", {"prompt": PROMPT, "length": _LENGTH, "rows": ordered}, results)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=list(GENERATORS), choices=list(GENERATORS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    rows = []
    for name in options.models:
        for case in options.cases:
            rows.append(measure(name, case))
            print(table(rows[-1:]), flush=True)
    print(f"wrote {keep(rows)}")


if __name__ == "__main__":
    main()
