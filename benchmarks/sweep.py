"""Architectures over simulated devices at shares of their size: results, peaks and moves.

python benchmarks/sweep.py [--jobs 2] [--only T5 Llama]

Each model is placed at 0.5, 0.7 and 0.9 of its bytes on {one accelerator, CPU} and on {two
accelerators of that share each, CPU}, run, and held against eager.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from typing import Any

import torch
from architectures import TABLE, Architecture
from report import table, write
from torch.utils import _pytree as pytree

import graphplan

RATIOS = (0.5, 0.7, 0.9)


def difference(a: Any, b: Any) -> float:
    left, right = pytree.tree_leaves(a), pytree.tree_leaves(b)
    if type(a) is not type(b) or len(left) != len(right):
        return float("inf")
    worst = 0.0
    for x, y in zip(left, right, strict=True):
        if isinstance(x, torch.Tensor) and x.numel():
            worst = max(worst, float((x.double() - y.double()).abs().max()))
    return worst


def place(model: Any, inputs: Any, expected: Any, ratio: float, accelerators: int) -> dict[str, Any]:
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    budgets = {**{i: int(size * ratio) for i in range(accelerators)}, "cpu": 20 * size + (1 << 26)}
    row: dict[str, Any] = {"ratio": ratio, "accelerators": accelerators}
    with graphplan.simulate(budgets) as machine:
        start = time.perf_counter()
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs)
        row["seconds"] = time.perf_counter() - start
        machine.reset_peaks()
        row["difference"] = difference(placed(**inputs), expected)
        plan = placed.plan
        row["method"] = plan.method
        row["stages"] = len(plan.stages)
        row["gap"] = plan.gap
        row["within"] = all(
            machine.peak_bytes(i) <= plan.peak_bytes[i] <= budgets[i] for i in range(accelerators)
        )
        moved = [(t.source, t.destination, t.nbytes) for t in machine.transfers]
        row["moves_equal"] = moved == [(m.source, m.destination, m.nbytes) for m in plan.schedule.copies()]
        on = sum(len(s.operations) for s in plan.stages if s.device != "cpu")
        row["on_accelerators"] = on / max(1, sum(len(s.operations) for s in plan.stages))
        del placed
        gc.collect()
    return row


def run(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    (architecture,) = [a for a in TABLE if a.name == name]
    result: dict[str, Any] = {"name": name, "rows": []}
    try:
        model, inputs = architecture.build()
        with torch.no_grad():
            expected = model(**inputs)
        for ratio in RATIOS:
            for accelerators in (1, 2):
                result["rows"].append(place(model, inputs, expected, ratio, accelerators))
    except Exception as error:  # a row of the table, whatever it was
        result["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return result


def passed(result: dict[str, Any]) -> bool:
    rows = result["rows"]
    return "error" not in result and all(
        r["within"] and r["moves_equal"] and r["difference"] < 1e-5 and r["on_accelerators"] > 0 for r in rows
    )


def line(result: dict[str, Any]) -> list[Any]:
    rows = result["rows"]
    if not rows:
        return [result["name"], "-", "-", "-", "-", "-", "-", result["error"]]
    return [
        result["name"],
        rows[0]["method"],
        f"{max(r['difference'] for r in rows):.1e}",
        "yes" if all(r["within"] for r in rows) else "NO",
        "yes" if all(r["moves_equal"] for r in rows) else "NO",
        f"{min(r['on_accelerators'] for r in rows):.2f}",
        f"{max(r['seconds'] for r in rows):.1f}",
        result.get("error", ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[])
    options = parser.parse_args()
    chosen: list[Architecture] = [a for a in TABLE if not options.only or a.stem in options.only]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        results = []
        for result in pool.imap(run, [a.name for a in chosen]):
            results.append(result)
            print(
                f"{len(results)}/{len(chosen)} {result['name']}: {'ok' if passed(result) else 'NOT ok'}",
                flush=True,
            )
    header = [
        "architecture",
        "captured by",
        "difference",
        "within budget",
        "moves as planned",
        "on accelerators",
        "s",
        "",
    ]
    print(table(header, [line(result) for result in results]))
    good = sum(map(passed, results))
    print(f"{good} of {len(results)} architectures: equal to eager (1e-5), within budget, moves as planned")
    if not options.only:
        print(f"wrote {write('sweep', {'passed': good, 'of': len(results), 'results': results})}")


if __name__ == "__main__":
    main()
