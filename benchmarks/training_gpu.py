"""A training step that does not fit its GPU: graphplan, eager and gradient checkpointing.

python benchmarks/training_gpu.py

Eight layers of Llama-3-8B with random weights in bfloat16, AdamW, a batch of four texts: forward, backward
and optimizer. Eager runs with everything on GPU 0, and with ``gradient_checkpointing_enable()``, which
recomputes each layer; graphplan runs on budgets of GPU 0 that are shares of eager's peak, the rest on the
CPU. Speeds are measured first. Seconds are wall time; peaks are those of PyTorch's allocator, planning and
warm-up included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from models import llama_8b, llama_by_gpu
from report import parser_of, quickest, require_cuda, set_up, write
from torch import nn

import graphplan

ADAMW = partial(torch.optim.AdamW, fused=True)
GPU = torch.device("cuda:0")
LAYERS, ROWS, LENGTH, VOCABULARY, ROUNDS = 8, 4, 2048, 32000, 3
SHARES = (1.05, 0.75, 0.6, 0.45)


@dataclass(frozen=True, slots=True)
class Row:
    """One form of the step. Bytes and seconds.

    Attributes:
        budget: memory budget of the GPU; None in eager mode.
        peak: measured peak over all steps.
        seconds: time of the fastest step.
        loss: loss of the first step.
        setup: placing the model, planning included.
        planned: the plan's peak.
        estimated: the plan's estimate of the step.
        recomputed: seconds of recomputation in the estimate.
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


def measured(form: str, budget: int | None, make: Callable[[nn.Module], nn.Module]) -> Row:
    """Build one form of the step and measure it."""
    model = llama_by_gpu(llama_8b(LAYERS, VOCABULARY)).train()
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), device=GPU)
    model, setup = set_up(partial(make, model), GPU)
    optimizer = ADAMW(model.parameters(), lr=1e-5)
    losses = []

    def step() -> None:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    seconds = quickest(step, GPU, ROUNDS)
    figures: dict[str, Any] = {}
    if budget is not None:
        plan = model.plan
        assert isinstance(plan, graphplan.Plan)
        figures = {
            "planned": plan.peak_bytes[0],
            "estimated": plan.makespan + plan.optimizer_seconds,
            "recomputed": plan.recompute_seconds,
            "streamed": plan.streamed_bytes,
        }
    peak = torch.cuda.max_memory_allocated(GPU)
    row = Row(form, budget, peak, seconds, float(losses[0]), setup, **figures)
    print(row, flush=True)
    return row


def checkpointed(model: nn.Module) -> nn.Module:
    model.to(GPU).gradient_checkpointing_enable()
    return model


def rows() -> Iterator[Row]:
    eager = measured("eager", None, lambda model: model.to(GPU))
    yield eager
    yield measured("eager, gradient checkpointing", None, checkpointed)
    speeds = graphplan.measure_devices({0: eager.peak, "cpu": "100GiB"}, dtype=torch.bfloat16)
    print(speeds, flush=True)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device=GPU)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    for share in SHARES:
        budgets = {0: int(share * eager.peak), "cpu": "100GiB"}
        options = {"kwargs": inputs, "train": True, "optimizer": ADAMW, "devices": speeds}
        options |= {"accumulate_gradients": False}  # as the others
        make = partial(graphplan.partition, max_memory=budgets, **options)
        yield measured("graphplan", budgets[0], make)


def main() -> None:
    parser_of(__doc__).parse_args()
    require_cuda()
    workload = {"layers": LAYERS, "rows": ROWS, "length": LENGTH, "shares": SHARES, "rounds": ROUNDS}
    results: list[dict[str, Any]] = []
    for row in rows():
        results.append(asdict(row))
        write("training_gpu", {"workload": workload, "rows": results})


if __name__ == "__main__":
    main()
