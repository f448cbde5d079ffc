"""Campaigns of random modules and injected faults: what must never be, how often was it tried?

python tests/campaigns/reliability.py [--only NAME ...] [--count N] [--seed 0] [--processes 2]
                                    [--seconds S] [--resume]

Each campaign is a function of this folder from a range of seeds to counts and violations; tests run a
sample of each. A campaign that runs out of ``--seconds`` begins no further cases, and ``--resume`` goes on
after the cases that are in the results. Violations are printed;
``benchmarks/results/reliability.json`` has them and the counts. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path += [str(Path(__file__).parents[2] / "benchmarks"), str(Path(__file__).parents[1] / "helpers")]

from campaigns import CAMPAIGNS, Campaign, Tally
from report import RESULTS, table, write
from tqdm import tqdm

NAME = "reliability"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(CAMPAIGNS), nargs="+", default=list(CAMPAIGNS))
    parser.add_argument("--count", type=int, help="cases of each; by default the campaign's own number")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="after which a campaign begins no further cases")
    parser.add_argument("--resume", action="store_true", help="go on after the cases in the results")
    options = parser.parse_args()
    failed = False
    for name in options.only:
        row = run_campaign(name, CAMPAIGNS[name], options)
        print(table([{"campaign": name, **row["counts"]}]))
        failed |= bool(row["violations"])
        save(name, row)
    return int(failed)


def run_campaign(name: str, campaign: Campaign, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the results."""
    begin, last = time.monotonic(), options.seed + (options.count or campaign.cases)
    end = None if options.seconds is None else begin + options.seconds
    earlier = recorded().get(name) if options.resume else None
    total, minutes = Tally(), 0.0
    if earlier is not None:
        total.add(Tally(Counter(earlier["counts"]), earlier["violations"], earlier["largest_difference"]))
        minutes = earlier["minutes"]
    seeds = range(options.seed + total.counts["cases"], last)
    found = pieces(name, seeds, end, options.processes)
    for tally in tqdm(found, total=-(-len(seeds) // campaign.piece), desc=name):
        total.add(tally)
        for text in tally.violations:
            tqdm.write(f"{name}: {text}")
    return {
        "what": campaign.what,
        "command": shlex.join(["python", "tests/campaigns/reliability.py", *sys.argv[1:]]),
        "seed": options.seed,
        "counts": dict(total.counts),
        "largest_difference": total.difference,
        "violations": total.violations,
        "minutes": round(minutes + (time.monotonic() - begin) / 60, 1),
    }


def pieces(name: str, seeds: range, end: float | None, processes: int) -> Iterator[Tally]:
    """The tallies of ranges of seeds, as they are done; none is begun after ``end``."""
    size = CAMPAIGNS[name].piece
    waiting = iter([seeds[start : start + size] for start in range(0, len(seeds), size)])
    context = multiprocessing.get_context("spawn")
    # torch keeps what it has traced until a process ends
    with ProcessPoolExecutor(processes, context, prepare, max_tasks_per_child=1) as pool:
        while (end is None or time.monotonic() < end) and (some := list(islice(waiting, processes))):
            yield from pool.map(CAMPAIGNS[name].run, some)


def prepare() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported is not looked through again after every case


def recorded() -> dict[str, Any]:
    """Name of a campaign -> its row in the results."""
    path = RESULTS / f"{NAME}.json"
    return json.loads(path.read_text())["campaigns"] if path.is_file() else {}


def save(name: str, row: dict[str, Any]) -> None:
    """Put a row among those of the other campaigns that are there."""
    print(write(NAME, {"campaigns": {**recorded(), name: row}}))


if __name__ == "__main__":
    sys.exit(main())
