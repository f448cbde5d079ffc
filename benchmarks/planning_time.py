"""Seconds of planning by stage, for Llama-like models of growing depth on the meta device.

python benchmarks/planning_time.py [--layers 2 32 80]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from planner_api import Problem, place
from report import table, write
from transformers import LlamaConfig, LlamaForCausalLM

from graphplan.capture.model_copy import Twin
from graphplan.capture.tracing import capture
from graphplan.devices.max_memory import read_max_memory
from graphplan.passes.frontend.annotate import annotate
from graphplan.passes.frontend.simplify import simplify
from graphplan.passes.lowering.emit import lower
from graphplan.passes.lowering.verify_devices import verify_lowered


def build(layers: int) -> torch.nn.Module:
    """A Llama of the 70B's width and the given depth, without data."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        num_hidden_layers=layers,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def measure(layers: int, devices: int) -> dict[str, Any]:
    model = build(layers)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    budgets = {i: int(size / devices * 1.15) + (6 << 30) for i in range(devices)}
    seconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        seconds[stage] = time.perf_counter() - start
        return result

    topology = read_max_memory(budgets)
    twin = timed("copy", lambda: Twin(model))
    call = twin.bind((), {"input_ids": torch.zeros(1, 512, dtype=torch.long, device="meta")})
    captured = timed("capture", lambda: capture(twin, call))

    def read() -> Any:
        simplify(captured)
        return annotate(captured, twin.weights, ["cuda"])

    graph = timed("annotate", read)
    solution = timed("place", lambda: place(Problem(graph, topology, "cpu")))
    schedule = solution.evaluation.schedule

    def write_code() -> None:
        verify_lowered(lower(captured, graph, schedule, topology), graph, schedule, topology)

    timed("lower", write_code)
    gap = 1 - solution.lower_bound / solution.evaluation.seconds
    return {"layers": layers, "operations": len(graph.operations), "gap": gap, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 32, 80])
    parser.add_argument("--devices", type=int, default=8)
    options = parser.parse_args()
    measure(1, 2)  # imports and first-use caches
    rows = [measure(layers, options.devices) for layers in options.layers]
    stages = list(rows[0]["seconds"])
    print(
        table(
            ["layers", "operations", *stages, "total s", "s / layer", "gap"],
            [
                [
                    row["layers"],
                    row["operations"],
                    *(f"{row['seconds'][stage]:.2f}" for stage in stages),
                    f"{sum(row['seconds'].values()):.2f}",
                    f"{sum(row['seconds'].values()) / row['layers']:.3f}",
                    f"{100 * row['gap']:.2f} %",
                ]
                for row in rows
            ],
        )
    )
    print(f"wrote {write('planning_time', {'devices': options.devices, 'rows': rows})}")


if __name__ == "__main__":
    main()
