"""Planning and loading as large as users do: ``python benchmarks/pretrained.py``.

Two measurements, each in a process of its own. A Llama of 70B parameters on the meta device is planned
for four accelerators and a CPU: seconds, and how far the process grows. A sharded checkpoint of 2 GB is
written to a temporary folder and loaded, all of it to the CPU, and half of it with the rest left on disk:
the most that the process grows, against what the plan puts into host memory. Each process imports
everything and plans a small model first, so that what Python and torch take for themselves is there before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import report
import torch
from loading import high_water, resident
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import graphplan

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TWO_GB = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 21, "num_attention_heads": 16}
SEVENTY = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
IDS = {"input_ids": torch.ones(1, 128, dtype=torch.long)}


def config_of(shape: dict[str, int], **more: Any) -> LlamaConfig:
    return LlamaConfig(
        **shape, vocab_size=32_000, dtype="bfloat16", architectures=["LlamaForCausalLM"], **more
    )


def on_meta(config: LlamaConfig) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def write_checkpoint(folder: Path, shape: dict[str, int], shard: int) -> int:
    """Write shards one after another, so that the whole is never in memory."""
    config = config_of(shape)
    config.save_pretrained(folder)
    named: dict[str, str] = {}
    members: dict[str, torch.Tensor] = {}
    total = held = 0

    def flush() -> None:
        file = f"model-{len(set(named.values())):05}.safetensors"
        save_file(members, folder / file, metadata={"format": "pt"})
        named.update(dict.fromkeys(members, file))
        members.clear()

    for name, meta in on_meta(config).state_dict().items():
        members[name] = torch.empty(meta.shape, dtype=meta.dtype).normal_(std=0.02)
        total += meta.nbytes
        held += meta.nbytes
        if held > shard:
            flush()
            held = 0
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    return total


def warm_up() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), SMALL, 1 << 30)
        graphplan.load(folder, {"cpu": "8GiB", "disk": "8GiB"}, kwargs=IDS)(**IDS)


def plan_seventy() -> dict[str, Any]:
    model = on_meta(config_of(SEVENTY, num_key_value_heads=8))
    before, start = resident(), time.perf_counter()
    made = graphplan.plan(model, {**dict.fromkeys(range(4), "34GiB"), "cpu": "64GiB"}, kwargs=IDS)
    return {
        "seconds": time.perf_counter() - start,
        "grown": high_water() - before,
        "process": high_water(),
        "parameters": model.num_parameters(),
        "stages": len(made.stages),
        "gap": made.gap,
    }


def load(folder: str, cpu: str) -> dict[str, Any]:
    before, start = resident(), time.perf_counter()
    placed = graphplan.load(folder, {"cpu": int(cpu), "disk": "16GiB"}, kwargs=IDS)
    seconds, grown = time.perf_counter() - start, high_water() - before
    weights = placed.plan.graph.weights.values()
    home = placed.plan.schedule.assignment.weights
    on_host = sum(weight.nbytes for weight in weights if home[weight.name] == "cpu")
    rings = sum(ring.nbytes for ring in placed.plan.schedule.rings)
    return {"seconds": seconds, "grown": grown, "on_host": on_host, "rings": rings}


WORK = {"plan": plan_seventy, "load": load}


def measured(*work: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--work", *work], check=True, capture_output=True, text=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", nargs="+", help="measure one thing in this process")
    chosen = parser.parse_args()
    if chosen.work:
        warm_up()
        print(json.dumps(WORK[chosen.work[0]](*chosen.work[1:])))
        return
    planned = measured("plan")
    print(
        f"{planned['parameters'] / 1e9:.1f}B parameters planned in {planned['seconds']:.1f} s, the process "
        f"grew by {planned['grown'] / 1e9:.2f} GB to {planned['process'] / 1e9:.2f} GB (wanted: 30 s, 2 GB)"
    )
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        total = write_checkpoint(Path(folder), TWO_GB, 400_000_000)
        for share in (1.2, 0.6):
            row = {"bytes": total, **measured("load", folder, str(int(total * share)))}
            row["over_host"] = row["grown"] / (row["on_host"] + row["rings"])
            loads.append(row)
            print(
                f"{total / 1e9:.2f} GB loaded in {row['seconds']:.1f} s with {row['on_host'] / 1e9:.2f} GB "
                f"in host memory: grew by {row['over_host']:.3f} of that (wanted: below 1.1)"
            )
    print(f"written to {report.write('pretrained', {'planned': planned, 'loads': loads})}")


if __name__ == "__main__":
    main()
