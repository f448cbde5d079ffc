"""How fast a checkpoint gets to where the plan puts it, on the CPU, and in how much memory.

python benchmarks/loading.py [--layers 11] [--rounds 9]

A sharded checkpoint of a Llama (1.3 GB) is written to a temporary folder, and is in the page cache then.
In each round, one after the other: ``safetensors.torch.load_file``, with its tensors copied into memory,
since by itself it only maps the files; a meta model filled in its planned storage; and the same with all
weights left in their files. Reading headers is part of what is timed.

Peak memory is measured in a process of its own for each. So is ``graphplan.load``, planning included, with
all weights in host memory, and with half of them left on disk: the most that the process grows, against
what the plan puts into host memory. Pages of a mapped file that have been read count as memory here,
though the system takes them back when it needs them.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from report import in_turn, parser_of, table, write
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphplan
from graphplan.capture.model.model_weights import ModelWeights
from graphplan.runtime.checkpoint.checkpoint_files import read_checkpoint
from graphplan.runtime.weights.storage import Layout, place_model

T = TypeVar("T")
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
IDS = {"input_ids": torch.ones(1, 128, dtype=torch.long)}


def on_meta(config: LlamaConfig) -> nn.Module:
    """The model of a configuration, without data."""
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def write_checkpoint(folder: Path, shape: dict[str, int], layers: int, shard: int = 400_000_000) -> int:
    """Write a model of random weights; returns all bytes."""
    config = LlamaConfig(**shape, num_hidden_layers=layers, vocab_size=32_000, dtype="bfloat16")
    model: Any = on_meta(config).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size=shard)
    return sum(parameter.nbytes for parameter in model.parameters())


@dataclass(frozen=True)
class Task:
    """A meta model and the folder with its weights."""

    folder: Path
    model: nn.Module
    weights: ModelWeights

    @classmethod
    def of(cls, folder: Path) -> Task:
        model = on_meta(LlamaConfig.from_pretrained(folder))
        del model.model.rotary_emb  # its buffers are in no checkpoint, and the model is not run
        return cls(folder, model, ModelWeights(model))

    def placed(self, *, mapped: bool) -> nn.Module:
        """A model with its weights in planned storage, or left in their files."""
        source = read_checkpoint(self.model, self.weights, self.folder, strict=True)
        names = frozenset(self.weights.tensors)
        left = names if mapped else frozenset[str]()
        layout = Layout(dict.fromkeys(names, torch.device("cpu")), mapped=left)
        return place_model(self.model, self.weights, layout, source=source)[0]


def copied_by_safetensors(task: Task) -> dict[str, torch.Tensor]:
    """All tensors, in memory of their own."""
    files = sorted(task.folder.glob("*.safetensors"))
    return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}


WAYS: dict[str, Callable[[Task], Any]] = {
    "load_file": copied_by_safetensors,
    "planned storage": lambda task: task.placed(mapped=False),
    "left in the file": lambda task: task.placed(mapped=True),
}


# -- in a process of its own -----------------------------------------------------------------------


def memory(field: str) -> int:
    """Bytes of memory of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak(way: str, folder: str) -> int:
    """The growth while it loads, whatever it is afterwards."""
    task, before = Task.of(Path(folder)), memory("VmRSS")
    kept = WAYS[way](task)
    grown = memory("VmHWM") - before
    del kept
    return grown


def load(folder: str, cpu: int) -> dict[str, Any]:
    """``graphplan.load``, after all is imported and a small model has been planned and loaded."""
    with tempfile.TemporaryDirectory() as small:
        write_checkpoint(Path(small), SMALL, layers=2)
        graphplan.load(small, {"cpu": "8GiB", "disk": "8GiB"}, kwargs=IDS)(**IDS)
    before, start = memory("VmRSS"), time.perf_counter()
    plan = graphplan.load(folder, {"cpu": cpu, "disk": "16GiB"}, kwargs=IDS).plan
    seconds, grown = time.perf_counter() - start, memory("VmHWM") - before
    homes = plan.schedule.assignment.weights
    on_host = sum(weight.nbytes for weight in plan.graph.weights.values() if homes[weight.name] == "cpu")
    on_host += sum(buffer.nbytes for buffer in plan.schedule.prefetch_buffers)
    return {"seconds": seconds, "grown": grown, "on_host": on_host, "over_host": grown / on_host}


def alone(work: Callable[..., T], *given: Any) -> T:
    """What some work returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, given)


# -- the measurement -------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--rounds", type=int, default=9, help="fresh memory is slow in some of them")
    chosen = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)  # safetensors' copy may use what our reads use
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), LARGE, chosen.layers)
        task = Task.of(Path(folder))
        ways = {way: partial(work, task) for way, work in WAYS.items()}
        taken = in_turn(ways, chosen.rounds, time.perf_counter)
        peaks = {way: alone(peak, way, folder) / size for way in WAYS}
        loads = [alone(load, folder, int(size * share)) for share in (1.2, 0.6)]
    rows = []
    for way, each in taken.items():
        figures = {"seconds": min(each), "median_seconds": statistics.median(each)}
        rows.append({"way": way, **figures, "peak_over_model": peaks[way]})
    lines = [[row["way"], *(f"{figure:.4f}" for figure in list(row.values())[1:])] for row in rows]
    print(f"{size / 1e9:.2f} GB, {torch.get_num_threads()} threads of torch, best of {chosen.rounds}\n")
    print(table(["way", "seconds", "median", "peak / model"], lines) + "\n\ngraphplan.load, sizes in bytes:")
    print(table(list(loads[0]), [[f"{figure:.3g}" for figure in row.values()] for row in loads]))
    print(f"wrote {write('loading', {'bytes': size, 'rounds': chosen.rounds, 'rows': rows, 'loads': loads})}")


if __name__ == "__main__":
    main()
