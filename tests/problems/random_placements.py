"""Random placement problems, tiny ones with every placement tried: are bounds true, are plans good?

python tests/problems/random_placements.py [--count 20000] [--seed 0] [--processes 2] [--tiny 0.75]

Each seed is a problem of ``random_problems.py``, which ``placement_checks.py`` has placed and checked.
Violations are printed as they are found; ``benchmarks/results/random_placements.json`` has all, and the
counts. The exit status is 1 if there are any. With ``--records FILE`` a run that was ended goes on where it
was: a line of JSON is kept for each seed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from placement_api import Problem, Solution, place
from placement_checks import Effort, inspect
from random_problems import MEDIUM, TINY, random_instance
from report import table, write

AGAIN = 10  # one problem of so many is placed twice
BEST, NEAR = 1e-9, 0.01  # relative: what counts as proven best, and as close to it


@dataclass(frozen=True, slots=True)
class Record:
    """The findings about one problem.

    Attributes:
        text: the problem in a few words, with its seed.
        kind: of devices.
        tiny: whether it is one of the small ones.
        violations: what must not be.
        placed: whether a plan was found.
        complete: whether every placement was tried.
        ratio: seconds of the plan over the fastest placement known; None without a plan.
        gap: part of the plan's seconds that its bound leaves open; None without a plan.
        cpu_seconds: of the planner and of the checks.
        planner_seconds: of the first placement alone.
    """

    text: str
    kind: str
    tiny: bool
    violations: tuple[str, ...]
    placed: bool
    complete: bool
    ratio: float | None
    gap: float | None
    cpu_seconds: float
    planner_seconds: float


def measure(seed: int, tiny: float, placements: int) -> Record:
    """Place the problem of a seed, and check the result."""
    small = random.Random(f"size of {seed}").random() < tiny
    instance = random_instance(seed, TINY if small else MEDIUM)
    calls: list[float] = []

    def timed(problem: Problem) -> Solution:
        start = time.process_time()
        try:
            return place(problem)
        finally:
            calls.append(time.process_time() - start)

    start = time.process_time()
    effort = Effort(placements, restricted=1 if small else 2, place_twice=seed % AGAIN == 0)
    found = inspect(instance.problem, timed, seed, effort)
    return Record(
        str(instance),
        instance.devices,
        small,
        tuple(found.violations),
        found.solution is not None,
        found.complete,
        found.ratio,
        found.gap,
        time.process_time() - start,
        calls[0],
    )


def records(arguments: argparse.Namespace) -> Iterator[Record]:
    """The records of all seeds, in order, as they are found."""
    one = partial(measure, tiny=arguments.tiny, placements=arguments.placements)
    seeds: Sequence[int] = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.records is not None and arguments.records.exists():
        done = [Record(*json.loads(line)) for line in arguments.records.read_text().splitlines()]
        yield from done[: arguments.count]
        seeds = seeds[len(done) :]
    for record in _measured(one, seeds, arguments.processes):
        if arguments.records is not None:
            with arguments.records.open("a") as file:
                file.write(json.dumps(astuple(record)) + "\n")
        yield record


def _measured(one: Callable[[int], Record], seeds: Sequence[int], processes: int) -> Iterator[Record]:
    if processes == 1:
        yield from map(one, seeds)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=fork) as pool:
        waiting = iter(seeds)
        while some := list(islice(waiting, 16 * processes)):
            yield from pool.map(one, some)


def summary(found: Sequence[Record]) -> dict[str, Any]:
    """Counts, ratios and gaps of some records."""
    ratios = [each.ratio for each in found if each.complete and each.ratio is not None]
    known = [each.ratio for each in found if each.ratio is not None]
    gaps = [each.gap for each in found if each.gap is not None]
    return {
        "problems": len(found),
        "placed": sum(each.placed for each in found),
        "every placement tried": len(ratios),
        "worst plan / optimum": max(ratios, default=None),
        "mean plan / optimum": statistics.fmean(ratios) if ratios else None,
        "optimal": _share(ratios, 1 + BEST),
        "worst plan / best known": max(known, default=None),
        "mean plan / best known": statistics.fmean(known) if known else None,
        "proven optimal": _share(gaps, BEST),
        "gap below 1 %": _share(gaps, NEAR),
        "planner CPU seconds, mean": statistics.fmean(each.planner_seconds for each in found),
        "planner CPU seconds, most": max(each.planner_seconds for each in found),
        "violations": sum(len(each.violations) for each in found),
    }


def _share(figures: Sequence[float], most: float) -> float | None:
    """The share of some figures that is at most one."""
    return sum(each <= most for each in figures) / len(figures) if figures else None


def by_kind(found: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """The summary of each size of problem on each kind of devices, and of all."""
    groups: dict[str, list[Record]] = {}
    for each in found:
        size = "tiny" if each.tiny else "medium"
        for name in (size, f"{size}, {each.kind}"):
            groups.setdefault(name, []).append(each)
    return {name: summary(groups[name]) for name in sorted(groups)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000, help="problems")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tiny", type=float, default=0.75, help="share of tiny problems")
    parser.add_argument("--placements", type=int, default=5_000, help="up to how many all are tried")
    parser.add_argument("--name", default="random_placements", help="of the file of results")
    parser.add_argument("--records", type=Path, help="a file of the records so far, to go on from")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for record in tqdm(records(arguments), total=arguments.count, file=sys.stderr):
        found.append(record)
        for text in record.violations:
            tqdm.write(f"{record.text} | {text}")
    kinds = by_kind(found)
    print(table({"kind": name, **row} for name, row in kinds.items()))
    wrong = [f"{record.text} | {text}" for record in found for text in record.violations]
    print(f"{len(wrong)} violations in {len(found)} problems")
    worst = sorted((each for each in found if each.ratio), key=lambda each: -(each.ratio or 0))[:20]
    path = write(
        arguments.name,
        {
            "command": shlex.join(["python", "tests/problems/random_placements.py", *sys.argv[1:]]),
            "cpu_seconds": round(sum(each.cpu_seconds for each in found), 1),
            "violations": dict(Counter(text.partition(" | ")[2].partition(":")[0] for text in wrong)),
            "what is wrong": wrong,
            "kinds": kinds,
            "worst ratios": [[each.text, each.ratio, each.complete] for each in worst],
        },
    )
    print(f"wrote {path}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
