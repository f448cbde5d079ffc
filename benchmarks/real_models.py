"""Real models in their true sizes, planned on budgets that are shares of their weights.

python benchmarks/real_models.py [--models clip-l detr] [--cases 2x0.55]

Each card's budget is its share of the weights plus the activation peak of a forward pass on one card. The CPU
holds what does not fit. accelerate and transformers get the same budgets, and the same evaluator judges their
maps.

Results are written after each model, in place of older ones of the same model and budgets.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baselines import faster, peak_activation
from instances import GIB, A, B, C, Card, Speed, devices
from models import MODELS
from report import RESULTS, parser_of, recorded, table, write
from torch import nn

from graphplan.analysis.plan import Plan
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.devices.topology import CPU, Topology
from graphplan.errors import GraphplanError, InfeasibleError
from graphplan.integrations.accelerate.comparison import device_maps, offloaded_weights
from graphplan.passes.placement.problem import Problem

_ROOMY = 1 << 20  # GiB of the card and the CPU for the activation peak

# name -> speed and share of the weights of each card
CASES: dict[str, tuple[tuple[Speed, float], ...]] = {
    "1x0.7": ((A, 0.7),),
    "2x0.35": ((A, 0.35),) * 2,
    "2x0.55": ((A, 0.55),) * 2,
    "4x0.275": ((A, 0.275),) * 4,
    "mixed": ((A, 0.6), (B, 0.3), (C, 0.25)),
}


class Measured:
    """A model that is captured once and planned on many budgets."""

    def __init__(self, name: str) -> None:
        self.name = name
        start = time.process_time()
        self.model: nn.Module = MODELS[name].build()
        model_copy = ModelCopy(self.model)
        self.call = model_copy.bind((), MODELS[name].example())
        roomy = devices([Card(A, _ROOMY)], cpu_gib=_ROOMY)
        self.compiler = Compiler(model_copy, roomy, Options())
        self.graph = self.plan(roomy).graph
        self.capture = time.process_time() - start
        self.activations = peak_activation(Problem(self.graph, roomy, CPU))

    def topology(self, case: str) -> Topology:
        """Return the cards of a case, and a CPU with memory for over four times the model."""
        size = self.graph.weight_bytes
        cards = [Card(speed, (share * size + self.activations) / GIB) for speed, share in CASES[case]]
        return devices(cards, cpu_gib=64 + 4 * size / GIB)

    def plan(self, topology: Topology) -> Plan:
        """Plan on other budgets; the compiler reuses its capture."""
        self.compiler.topology = topology
        return self.compiler.plan(self.call).plan

    def measure(self, case: str) -> dict[str, Any]:
        """Return our plan and the others' maps on one set of budgets, as a row of the results.

        Sizes are bytes, times seconds. ``offloaded`` counts the weights that are read and reside on no
        accelerator, ``buffer`` the accelerators' prefetch buffers. ``within`` is whether every peak is within
        its budget. ``planning`` is processor seconds, without the capture. ``others`` are accelerate's and
        transformers' maps, ``beaten_by`` those within the budgets that are faster. ``error`` is the reason if
        there is no plan.
        """
        topology, row = self.topology(case), {"model": self.name, "case": case}
        row |= {"weights": self.graph.weight_bytes, "activations": self.activations}
        graph, makespan, error = self.graph, None, ""
        start = time.process_time()
        try:
            plan = self.plan(topology)
        except InfeasibleError as infeasible:
            error = str(infeasible)
        else:
            row["planning"] = time.process_time() - start
            graph, makespan = plan.graph, plan.makespan
            row |= {"makespan": makespan, "gap": plan.gap, "proof": plan.proof}
            row["offloaded"] = offloaded_weights(Problem(graph, topology, CPU), plan.schedule.assignment)
            row["buffer"] = sum(buffer.nbytes for buffer in plan.schedule.prefetch_buffers)
            row["within"] = all(plan.peak_bytes[spec.key] <= spec.room for spec in topology.devices)
        no_split = getattr(self.model, "_no_split_modules", None) or []
        others = device_maps(Problem(graph, topology, CPU), self.model, sorted(no_split))
        row["others"] = [{**asdict(o), "excess": None, "feasible": o.feasible} for o in others]
        return {**row, "beaten_by": faster(others, makespan), "error": error}


# -- tables and results ----------------------------------------------------------------------------


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line of the table."""
    figures = ("offloaded", "seconds", "over")
    others = {other["name"]: {name: other[name] for name in figures} for other in row["others"]}
    return {**row, "others": others, "beaten_by": ", ".join(row["beaten_by"])}


def keep(rows: Sequence[Mapping[str, Any]], failed: Mapping[str, str], results: Path = RESULTS) -> Path:
    """Write these rows, in place of older ones of the same model and budgets."""
    before = {"rows": [], "failed": {}, **recorded("real_models", results)}
    known = {(row["model"], row["case"]): row for row in (*before["rows"], *rows)}
    kept = [known[key] for key in itertools.product(MODELS, CASES) if key in known]
    planned = {model for model, _ in known}
    missing = {name: why for name, why in {**before["failed"], **failed}.items() if name not in planned}
    return write("real_models", {"failed": missing, "rows": kept}, results)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for name in options.models:
        try:
            measured = Measured(name)
        except (GraphplanError, ImportError) as error:
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            print(f"{name}: {failed[name]}", flush=True)
            continue
        print(f"{name}: {len(measured.graph.operations)} operations in {measured.capture:.1f} s", flush=True)
        for case in options.cases:
            rows.append(measured.measure(case))
            print(f"  {case}: {rows[-1].get('planning', 0.0):.1f} s", flush=True)
        del measured
        gc.collect()
        keep(rows, failed)
    if rows:
        print(table(map(shown, rows)))
    print(f"wrote {keep(rows, failed)}")


if __name__ == "__main__":
    main()
