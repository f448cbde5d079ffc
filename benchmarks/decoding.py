"""Time of ``generate()`` at batch 1: eager, accelerate's hooks, and ours, side by side.

    python benchmarks/decoding.py [--rounds 5] [--layers 24] [--tokens 128]

A toy Llama on the CPU, one thread: what is measured is what surrounds the kernels. Processor time, each round
runs all in turn, and the median of the rounds' ratios to eager is given.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from report import table, write
from toy_llama import hooked, llama_parts, toy_llama
from transformers.utils import logging

import graphplan

Generate = Callable[[], torch.Tensor]


def build(layers: int) -> Any:
    """A Llama of many small layers."""
    torch.manual_seed(0)
    return toy_llama(layers, eos_token_id=None, pad_token_id=0)


def contestants(model: Any, tokens: int) -> dict[str, Generate]:
    """Name -> a call that generates."""
    ids = torch.arange(1, 17).reshape(1, 16)
    options = {"max_new_tokens": tokens, "do_sample": False}
    hooks = hooked(model, llama_parts(len(model.model.layers)))
    placed = graphplan.partition(model, {"cpu": "4GiB"}, kwargs={"input_ids": ids}, max_length=16 + tokens)
    models = {
        "eager": model,
        "accelerate dispatch": hooks.dispatched,
        "accelerate offload": hooks.offloaded,
        "graphplan": placed,
    }
    return {name: lambda m=m: m.generate(ids, **options) for name, m in models.items()}


def measure(calls: dict[str, Generate], rounds: int) -> dict[str, list[float]]:
    """Name -> seconds of processor time in each round, after one to warm up."""
    expected = calls["eager"]()
    for name, call in calls.items():
        assert torch.equal(call(), expected), f"{name} generates other tokens"
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)
    return seconds


def summarised(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """For each contestant, the median of its seconds, and of its ratios to eager in the same round."""
    rows = []
    for name, own in seconds.items():
        ratio = median(mine / eager for mine, eager in zip(own, seconds["eager"], strict=True))
        rows.append({"model": name, "seconds": round(median(own), 4), "ratio": round(ratio, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    calls = contestants(build(options.layers), options.tokens)
    rows = summarised(measure(calls, options.rounds))
    print(table(["", "seconds", "x eager"], [list(row.values()) for row in rows]))
    setting = {"layers": options.layers, "tokens": options.tokens, "rounds": options.rounds}
    print(write("decoding", {**setting, "rows": rows}))


if __name__ == "__main__":
    main()
