"""The planner on the benchmark's instances: estimated time, proven gap, and planning time.

python benchmarks/placement.py [--instances unet clip] [--limits default 10]

Each instance is planned once for each limit: ``default`` is the search without a time limit, a number is a
limit in seconds. Plans are compared with the best time in the results file, and with baselines under the same
evaluator. New results of an instance replace its old ones.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True, slots=True)
class Run:
    """One plan; ``limit`` is None for the default search. Times are seconds."""

    limit: float | None
    seconds: float
    lower_bound: float
    cpu_seconds: float
    wall_seconds: float
    proof: str

    @property
    def gap(self) -> float:
        """Share of the time that is above the lower bound."""
        return 1 - self.lower_bound / self.seconds


@dataclass(slots=True)
class Result:
    """The results of one instance; ``best`` is the time of the best known plan, in seconds."""

    instance: Instance
    runs: list[Run] = field(default_factory=list)
    others: list[Baseline] = field(default_factory=list)
    best: float = math.inf
    error: str = ""

    @property
    def main(self) -> Run | None:
        """The run that baselines are compared with: the default, else the one with the longest limit."""
        return next((run for run in self.runs if run.limit is None), self.runs[-1] if self.runs else None)

    def ratio(self, other: Baseline) -> float | None:
        """Return our time divided by a baseline's; None if one of the two has no placement."""
        return self.main.seconds / other.seconds if self.main and other.seconds else None

    def beaten_by(self) -> list[str]:
        """Return the names of the baselines within the budgets that are faster."""
        return faster(self.others, None if self.main is None else self.main.seconds)


def measure(instance: Instance, limits: Sequence[float | None]) -> Result:
    """Plan an instance once for each limit, and run the baselines."""
    result = Result(instance)
    try:
        result.runs += [_run(instance, limit) for limit in limits]
    except InfeasibleError as error:
        result.error = str(error)
    result.others = baselines(instance.problem)
    result.best = min((run.seconds for run in result.runs), default=math.inf)
    return result


def _run(instance: Instance, limit: float | None) -> Run:
    problem = instance.problem  # a new one, since a search caches results on its problem
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    result = place(problem, Limits.within(limit))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Run(limit, result.evaluation.seconds, result.bound.seconds, cpu, wall, result.bound.text)


# -- tables ----------------------------------------------------------------------------------------


def plan_table(results: Iterable[Result]) -> str:
    """Return a table with a line for each run."""
    return table(
        {
            "instance": result.instance.name,
            **asdict(run),
            "gap": run.gap,
            "ratio to best": run.seconds / result.best,
        }
        for result in results
        for run in result.runs
    )


def ratio_table(results: Iterable[Result]) -> str:
    """Return a table of our time divided by each baseline's, and the bytes by which that is over a budget."""
    return table(
        {
            "instance": result.instance.name,
            **{b.name: {"ratio": result.ratio(b), "over": b.over, "error": b.error} for b in result.others},
            "beaten by": ", ".join(result.beaten_by()),
            "error": result.error,
        }
        for result in results
    )


# -- results ---------------------------------------------------------------------------------------


def as_data(result: Result) -> dict[str, Any]:
    graph = result.instance.graph
    return {
        "instance": result.instance.name,
        "operations": len(graph.operations),
        "devices": len(result.instance.topology.devices),
        "weight_bytes": graph.weight_bytes,
        "best": result.best if math.isfinite(result.best) else None,
        "runs": [{**asdict(run), "gap": run.gap} for run in result.runs],
        "others": [
            {**asdict(other), "excess": None, "feasible": other.feasible, "ratio": result.ratio(other)}
            for other in result.others
        ],
        "beaten_by": result.beaten_by(),
        "error": result.error,
    }


def recorded(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return name of an instance -> its row in the results file."""
    return {row["instance"]: row for row in report.recorded("placement", results).get("results", [])}


def keep(new_results: Sequence[Result], results: Path = RESULTS) -> Path:
    """Write results in place of older ones of the same instances; the best known times are kept."""
    rows = recorded(results)
    for result in new_results:
        name = result.instance.name
        result.best = min(result.best, rows.get(name, {}).get("best") or math.inf)
        rows[name] = as_data(result)
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
    results: list[Result] = []
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
