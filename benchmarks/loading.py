"""How fast a checkpoint gets to where the plan puts it, on the CPU: ``python benchmarks/loading.py``.

A checkpoint of 1.3 GB is written to a temporary folder, and read once so that it is in the page cache.
Then, one after the other in each of several rounds, so that what else the machine does is the same for
all: ``safetensors.torch.load_file``, with its tensors copied into memory, since by itself it only maps
the file; a meta model filled in its planned storage; the same with all weights left in their file; and
the reads alone, into memory that is there already, the most that can be hoped for. The best round of each
counts. Peak memory is measured in a process of its own for each. The model and its names are there
before; reading the checkpoint's header is part of what is timed, and so is copying the tree of modules
where a module is made. Pages of a mapped file that have been read count as memory here, though the system
takes them back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from graphplan.capture.model_weights import ModelWeights
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint, read_checkpoint
from graphplan.runtime.checkpoint.parallel_reads import Request, read_into
from graphplan.runtime.weights.storage import Layout, place_model

LAYERS, WIDTH = 13, 2048
ROUNDS = 9  # memory that the system hands out anew each time is slow in most of them


class Block(nn.Module):
    """The weights of a transformer's layer, under names such as those have."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 4)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16_000, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))


@dataclass(frozen=True)
class Task:
    """A meta model and the file with its weights."""

    path: Path
    model: nn.Module
    weights: ModelWeights

    @classmethod
    def of(cls, path: Path) -> Task:
        with torch.device("meta"):
            model = Model()
        return cls(path, model, ModelWeights(model))

    def open(self) -> Checkpoint:
        return read_checkpoint(self.model, self.weights, self.path, strict=True)


def write_checkpoint(path: Path) -> int:
    with torch.device("meta"):
        state = Model().state_dict()
    made = {name: torch.empty(t.shape).normal_() for name, t in state.items()}
    save_file(made, path)
    return sum(t.numel() * t.element_size() for t in made.values())


def mapped_by_safetensors(task: Task) -> Any:
    return load_file(task.path)


def copied_by_safetensors(task: Task) -> Any:
    return {name: tensor.clone() for name, tensor in load_file(task.path).items()}


def into_storage(task: Task) -> Any:
    layout = Layout(dict.fromkeys(task.weights.tensors, torch.device("cpu")))
    return place_model(task.model, task.weights, layout, source=task.open())


def in_the_file(task: Task) -> Any:
    source, names = task.open(), frozenset(task.weights.tensors)
    assert source.mappable() == names
    layout = Layout(dict.fromkeys(names, torch.device("cpu")), mapped=names)
    return place_model(task.model, task.weights, layout, source=source)


def only_mapped(task: Task) -> Any:
    source = task.open()
    return [source.map(name) for name in task.weights.tensors]


class IntoMemoryThatIsThere:
    """The reads alone, over and over into the same places."""

    def __init__(self, task: Task) -> None:
        source, self.made = task.open(), into_storage(task)
        named = self.made.module.named_parameters()
        self.requests = [Request(*source.found[name], parameter.detach()) for name, parameter in named]

    def __call__(self, _: Task) -> Any:
        read_into(self.requests, lambda _: None)


WAYS: dict[str, Callable[[Task], Any]] = {
    "load_file": copied_by_safetensors,
    "load_file, only mapped": mapped_by_safetensors,
    "planned storage": into_storage,
    "left in the file": in_the_file,
    "left in the file, mapping alone": only_mapped,
}


def seconds(work: Callable[[Task], Any], task: Task) -> float:
    start = time.perf_counter()
    result = work(task)
    taken = time.perf_counter() - start
    del result
    return taken


def high_water() -> int:
    """The most bytes of memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def peak_of(way: str, path: Path) -> int:
    """Bytes by which a process grows at most while it loads, whatever it is afterwards."""
    command = [sys.executable, __file__, "--peak", way, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(json.loads(done.stdout)["grown"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peak", nargs=2, metavar=("WAY", "PATH"), help="load once, print the growth")
    chosen = parser.parse_args()
    if chosen.peak:
        way, path = chosen.peak
        task = Task.of(Path(path))
        before = resident()
        kept = WAYS[way](task)
        print(json.dumps({"grown": high_water() - before}))
        del kept
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder) / "model.safetensors")


def measure(path: Path) -> None:
    torch.set_num_threads(os.cpu_count() or 1)  # safetensors' copy may use what our reads use
    size = write_checkpoint(path)
    task = Task.of(path)
    ways = {**WAYS, "reads alone": IntoMemoryThatIsThere(task)}
    best = dict.fromkeys(ways, float("inf"))
    rounds = []
    for _ in range(ROUNDS):
        taken = {name: seconds(work, task) for name, work in ways.items()}
        rounds.append(taken)
        best = {name: min(best[name], taken[name]) for name in taken}
    ways.clear()
    peaks = {name: peak_of(name, path) for name in WAYS}
    rows = [
        {
            "way": name,
            "seconds": found,
            "median_seconds": statistics.median(taken[name] for taken in rounds),
            "bytes_per_second": size / found,
            "times_load_file": best["load_file"] / found,
            "peak_over_model": peaks[name] / size if name in peaks else None,
        }
        for name, found in best.items()
    ]
    header = ["way", "ms", "median ms", "GB/s", "x load_file", "peak / model"]
    table = [
        [
            row["way"],
            f"{1e3 * row['seconds']:.1f}",
            f"{1e3 * row['median_seconds']:.1f}",
            f"{row['bytes_per_second'] / 1e9:.1f}",
            f"{row['times_load_file']:.2f}",
            "" if row["peak_over_model"] is None else f"{row['peak_over_model']:.3f}",
        ]
        for row in rows
    ]
    print(f"{size / 1e9:.2f} GB, {torch.get_num_threads()} threads of torch, best of {ROUNDS}\n")
    print(report.table(header, table))
    print("\nwanted: planned storage 3 x load_file, left in the file 5 ms, peak 1.05 of the model")
    data = {"bytes": size, "torch_threads": torch.get_num_threads(), "rows": rows, "rounds": rounds}
    print(f"written to {report.write('loading', data)}")


if __name__ == "__main__":
    main()
