"""The planner on the benchmark's instances: estimated time, proven gap, and planning time.

python benchmarks/placement.py [--instances unet clip] [--limits default 10]

Each instance is planned once for each limit: ``default`` is the search without a time limit, a number is a
limit in seconds. Plans are compared with the best time in the results file, and with baselines under the same
evaluator. New results of an instance replace its old ones.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import report
from baselines import baselines, faster
from instances import INSTANCES, Instance, random_chain
from report import RESULTS, parser_of, table, write

from graphplan.errors import InfeasibleError
from graphplan.integrations.accelerate.comparison import Baseline
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.params import Limits

Row = dict[str, Any]  # of the results file


def measure(instance: Instance, limits: Sequence[float | None]) -> Row:
    """Plan an instance once for each limit, and run the baselines."""
    runs, error = [], ""
    try:
        runs = [_run(instance, limit) for limit in limits]
    except InfeasibleError as infeasible:
        error = str(infeasible)
    return row_of(instance, runs, baselines(instance.problem), error)


def _run(instance: Instance, limit: float | None) -> Row:
    """Return one plan; ``limit`` is None for the default search. Times are seconds."""
    problem = instance.problem  # a new one, since a search caches results on its problem
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    result = place(problem, Limits.within(limit))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    seconds, bound = result.evaluation.seconds, result.bound
    return {
        "limit": limit,
        "seconds": seconds,
        "lower_bound": bound.seconds,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "proof": bound.text,
        "gap": 1 - bound.seconds / seconds,  # share of the time that is above the lower bound
    }


def main_run(runs: Sequence[Row]) -> Row | None:
    """Return the run that baselines are compared with: the default, else the one with the longest limit."""
    return next((run for run in runs if run["limit"] is None), runs[-1] if runs else None)


def row_of(instance: Instance, runs: Sequence[Row], others: Sequence[Baseline], error: str = "") -> Row:
    """Return the results of an instance.

    ``best`` is the time of the best known plan, ``ratio`` our time divided by a baseline's; both are None
    without a placement. ``beaten_by`` names the baselines within the budgets that are faster.
    """
    run = main_run(runs)
    seconds = None if run is None else run["seconds"]
    return {
        "instance": instance.name,
        "operations": len(instance.graph.operations),
        "devices": len(instance.topology.devices),
        "weight_bytes": instance.graph.weight_bytes,
        "best": min((run["seconds"] for run in runs), default=None),
        "runs": list(runs),
        "others": [
            {
                **asdict(other),
                "excess": None,
                "feasible": other.feasible,
                "ratio": seconds / other.seconds if seconds and other.seconds else None,
            }
            for other in others
        ],
        "beaten_by": faster(others, seconds),
        "error": error,
    }


# -- tables ----------------------------------------------------------------------------------------


def plan_table(rows: Iterable[Row]) -> str:
    """Return a table with a line for each run."""
    return table(
        {"instance": row["instance"], **run, "ratio to best": run["seconds"] / row["best"]}
        for row in rows
        for run in row["runs"]
    )


def ratio_table(rows: Iterable[Row]) -> str:
    """Return a table of our time divided by each baseline's, and the bytes by which that is over a budget."""
    figures = ("ratio", "over", "error")
    return table(
        {
            "instance": row["instance"],
            **{other["name"]: {name: other[name] for name in figures} for other in row["others"]},
            "beaten by": ", ".join(row["beaten_by"]),
            "error": row["error"],
        }
        for row in rows
    )


# -- results ---------------------------------------------------------------------------------------


def recorded(results: Path = RESULTS) -> dict[str, Row]:
    """Return name of an instance -> its row in the results file."""
    return {row["instance"]: row for row in report.recorded("placement", results).get("results", [])}


def keep(new_rows: Sequence[Row], results: Path = RESULTS) -> Path:
    """Write results in place of older ones of the same instances; the best known times are kept."""
    rows = recorded(results)
    for row in new_rows:
        known = (row["best"], rows.get(row["instance"], {}).get("best"))
        row["best"] = min((best for best in known if best), default=None)
        rows[row["instance"]] = row
    order = [*INSTANCES, *sorted(set(rows) - set(INSTANCES))]
    kept = [rows[name] for name in order if name in rows]
    beaten = sum(bool(row["beaten_by"]) for row in kept)
    return write("placement", {"beaten": beaten, "results": kept}, results)


def main(
    makers: Mapping[str, Callable[[], Instance]] = INSTANCES, words: Sequence[str] | None = None
) -> None:
    """Plan instances of a set; ``words`` are the command-line arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--instances", nargs="+", default=list(makers), choices=list(makers))
    parser.add_argument("--limits", nargs="+", default=["default"], help="default, or seconds")
    options = parser.parse_args(words)
    seconds = {None if text == "default" else float(text) for text in options.limits}
    limits = sorted(seconds, key=lambda limit: limit or 0.0)
    place(random_chain(30, 2).problem, Limits.within(1.0))  # imports and first-use caches
    results: list[Row] = []
    for name in options.instances:
        results.append(measure(makers[name](), limits))
        path = keep(results)
        print(f"{len(results)}/{len(options.instances)} {name}", flush=True)
    print(f"\n{plan_table(results)}")
    print("\nOur time divided by the baselines' (at most 1 is wanted), under the same evaluator")
    print(ratio_table(results))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
