"""What a call costs beside its kernels: tiny models whose time is dispatch, one thread.

python benchmarks/overhead.py [--rounds 200]

Every form is called once in each round, in turn, and timed in processor time of this process, so that what
else runs on the machine counts little. Ratios are of the least times; medians stand beside them.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from report import table, write
from torch import nn
from torch.utils import _pytree as pytree
from toy_llama import hooked, llama_parts, toy_llama

import graphplan

WARM = 5
EAGER, OURS = "eager", "graphplan"
TARGETS = {"300 x Linear(16)": 0.6, "Llama, 24 layers of 64": 0.8}


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, a call, and the modules that accelerate's map names."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]
    parts: tuple[str, ...]


def linears(count: int = 300, width: int = 16) -> Workload:
    """A chain of linear layers."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).eval()
    parts = tuple(str(i) for i in range(count))
    return Workload(f"{count} x Linear({width})", model, {"input": torch.randn(1, width)}, parts)


def llama(layers: int = 24, hidden: int = 64) -> Workload:
    """A toy Llama that returns its cache, as it does by default."""
    inputs = {"input_ids": torch.randint(0, 256, (1, 8))}
    name = f"Llama, {layers} layers of {hidden}"
    return Workload(name, toy_llama(layers, hidden), inputs, llama_parts(layers))


def forms(workload: Workload) -> dict[str, Callable[..., Any]]:
    """The model as it is, placed by us, and under accelerate's hooks; all on the CPU."""
    eager, hooks = workload.model, hooked(workload.model, workload.parts)
    return {
        EAGER: eager,
        OURS: graphplan.partition(eager, {"cpu": "8GiB"}, kwargs=workload.inputs),
        "accelerate dispatch_model": hooks.dispatched,
        "accelerate cpu_offload": hooks.offloaded,
    }


def times(
    calls: Mapping[str, Callable[..., Any]], inputs: dict[str, Any], rounds: int
) -> dict[str, list[int]]:
    """Form -> nanoseconds of processor time of each call."""
    found: dict[str, list[int]] = {name: [] for name in calls}
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.no_grad():
            for round_ in range(rounds + WARM):
                for name, call in calls.items():
                    start = time.process_time_ns()
                    call(**inputs)
                    taken = time.process_time_ns() - start
                    if round_ >= WARM:
                        found[name].append(taken)
    finally:
        if collects:
            gc.enable()
    return found


def require_equal(calls: Mapping[str, Callable[..., Any]], inputs: dict[str, Any]) -> None:
    """Every form returns what eager does."""
    with torch.no_grad():
        expected = pytree.tree_leaves(calls[EAGER](**inputs))
        for name, call in calls.items():
            for a, b in zip(expected, pytree.tree_leaves(call(**inputs)), strict=True):
                if isinstance(a, torch.Tensor):
                    torch.testing.assert_close(a, b, msg=f"{name} differs from eager")


def measure(workload: Workload, rounds: int) -> list[dict[str, Any]]:
    """A row for each form."""
    torch.set_num_threads(1)
    calls = forms(workload)
    require_equal(calls, workload.inputs)
    taken = times(calls, workload.inputs, rounds)
    least = {name: min(values) for name, values in taken.items()}
    middle = {name: statistics.median(values) for name, values in taken.items()}
    return [
        {
            "workload": workload.name,
            "form": name,
            "best_ms": least[name] / 1e6,
            "median_ms": middle[name] / 1e6,
            "ratio_of_best": least[name] / least[EAGER],
            "ratio_of_median": middle[name] / middle[EAGER],
        }
        for name in calls
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    rows = [row for workload in (linears(), llama()) for row in measure(workload, rounds)]
    header = ("workload", "form", "best ms", "median ms", "x eager, best", "x eager, median")
    cells = [
        (
            row["workload"],
            row["form"],
            f"{row['best_ms']:.2f}",
            f"{row['median_ms']:.2f}",
            f"{row['ratio_of_best']:.2f}",
            f"{row['ratio_of_median']:.2f}",
        )
        for row in rows
    ]
    print(table(header, cells))
    method = "processor time of one process and one thread, forms in turn, garbage collection off"
    write("overhead", {"rounds": rounds, "clock": method, "targets": TARGETS, "rows": rows})


if __name__ == "__main__":
    main()
