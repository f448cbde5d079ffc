"""A training step that does not fit its GPU: ours beside eager and gradient checkpointing.

python benchmarks/training_gpu.py [--layers 8] [--rows 4] [--length 2048] [--shares 1.05 0.75 0.6 0.45]

Some layers of Llama-3-8B with random weights in bfloat16, AdamW, a batch of ``rows`` texts: forward, backward
and optimizer. Eager runs with all on GPU 0, and with ``gradient_checkpointing_enable()``, which computes
each layer again; ours on budgets of GPU 0 that are shares of eager's peak, the rest on the CPU. Speeds are
measured first. Seconds are wall time, peaks what PyTorch's allocator counts, planning and warm-up included.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from models import llama_of
from report import finished, in_turn, parser_of, table, write
from torch import nn
from transformers import LlamaForCausalLM

import graphplan

ADAMW = partial(torch.optim.AdamW, fused=True)
GPU = torch.device("cuda:0")


@dataclass(frozen=True, slots=True)
class Row:
    """One form of the step. Bytes and seconds.

    Attributes:
        budget: of the GPU; None in eager mode.
        peak: measured over all steps.
        seconds: of the quickest step.
        loss: of the first step.
        setup: placing the model, planning included.
        planned: our plan's peak.
        estimated: our plan's step.
        recomputed: of it, seconds of what is computed again.
        streamed: bytes of weights that a step copies.
    """

    form: str
    budget: int | None
    peak: int
    seconds: float
    loss: float
    setup: float
    planned: int | None = None
    estimated: float | None = None
    recomputed: float | None = None
    streamed: int | None = None


def llama(layers: int) -> nn.Module:
    """The same each time, on the CPU; made on the GPU, where that takes a second."""
    config = llama_of(4096, 14336, layers, 32, 8, 32000)()
    torch.manual_seed(0)
    with GPU:
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train().cpu()


def measured(form: str, budget: int | None, asked: Any, make: Callable[[nn.Module], nn.Module]) -> Row:
    """One form, made and called."""
    model = llama(asked.layers)
    ids = torch.randint(0, 32000, (asked.rows, asked.length), device=GPU)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(GPU)
    start = time.perf_counter()
    model = make(model)
    torch.cuda.synchronize(GPU)
    setup = time.perf_counter() - start
    optimizer = ADAMW(model.parameters(), lr=1e-5)
    losses = []

    def step() -> None:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    seconds = min(in_turn({"": partial(finished, step, GPU)}, asked.rounds, time.perf_counter)[""])
    more: dict[str, Any] = {}
    if budget is not None:
        plan = model.plan
        assert isinstance(plan, graphplan.Plan)
        more = {
            "planned": plan.peak_bytes[0],
            "estimated": plan.makespan + plan.optimizer_seconds,
            "recomputed": plan.recompute_seconds,
            "streamed": plan.streamed_bytes,
        }
    peak = torch.cuda.max_memory_allocated(GPU)
    row = Row(form, budget, peak, seconds, float(losses[0]), setup, **more)
    print(row, flush=True)
    return row


def checkpointed(model: nn.Module) -> nn.Module:
    model.to(GPU).gradient_checkpointing_enable()
    return model


def rows(asked: Any) -> Iterator[Row]:
    eager = measured("eager", None, asked, lambda model: model.to(GPU))
    yield eager
    yield measured("eager, gradient checkpointing", None, asked, checkpointed)
    speeds = graphplan.measure_devices({0: eager.peak, "cpu": "100GiB"}, dtype=torch.bfloat16)
    print(speeds, flush=True)
    ids = torch.zeros(asked.rows, asked.length, dtype=torch.int64, device=GPU)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    for share in asked.shares:
        budgets = {0: int(share * eager.peak), "cpu": "100GiB"}
        options = {"kwargs": inputs, "train": True, "optimizer": ADAMW, "devices": speeds}
        options |= {"accumulate_gradients": False}  # as the others
        make = partial(graphplan.partition, max_memory=budgets, **options)
        yield measured("graphplan", budgets[0], asked, make)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.05, 0.75, 0.6, 0.45])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    found: list[dict[str, Any]] = []
    for row in rows(asked):
        found.append(asdict(row))
        write("training_gpu", {"workload": dict(vars(asked)), "rows": found})
    sizes = ("budget", "peak", "planned", "streamed")
    names = ("seconds", "estimated", "recomputed", "loss", "setup")
    cells = [
        [row["form"]]
        + [f"{row[name] or 0:.3f}" for name in names]
        + [f"{(row[name] or 0) / (1 << 30):.2f}" for name in sizes]
        for row in found
    ]
    print(table(["form", *names, *(f"{name} GiB" for name in sizes)], cells))


if __name__ == "__main__":
    main()
