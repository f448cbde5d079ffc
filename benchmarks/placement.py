"""How near to optimal plans are proven to be, how soon, and how others' placements compare.

python benchmarks/placement.py [--instances unet,clip] [--times 1,2,10,60]

For each instance: the gap after each time limit, and the ratio of our modelled seconds to those of
sequential fill, of contiguous pieces, and of accelerate's and transformers' maps. Rows of some instances take
the place of older ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from baselines import baselines
from instances import INSTANCES, Instance
from report import RESULTS, table, write

from graphplan.comparison import LESS, Baseline
from graphplan.errors import InfeasibleError, readable_bytes
from graphplan.passes.limits import Limits
from graphplan.passes.place import place

OVERRUN = 1.1  # a limit is kept when it is passed by no more than this
SAME = 1 + 1e-9  # a ratio of equals, rounding apart


@dataclass(frozen=True, slots=True)
class Solved:
    """What the planner had after a time limit. Times are seconds."""

    limit: float
    took: float
    makespan: float
    lower_bound: float
    proof: str

    @property
    def gap(self) -> float:
        """Share of the makespan that lies above the bound."""
        return 1 - self.lower_bound / self.makespan if self.makespan else 0.0


@dataclass(slots=True)
class Result:
    """One instance."""

    instance: Instance
    solved: list[Solved] = field(default_factory=list)
    others: list[Baseline] = field(default_factory=list)
    error: str = ""

    @property
    def makespan(self) -> float | None:
        """After the longest limit."""
        return self.solved[-1].makespan if self.solved else None

    @property
    def met(self) -> bool | None:
        """Whether the target gap was proven in the target time; None if no such limit was run."""
        within = [s for s in self.solved if s.limit <= self.instance.seconds]
        if self.error:
            return False
        if not within or within[-1].limit < self.instance.seconds:
            return None
        kept = within[-1].took <= OVERRUN * self.instance.seconds
        return kept and within[-1].gap <= self.instance.target_gap

    def ratio(self, other: Baseline) -> float | None:
        """Our seconds by another's; None where one of the two placed nothing."""
        if self.makespan is None or not other.seconds:
            return None
        return self.makespan / other.seconds

    def beaten_by(self) -> list[str]:
        """Names of those whose placement keeps the budgets and is faster than ours."""
        return [
            other.name
            for other in self.others
            if other.feasible and (self.error or (self.ratio(other) or 0.0) > SAME)
        ]


def measure(instance: Instance, times: Sequence[float]) -> Result:
    """Solve an instance under each limit, and let the others place it."""
    result = Result(instance)
    for limit in times:
        if result.solved and result.solved[-1].gap <= 0:
            result.solved.append(_again(result.solved[-1], limit))
            continue
        problem = replace(instance.problem)  # without what the last search has remembered of it
        gc.collect()  # of what was there before: a collection of all of torch takes as long as a sketch
        start = time.perf_counter()
        try:
            found = place(problem, Limits.within(limit))
        except InfeasibleError as error:
            result.error = str(error)
            break
        took = time.perf_counter() - start
        makespan = found.evaluation.seconds
        result.solved.append(Solved(limit, took, makespan, found.lower_bound, found.proof))
    result.others = baselines(instance.problem)
    return result


def _again(solved: Solved, limit: float) -> Solved:
    """An optimum needs no second search."""
    return Solved(limit, solved.took, solved.makespan, solved.lower_bound, solved.proof)


def gap_table(results: Sequence[Result], times: Sequence[float]) -> str:
    """Gaps over time, with the target."""
    header = ["instance", "operations", "devices", *(f"gap {t:g} s" for t in times)]
    header += ["target", "met", "ms", "bound ms", "took s", "proof"]
    return table(header, [_gap_row(result, times) for result in results])


def _gap_row(result: Result, times: Sequence[float]) -> list[str]:
    instance = result.instance
    row = [instance.name, str(len(instance.graph.operations)), str(len(instance.topology.devices))]
    gaps = {solved.limit: f"{100 * solved.gap:.2f} %" for solved in result.solved}
    row += [gaps.get(t, "-") for t in times]
    row += [f"{100 * instance.target_gap:g} % in {instance.seconds:g} s", _word(result.met)]
    if not result.solved:
        return [*row, "-", "-", "-", result.error]
    last = result.solved[-1]
    took = "/".join(f"{solved.took:.1f}" for solved in result.solved)
    return [*row, f"{1e3 * last.makespan:.3f}", f"{1e3 * last.lower_bound:.3f}", took, last.proof]


def _word(met: bool | None) -> str:
    return "-" if met is None else "yes" if met else "NO"


def ratio_table(results: Sequence[Result]) -> str:
    """Our seconds by the others', at most 1 wanted."""
    names = [other.name for other in results[0].others]
    header = ["instance", "ms", *names, "beaten by"]
    rows = []
    for result in results:
        ms = "-" if result.makespan is None else f"{1e3 * result.makespan:.3f}"
        cells = [_ratio_cell(result, other) for other in result.others]
        rows.append([result.instance.name, ms, *cells, ", ".join(result.beaten_by()) or "none"])
    return table(header, rows)


def _ratio_cell(result: Result, other: Baseline) -> str:
    if other.seconds is None:
        return other.error[:40]
    ms = f"{1e3 * other.seconds:.3f} ms"
    if other.first_over and LESS in other.strategy:
        ms += f"; first {1e3 * (other.first_seconds or 0.0):.3f} ms, over by {_short(other.first_over)}"
    if other.over:
        return f"over by {_short(other.over)} ({ms})"
    ratio = result.ratio(other)
    if ratio is None:
        return ms
    return f"{ratio:.4f} ({ms})" + ("  !" if ratio > SAME else "")


def _short(nbytes: int) -> str:
    return readable_bytes(nbytes).partition(" (")[0]


def as_data(result: Result) -> dict[str, Any]:
    """For JSON."""
    instance = result.instance
    return {
        "instance": instance.name,
        "operations": len(instance.graph.operations),
        "devices": len(instance.topology.devices),
        "weight_bytes": instance.graph.weight_bytes,
        "target_gap": instance.target_gap,
        "target_seconds": instance.seconds,
        "met": result.met,
        "solved": [{**asdict(solved), "gap": solved.gap} for solved in result.solved],
        "others": [
            {**asdict(other), "excess": None, "feasible": other.feasible, "ratio": result.ratio(other)}
            for other in result.others
        ],
        "beaten_by": result.beaten_by(),
        "error": result.error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", default=",".join(INSTANCES))
    parser.add_argument("--times", default="1,2,10,60")
    options = parser.parse_args()
    chosen = options.instances.split(",")
    times = sorted(float(t) for t in options.times.split(","))
    if unknown := set(chosen) - set(INSTANCES):
        parser.error(f"no instance {unknown.pop()!r}: there are {', '.join(INSTANCES)}")
    results = []
    for name in chosen:
        results.append(measure(INSTANCES[name](), times))
        print(f"{len(results)}/{len(chosen)} {name}", flush=True)
    print("\nProven gap after each time limit")
    print(gap_table(results, times))
    print("\nOur seconds by those of others (at most 1 wanted), under the same evaluator")
    print(ratio_table(results))
    print("first: its map as users ask for it, where that passes a budget   !: faster than ours")
    met = sum(result.met is True for result in results)
    asked = sum(result.met is not None for result in results)
    beaten = sum(bool(result.beaten_by()) for result in results)
    print(f"\n{met} of {asked} gap targets met; beaten by another within the budgets on {beaten} instances")
    rows = {name: as_data(result) for name, result in zip(chosen, results, strict=True)}
    print(f"wrote {write('placement', summary_of(rows, times))}")


def summary_of(rows: dict[str, dict[str, Any]], times: list[float]) -> dict[str, Any]:
    """With the rows of the other instances as they were, where the same times were asked."""
    path = RESULTS / "placement.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    if before.get("times") == times:
        rows = {**{row["instance"]: row for row in before["results"]}, **rows}
    results = [rows[name] for name in INSTANCES if name in rows]
    return {
        "targets": sum(row["met"] is not None for row in results),
        "met": sum(row["met"] is True for row in results),
        "beaten": sum(bool(row["beaten_by"]) for row in results),
        "times": times,
        "results": results,
    }


if __name__ == "__main__":
    main()
