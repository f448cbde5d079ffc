"""The dnn-partitioning workloads (NeurIPS 2020), scored by their own two objectives, with bounds.

python benchmarks/dnn_partitioning.py [--workloads DIR] [--out DIR] [--work N] [--only NAME ...]

Writes one table per objective, ``results/dnn_partitioning.json``, and each placement to
``results/dnn_partitioning/OBJECTIVE-NAME.json``: node id -> accelerator or "cpu". The same input and
the same work give the same placements.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dnn_latency import place
from dnn_slices import contiguous_optimum, parts_of
from dnn_throughput import anneal, lower_bound
from dnn_workload import FOLDER, Workload, expert, inputs, throughput, to_json
from report import RESULTS, table, write
from tqdm import tqdm

# What is to be beaten, as the workloads' authors' evaluator scores it: the best of their greedy, their
# largest-load program and a contiguous program over five orders; and their contiguous optima.
LATENCY = {
    "bert24-layer": 100.219,
    "gnmt-layer": 225.648,
    "inceptionv3-layer": 1348.89,
    "resnet50-layer": 1183.93,
    "bert_l-3-op": 414.430,
    "bert_l-6-op": 444.020,
    "bert_l-12-op": 765.300,
    "resnet50-op": 651.121,
}
THROUGHPUT = {
    "bert24-layer": 17.790,
    "bert24_training-layer": 41.746,
    "resnet50-layer": 33.775,
    "gnmt-layer": 32.911,
    "bert_l-3-op": 27.919,
    "bert_l-6-op": 29.580,
    "bert_l-12-op": 147.478,
    "resnet50-op": 124.349,
}
CONTIGUOUS_IDEALS = 40_000
HEATS = (0.1, 0.05, 0.02, 0.02, 0.005)


def bar(items: Iterable[int]) -> Iterable[int]:
    return tqdm(items, leave=False, file=sys.stderr)


def latency_row(workload: Workload, work: int) -> tuple[dict[str, Any], list[int]]:
    start = time.perf_counter()
    result = place(workload, work, bar)
    row = {
        "reference": LATENCY.get(workload.name),
        "start": result.start,
        "ours": result.latency,
        "bound": result.bound,
        "proof": result.proof,
        "seconds": time.perf_counter() - start,
    }
    return row, list(result.placement)


def throughput_row(workload: Workload, work: int, experts: Path) -> tuple[dict[str, Any], list[int]]:
    start = time.perf_counter()
    parts = parts_of(workload, absorb=True)
    slices = contiguous_optimum(workload, parts, CONTIGUOUS_IDEALS, bar)
    devices = slices.devices
    for seed, heat in enumerate(HEATS):
        found = [anneal(workload, parts, d, 10_000 * work, seed, heat) for d in {slices.devices, devices}]
        devices = min(found, key=lambda d: (throughput(workload, parts.spread(d, len(workload))), d))
    best = parts.spread(devices, len(workload))
    over = "all" if slices.exact else "prefixes of three orders,"
    row = {
        "reference": THROUGHPUT.get(workload.name),
        "contiguous": slices.load,
        "contiguous_over": f"{over} {slices.ideals} ideals",
        "ours": throughput(workload, best),
        "bound": lower_bound(workload, parts_of(workload)),
        "proof": "counting: work that must go to accelerators, and heaviest groups; transfers free",
        "seconds": time.perf_counter() - start,
    }
    base = workload.name.removesuffix("-layer")
    split = experts / f"{base}_expert.json"
    if not split.is_file():
        split = experts / f"{base.removesuffix('_training')}_inference_expert.json"
    if workload.name.endswith("-layer") and split.is_file():
        row["expert"] = throughput(workload, expert(workload, split))
    return row, best


def show(objective: str, rows: list[dict[str, Any]]) -> str:
    header = ("input", "nodes", "accelerators", "reference", "ours", "ratio", "bound", "gap", "seconds")
    body = []
    for row in rows:
        goal = row["reference"] or row.get("contiguous")
        body.append(
            (
                row["name"],
                row["nodes"],
                row["accelerators"],
                f"{goal:.3f}{'' if row['reference'] else ' (own)'}",
                f"{row['ours']:.3f}",
                f"{row['ours'] / goal:.4f}",
                f"{row['bound']:.3f}",
                f"{row['gap']:.2%}",
                f"{row['seconds']:.1f}",
            )
        )
    proofs = "\n".join(f"{row['name']}: {row['proof']}" for row in rows)
    return f"{objective}\n{table(header, body)}\n\n{proofs}\n"


def run(objective: str, folder: Path, out: Path, work: int, only: list[str]) -> list[dict[str, Any]]:
    rows = []
    for workload in inputs(folder, objective):
        if only and not any(word in f"{objective}-{workload.name}" for word in only):
            continue
        if objective == "latency":
            figures, placement = latency_row(workload, work)
        else:
            figures, placement = throughput_row(workload, work, folder / "human-experts")
        row = {
            "name": workload.name,
            "nodes": len(workload),
            "accelerators": workload.accelerators,
            **figures,
            "gap": figures["ours"] / figures["bound"] - 1,
        }
        tqdm.write(
            f"{objective} {workload.name}: {row['ours']:.4f}, bound {row['bound']:.4f}", file=sys.stderr
        )
        save(out / f"{objective}-{workload.name}.json", objective, workload, row["ours"], placement)
        rows.append(row)
    return rows


def save(path: Path, objective: str, workload: Workload, value: float, placement: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"input": workload.name, "objective": objective, "value": value}
    text = json.dumps({**data, "placement": to_json(workload, placement)}, separators=(",", ":"))
    path.write_text(text.replace('"placement":', '"placement":\n') + "\n", encoding="utf-8")


def merged(data: dict[str, Any]) -> dict[str, Any]:
    """The recorded results with the rows of this run in place of theirs."""
    path = RESULTS / "dnn_partitioning.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for objective in ("latency", "throughput"):
        rows = {row["name"]: row for row in old.get(objective, [])}
        rows |= {row["name"]: row for row in data[objective]}
        data[objective] = list(rows.values())
    return data


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", type=Path, default=FOLDER)
    parser.add_argument("--out", type=Path, default=RESULTS / "dnn_partitioning")
    parser.add_argument("--work", type=int, default=20, help="rounds of search; 100,000 moves each")
    parser.add_argument(
        "--only", nargs="*", default=[], help="parts of OBJECTIVE-NAME; other recorded rows stay"
    )
    arguments = parser.parse_args()
    if not arguments.workloads.is_dir():
        parser.exit(
            0, f"Skipped: no workloads at {arguments.workloads}; name their folder with --workloads.\n"
        )
    data: dict[str, Any] = {"work": arguments.work}
    for objective in ("latency", "throughput"):
        data[objective] = run(objective, arguments.workloads, arguments.out, arguments.work, arguments.only)
        if data[objective]:
            print(show(objective, data[objective]))
    write("dnn_partitioning", merged(data) if arguments.only else data)


if __name__ == "__main__":
    main()
