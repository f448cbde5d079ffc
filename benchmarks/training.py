"""Training steps: planning time, and overhead over eager.

python benchmarks/training.py

A step of Llama-8B with AdamW is planned on the meta device, over four devices: with room for everything, and
with three quarters and half of that plan's peaks. A step of eight such layers (a vocabulary of 32,000, four
sequences) is planned for one device with half of the memory that it needs. For comparison, every block is
recomputed, as torch.utils.checkpoint does, with all the memory that this needs; the same evaluator judges
both. Then a step of a toy Llama of 24 layers (forward, backward, AdamW) runs on the CPU with one thread,
placed by graphplan and eager, in turn; ratios are those of the least times.

Seconds are processor time of this process, which other load on the machine hardly affects.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import json
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from models import llama_8b, llama_of
from report import in_turn, parser_of, write
from torch import nn
from transformers import LlamaForCausalLM

import graphplan
from graphplan.compiler.activation_choice import Trial, member_with
from graphplan.compiler.capture_cache import Captures
from graphplan.errors import InfeasibleError

ADAMW = torch.optim.AdamW
LAYERS, LENGTH, ROUNDS = 32, 2048, 20


def step_of_llama(
    layers: int = LAYERS, *, vocabulary: int = 128256, rows: int = 1
) -> tuple[nn.Module, dict[str, Any]]:
    """Return Llama-8B, or a variant with fewer layers, and a batch."""
    config = llama_8b(layers, vocabulary, max_position_embeddings=8192)
    with torch.device("meta"):
        model = LlamaForCausalLM(config()).to(torch.bfloat16).train()
        ids = torch.zeros(rows, LENGTH, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def plan_row(budgets: Mapping[Any, int | str], share: float) -> dict[str, Any]:
    """Return the seconds of planning, and figures of the plan."""
    model, inputs = step_of_llama()
    tracing: list[float] = []
    annotated = Captures.annotated

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        annotator = annotated(*args, **kwargs)
        annotator.graph()
        tracing.append(time.process_time() - start)
        return annotator

    start = time.process_time()
    with patch.object(Captures, "annotated", timed):
        try:
            plan = graphplan.plan(model, budgets, kwargs=inputs, train=True, optimizer=ADAMW)
        except InfeasibleError as error:
            return {"share": share, "feasible": False, "error": str(error)}
    total = time.process_time() - start
    operations = plan.graph.operations.values()
    return {
        "layers": LAYERS,
        "share": share,
        "feasible": True,
        "operations": len(operations),
        "seconds": total,
        "trace_seconds": sum(tracing),
        "search_seconds": total - sum(tracing),
        "step_seconds": plan.makespan,
        "lower_bound": plan.lower_bound,
        "recomputed": sum(bool(operation.repeats) for operation in operations),
        "offloaded": sum(operation.offloads for operation in operations),
        "streamed_bytes": plan.streamed_bytes,
        "peak_bytes": {str(key): nbytes for key, nbytes in plan.peak_bytes.items()},
    }


def plan_rows() -> list[dict[str, Any]]:
    """Return plans with room for everything, and with less."""
    roomy = plan_row({**dict.fromkeys(range(4), "80GiB"), "cpu": "2000GiB"}, 1.0)
    need = sum(nbytes for key, nbytes in roomy["peak_bytes"].items() if key != "cpu")
    rows = [roomy]
    for share in (0.75, 0.5):
        budgets: dict[Any, int | str] = {**dict.fromkeys(range(4), int(share * need / 4)), "cpu": "2000GiB"}
        rows.append(plan_row(budgets, share))
    return rows


def blocks_row() -> dict[str, Any]:
    """Return a step with half of the memory that it needs, and one in which every block is recomputed."""
    model, inputs = step_of_llama(8, vocabulary=32000, rows=4)
    planned = partial(graphplan.plan, model, kwargs=inputs, train=True, optimizer=ADAMW)
    roomy = planned({0: "1000GiB"})

    def every_block(search: Any) -> list[Trial]:
        savings, _ = search.every_block()
        return [Trial(member_with(search.member, savings), None)]

    with patch("graphplan.compiler.activation_choice._SavingsSearch.trials", every_block):
        blocks = planned({0: "1000GiB"})
    half = planned({0: roomy.peak_bytes[0] // 2, "cpu": "2000GiB"})
    rows = {"roomy": roomy, "every block again": blocks, "half of the memory": half}
    return {
        name: {
            "step_seconds": plan.makespan,
            "peak_bytes": plan.peak_bytes[0],
            "recompute_seconds": plan.recompute_seconds,
            "streamed_bytes": plan.streamed_bytes,
            "offloaded_bytes": sum(plan.offloaded_activations.values()),
        }
        for name, plan in rows.items()
    }


def overhead_row() -> dict[str, Any]:
    """Return the least seconds of a step, ours and eager's, without the optimizer and with it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_of(64, 128, 24, 4, 2, 256)()).train()
    ids = torch.randint(0, 256, (1, 16))
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    placed = graphplan.partition(
        copy.deepcopy(model), {"cpu": "8GiB"}, kwargs=inputs, train=True, optimizer=ADAMW
    )
    forms = {"eager": (model, ADAMW(model.parameters())), "graphplan": (placed, ADAMW(placed.parameters()))}

    def step(name: str, *, whole: bool) -> None:
        form, optimizer = forms[name]
        form(**inputs).loss.backward()
        if whole:
            optimizer.step()
        optimizer.zero_grad()

    seconds, whole = (
        in_turn({name: partial(step, name, whole=one) for name in forms}, ROUNDS) for one in (False, True)
    )
    return {
        "rounds": ROUNDS,
        **{f"{name}_ms": 1e3 * min(times) for name, times in seconds.items()},
        **{f"{name}_median_ms": 1e3 * statistics.median(times) for name, times in seconds.items()},
        "ratio": min(seconds["graphplan"]) / min(seconds["eager"]),
        "ratio_with_optimizer": min(whole["graphplan"]) / min(whole["eager"]),
    }


def main() -> None:
    parser_of(__doc__).parse_args()
    results = {"overhead": overhead_row(), "blocks": blocks_row(), "plans": plan_rows()}
    print(json.dumps(results, indent=1))
    print(f"wrote {write('training', results)}")


if __name__ == "__main__":
    main()
