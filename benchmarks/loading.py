"""Time and memory to load a checkpoint into its planned places, on the CPU.

python benchmarks/loading.py

A sharded checkpoint of a Llama (1.4 GB) is written to a temporary folder, so that it is in the page cache.
Each of the following runs in its own process, as users load a model once: ``safetensors.torch.load_file``,
with its tensors copied, since it only maps the files; a meta model filled in its planned storage; the same
with all weights left in their files; and ``graphplan.load``, planning included, with a CPU budget of 1.2
times the bytes, and of 0.6 with the rest left on disk. Headers are read in the timed part. Of three rounds
the fastest counts, with the growth of its process; for ``graphplan.load``, relative to the bytes that the
plan has in host memory. Seconds are processor time of all threads, which other load on the machine hardly
affects. Pages read from a mapped file count as memory, though the system can reclaim them.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
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
from graphplan.runtime.weights.storage import WeightLayout, place_model

T = TypeVar("T")
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}
IDS = {"input_ids": torch.ones(1, 128, dtype=torch.long)}
LAYERS, ROUNDS = 11, 3
SHARES = (1.2, 0.6)  # CPU budgets, as shares of the checkpoint's bytes


def on_meta(config: LlamaConfig) -> nn.Module:
    """Return the model of a configuration on the meta device."""
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def write_checkpoint(folder: Path, shape: dict[str, int], layers: int, shard: int = 400_000_000) -> int:
    """Write a model with random weights; return the bytes of its weights."""
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
        del model.model.rotary_emb  # no checkpoint has its buffers, and the model is not run
        return cls(folder, model, ModelWeights(model))

    def placed(self, *, mapped: bool) -> nn.Module:
        """Return the model with its weights in planned storage, or left in their files."""
        source = read_checkpoint(self.model, self.weights, self.folder, strict=True)
        names = frozenset(self.weights.tensors)
        in_files = names if mapped else frozenset[str]()
        layout = WeightLayout(dict.fromkeys(names, torch.device("cpu")), mapped=in_files)
        return place_model(self.model, self.weights, layout, source=source)[0]


def copied_by_safetensors(task: Task) -> dict[str, torch.Tensor]:
    """Return copies of all tensors in memory."""
    files = sorted(task.folder.glob("*.safetensors"))
    return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}


WAYS: dict[str, Callable[[Task], Any]] = {
    "load_file": copied_by_safetensors,
    "planned storage": lambda task: task.placed(mapped=False),
    "left in the file": lambda task: task.placed(mapped=True),
}


# -- in its own process ----------------------------------------------------------------------------


def memory(field: str) -> int:
    """Return bytes of memory of this process: ``VmRSS`` is the current size, ``VmHWM`` the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measured(work: Callable[[], T]) -> tuple[T, float, int]:
    """Return the result of ``work``, its processor seconds, and the peak growth of the process."""
    before, start = memory("VmRSS"), time.process_time()
    result = work()
    return result, time.process_time() - start, memory("VmHWM") - before


def fill(way: str, folder: str) -> dict[str, float]:
    torch.set_num_threads(os.cpu_count() or 1)  # as many for safetensors' copy as for our reads
    task = Task.of(Path(folder))
    _, seconds, grown = measured(lambda: WAYS[way](task))
    return {"seconds": seconds, "grown": grown}


def load(share: float, folder: str) -> dict[str, float]:
    """Measure ``graphplan.load`` with a CPU budget of this share, after a warm-up with a small model."""
    with tempfile.TemporaryDirectory() as small:
        write_checkpoint(Path(small), SMALL, layers=2)
        graphplan.load(small, {"cpu": "8GiB", "disk": "8GiB"}, kwargs=IDS)(**IDS)
    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    budgets = {"cpu": int(share * size), "disk": "16GiB"}
    placed, seconds, grown = measured(lambda: graphplan.load(folder, budgets, kwargs=IDS))
    plan = placed.plan
    devices = plan.schedule.assignment.weights
    on_host = sum(weight.nbytes for weight in plan.graph.weights.values() if devices[weight.name] == "cpu")
    on_host += sum(buffer.nbytes for buffer in plan.schedule.prefetch_buffers)
    return {"seconds": seconds, "grown": grown, "on_host": on_host, "over_host": grown / on_host}


def alone(work: Callable[..., T], *arguments: Any) -> T:
    """Return the result of ``work`` in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


# -- the measurement -------------------------------------------------------------------------------


def main() -> None:
    parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), LARGE, LAYERS)
        rounds = [
            ([alone(fill, way, folder) for way in WAYS], [alone(load, share, folder) for share in SHARES])
            for _ in range(ROUNDS)
        ]
    fills, loads = (
        [min(runs, key=itemgetter("seconds")) for runs in zip(*found, strict=True)]
        for found in zip(*rounds, strict=True)
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
