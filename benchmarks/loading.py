"""How fast a checkpoint gets to where the plan puts it, on the CPU, and in how much memory.

python benchmarks/loading.py

A sharded checkpoint of a Llama (1.4 GB) is written to a temporary folder, and is in the page cache then.
Each in a process of its own, as users load a model once: ``safetensors.torch.load_file``, with its tensors
copied into memory, since by itself it only maps the files; a meta model filled in its planned storage; the
same with all weights left in their files; and ``graphplan.load``, planning included, with a CPU budget of 1.2
of the bytes, and of 0.6 and the rest left on disk. Reading headers is part of what is timed. In three rounds,
the quickest counts, and the most that its process grows; for ``graphplan.load``, against what the plan puts
into host memory. Seconds are those of the processor, of all threads: what else a machine does is hardly in
them. Pages of a mapped file that have been read count as memory here, though the system takes them back when
it needs them.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from report import parser_of, table, write
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
LAYERS, ROUNDS = 11, 3
SHARES = (1.2, 0.6)  # of the bytes: the CPU's budgets


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


def taken(work: Callable[[], T]) -> tuple[T, float, int]:
    """What some work returns, its seconds of the processor, and the most by which the process grows."""
    before, start = memory("VmRSS"), time.process_time()
    result = work()
    return result, time.process_time() - start, memory("VmHWM") - before


def fill(way: str, folder: str) -> dict[str, float]:
    torch.set_num_threads(os.cpu_count() or 1)  # safetensors' copy may use what our reads use
    task = Task.of(Path(folder))
    _, seconds, grown = taken(lambda: WAYS[way](task))
    return {"seconds": seconds, "grown": grown}


def load(share: float, folder: str) -> dict[str, float]:
    """``graphplan.load`` with a CPU budget of this share, after a small model has been planned and loaded."""
    with tempfile.TemporaryDirectory() as small:
        write_checkpoint(Path(small), SMALL, layers=2)
        graphplan.load(small, {"cpu": "8GiB", "disk": "8GiB"}, kwargs=IDS)(**IDS)
    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    budgets = {"cpu": int(share * size), "disk": "16GiB"}
    placed, seconds, grown = taken(lambda: graphplan.load(folder, budgets, kwargs=IDS))
    plan = placed.plan
    homes = plan.schedule.assignment.weights
    on_host = sum(weight.nbytes for weight in plan.graph.weights.values() if homes[weight.name] == "cpu")
    on_host += sum(buffer.nbytes for buffer in plan.schedule.prefetch_buffers)
    return {"seconds": seconds, "grown": grown, "on_host": on_host, "over_host": grown / on_host}


def alone(work: Callable[..., T], *given: Any) -> T:
    """What some work returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, given)


# -- the measurement -------------------------------------------------------------------------------


def quickest(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return min(found, key=lambda one: one["seconds"])


def main() -> None:
    parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), LARGE, LAYERS)
        rounds = [
            ([alone(fill, way, folder) for way in WAYS], [alone(load, share, folder) for share in SHARES])
            for _ in range(ROUNDS)
        ]
    fills, loads = (
        [quickest(each) for each in zip(*found, strict=True)] for found in zip(*rounds, strict=True)
    )
    rows = [
        {"way": way, "seconds": found["seconds"], "peak_over_model": found["grown"] / size}
        for way, found in zip(WAYS, fills, strict=True)
    ]
    print(f"{size / 1e9:.2f} GB, best of {ROUNDS}\n")
    print(table(rows))
    print(f"\ngraphplan.load, sizes in bytes:\n{table(loads)}")
    print(f"wrote {write('loading', {'bytes': size, 'rounds': ROUNDS, 'rows': rows, 'loads': loads})}")


if __name__ == "__main__":
    main()
