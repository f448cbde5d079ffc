"""Every transformers architecture over simulated devices at shares of its size: results, peaks and moves.

python tests/sweep/sweep.py [--jobs 2] [--only llama t5] [--resume] [--images] [--gpu]

A small model of each type is placed with accelerators that hold 0.5, 0.7 and 0.9 of its weights each,
beside room for what a call needs beside them: one of them with the CPU, and two with the CPU. It is run, and
held against eager. Each architecture has a process of its own, which is ended after ``--limit`` seconds.
Results are written to ``benchmarks/results`` as they come: ``--resume`` goes on where the last run ended.

Without ``--thorough`` a model is traced once for its configurations, and the planner stops after its first
good placement; with ``--rotate`` each architecture takes one configuration, the next takes the next.
``--images`` sweeps the families of timm and torchvision instead. ``--gpu`` takes the first GPU of this
machine in place of simulated accelerators.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[2]
sys.path += [str(_ROOT / "tests" / "helpers"), str(_ROOT / "benchmarks")]

from every_architecture import names
from report import RESULTS, machine
from sweep_one import CONFIGURATIONS, Configuration, Record, run

_OF = "transformers architecture", "family of timm and torchvision"
FORK = multiprocessing.get_context("fork")  # transformers is imported once


@dataclass(slots=True)
class _Job:
    """A process that works on one architecture, and what it has told."""

    name: str
    process: Any
    tells: Connection
    ends: float
    record: Record = field(default_factory=dict)


def _start(name: str, configurations: Sequence[Configuration], options: argparse.Namespace) -> _Job:
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_alone, args=(name, configurations, options, there))
    process.start()
    there.close()
    empty = {"name": name, "built": False, "ran": False, "rows": []}
    return _Job(name, process, here, time.monotonic() + options.limit, empty)


def _alone(
    name: str, configurations: Sequence[Configuration], options: argparse.Namespace, tells: Connection
) -> None:
    """What the process of an architecture does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # models and their libraries talk
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not looked through again
    devices = import_module("gpu_devices").gpu() if options.gpu else None
    run(name, configurations, thorough=options.thorough, tell=tells.send, devices=devices)


def _listen(job: _Job) -> bool:
    """Take what a job has told; whether it has ended."""
    try:
        while job.tells.poll():
            job.record = job.tells.recv()
    except EOFError:
        return True
    if time.monotonic() > job.ends:
        job.record.setdefault("why", "not done within the time limit")
        job.record["late"] = True
        return True
    return False


def _end(job: _Job) -> Record:
    job.process.kill()
    job.process.join()
    job.tells.close()
    return job.record


def sweep(chosen: Sequence[str], options: argparse.Namespace, done: dict[str, Record]) -> None:
    """Run each architecture, at most ``options.jobs`` at once, and write what is known after each."""
    left, jobs = list(enumerate(chosen)), list[_Job]()
    configurations = [one for one in CONFIGURATIONS if one.accelerators == 1 or not options.gpu]
    while left or jobs:
        while left and len(jobs) < options.jobs:
            index, name = left.pop(0)
            turn = index % len(configurations)
            picked = configurations[turn : turn + 1] if options.rotate else configurations
            jobs.append(_start(name, picked, options))
        wait([job.tells for job in jobs], timeout=1)
        for job in [job for job in jobs if _listen(job)]:
            jobs.remove(job)
            done[job.name] = _end(job)
            write(done, options)
            print(f"{len(done)} {job.name}: {verdict(done[job.name])}", flush=True)


def verdict(record: Record) -> str:
    """One word for what became of an architecture, and why."""
    if not record["ran"]:
        return "does not run" if record["built"] else "not built"
    if "random" in record:
        return "random"
    if record.get("late"):
        return "late"
    outcomes = [row["outcome"] for row in record["rows"]]
    wrong = [outcome for outcome in outcomes if outcome not in ("equal", "infeasible")]
    if wrong or not outcomes:
        return wrong[0] if wrong else "error"
    return "infeasible" if "infeasible" in outcomes else "equal"


def summary(results: Sequence[Record]) -> dict[str, Any]:
    """Figures of all."""
    ran = [record for record in results if record["ran"]]
    judged = [record for record in ran if verdict(record) != "random"]
    rows = [row for record in judged for row in record["rows"]]
    return {
        "architectures": len(results),
        "built": sum(record["built"] for record in results),
        "ran": len(ran),
        "random": len(ran) - len(judged),
        "of": len(judged),
        "passed": sum(verdict(record) == "equal" for record in judged),
        "infeasible": sum(verdict(record) == "infeasible" for record in judged),
        "captured_by": dict(Counter(record["method"] for record in judged if record.get("method"))),
        "placements": len(rows),
        "placements_equal": sum(row["outcome"] == "equal" for row in rows),
        "placements_infeasible": sum(row["outcome"] == "infeasible" for row in rows),
    }


def _file_of(options: argparse.Namespace) -> Path:
    """``results/sweep.json``, ``gpu_image_sweep.json``, and so on."""
    return options.into / f"{'gpu_' * options.gpu}{'image_' * options.images}sweep.json"


@cache
def _machine() -> dict[str, Any]:
    """In a process of its own: those that are forked cannot use a GPU that this one has looked at."""
    with FORK.Pool(1) as pool:
        return dict(pool.apply(machine))


def write(done: dict[str, Record], options: argparse.Namespace) -> None:
    """The results, an architecture a line, and the table beside them."""
    options.into.mkdir(exist_ok=True)
    results = [done[name] for name in sorted(done)]
    lines = ",\n".join(json.dumps(record) for record in results)
    head = json.dumps({"machine": _machine(), **summary(results)}, indent=1)[:-2]
    path = _file_of(options)
    path.write_text(f'{head},\n "results": [\n{lines}\n]}}\n', encoding="utf-8")
    path.with_suffix(".md").write_text(page(results, _OF[options.images]), encoding="utf-8")


def page(results: Sequence[Record], of: str = "transformers architecture") -> str:
    """The table for people."""
    figures = summary(results)
    judged = [record for record in results if record["ran"]]
    lines = [
        f"# Every {of} that builds small and runs eagerly",
        "",
        f"Of {figures['architectures']} model types {figures['built']} were built small and "
        f"{figures['ran']} ran eagerly; {figures['random']} of these give other results at each eager call. "
        f"Of the other {figures['of']}, {figures['passed']} equal eager within budget in every configuration "
        f"that was run, and {figures['infeasible']} were infeasible in one. Placements: "
        f"{figures['placements_equal']} of {figures['placements']} equal, "
        f"{figures['placements_infeasible']} infeasible.",
        "",
        "| type | model | parameters | traced by | configurations | result | why |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in judged:
        cells = [
            record["name"],
            record["head"],
            f"{record['parameters']:,}",
            record.get("method") or "-",
            " ".join(f"{row['accelerators']}x{row['share']}" for row in record["rows"]),
            verdict(record),
            record.get("random", record.get("why", "")).replace("|", "/"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Not run eagerly:", "", "| type | why |", "|---|---|"]
    lines += [f"| {r['name']} | {r.get('why', '').replace('|', '/')} |" for r in results if not r["ran"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Sweep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], help="these types; their results are replaced")
    parser.add_argument("--resume", action="store_true", help="leave out what is in the results already")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for an architecture")
    parser.add_argument(
        "--thorough", action="store_true", help="trace and plan each configuration as users do"
    )
    parser.add_argument("--rotate", action="store_true", help="one configuration for each architecture")
    parser.add_argument("--images", action="store_true", help="timm and torchvision, which must be installed")
    parser.add_argument("--gpu", action="store_true", help="a GPU instead of simulated accelerators")
    parser.add_argument("--into", type=Path, default=RESULTS, help="the folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = _file_of(options)
    done: dict[str, Record] = {}
    if (options.resume or options.only) and known.is_file():
        done = {record["name"]: record for record in json.loads(known.read_text(encoding="utf-8"))["results"]}
    every = import_module("image_models").names if options.images else names
    chosen = [name for name in options.only or every() if not (options.resume and name in done)]
    sweep(chosen, options, done)
    for name, figure in summary([done[name] for name in sorted(done)]).items():
        print(f"{name}: {figure}")


if __name__ == "__main__":
    main()
