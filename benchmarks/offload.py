"""A model that does not fit its GPU: seconds and peak bytes of calls, ours beside accelerate's hooks.

python benchmarks/offload.py [--layers 16] [--shares 0.5] [--prompt 512] [--tokens 16] [--rounds 3]

A Llama of the shape of Llama-3-8B with random weights in bfloat16, on budgets of GPU 0 that are shares of its
bytes; the rest lies on the CPU. Forward passes of one prompt, and ``generate()`` from that prompt at batch 1:
eager where all is on the GPU, placed by us, and under accelerate's ``device_map`` with the same
``max_memory``. Speeds are measured first. ``copies`` are the bytes that we stream in a pass, divided by the
link's measured bandwidth: no pass that streams them can be quicker. Seconds are wall time, peaks what
PyTorch's allocator counts, planning and warm-up included.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from models import llama_of
from report import finished, in_turn, parser_of, table, write
from torch import nn
from transformers import LlamaForCausalLM

import graphplan

_ROOM = 2 << 30  # bytes of the budget beside the weights: activations, cache and workspaces


@dataclass(frozen=True, slots=True)
class Row:
    """One form of the model on one budget. Bytes and seconds.

    Attributes:
        share: the budget's, of the weights' bytes; ``_ROOM`` comes on top.
        peak: measured over all calls.
        planned: ours.
        forward: the quickest forward pass.
        generate: the quickest ``generate()``.
        estimated: our plan's forward pass.
        copies: the least seconds of its copies.
        setup: placing the model, planning included.
    """

    form: str
    share: float
    budget: int
    peak: int
    forward: float
    generate: float
    setup: float
    planned: int | None = None
    estimated: float | None = None
    copies: float | None = None
    apart: float = 0.0


def llama(layers: int) -> nn.Module:
    """On the CPU; made on the GPU, where that takes a second."""
    config = llama_of(4096, 14336, layers, 32, 8, 128256, eos_token_id=None, pad_token_id=0)()
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval().cpu()


def quickest(call: Callable[[], Any], rounds: int) -> float:
    ended = partial(finished, call, torch.device("cuda:0"))
    return min(in_turn({"": ended}, rounds, time.perf_counter)[""])


class Bench:
    """The workload, and its forms."""

    def __init__(self, asked: Any) -> None:
        self.asked = asked
        self.model = llama(asked.layers)
        self.ids = torch.randint(0, 128256, (1, asked.prompt), device="cuda:0")
        self.size = sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))
        self.expected: torch.Tensor | None = None

    def measured(self, form: str, share: float, make: Callable[[], Any]) -> Row:
        """One form, made and called."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(0)
        start = time.perf_counter()
        model = make()
        torch.cuda.synchronize(0)
        setup = time.perf_counter() - start
        ids = self.ids
        logits = model(input_ids=ids, use_cache=False).logits.cpu().float()
        if self.expected is None:
            self.expected = logits
        apart = float((logits - self.expected).abs().max() / self.expected.abs().max())
        forward = quickest(lambda: model(input_ids=ids, use_cache=False), self.asked.rounds)
        words = {"max_new_tokens": self.asked.tokens, "do_sample": False}
        generate = quickest(lambda: model.generate(ids, **words), 1)
        peak = torch.cuda.max_memory_allocated(0)
        plan = getattr(model, "plan", None)
        more: dict[str, Any] = {}
        if isinstance(plan, graphplan.Plan):
            link = plan.topology.link("cpu", 0)
            more = {
                "planned": max(p.peak_bytes[0] for p in model.plans),
                "estimated": plan.makespan,
                "copies": plan.streamed_bytes / link.bandwidth,
            }
        row = Row(form, share, self.budget(share), peak, forward, generate, setup, apart=apart, **more)
        print(row, flush=True)
        return row

    def budget(self, share: float) -> int:
        return int(share * self.size) + _ROOM

    def rows(self) -> Iterator[Row]:
        yield self.measured("eager, all on the GPU", 1.0, lambda: self.model.to("cuda:0"))
        self.model.to("cpu")
        limit = self.asked.prompt + self.asked.tokens
        measured = graphplan.measure_devices({0: self.budget(1.0), "cpu": "64GiB"}, dtype=torch.bfloat16)
        print(measured, flush=True)
        for place, share in enumerate(self.asked.shares):
            if place:
                self.model = llama(self.asked.layers)  # accelerate has left meta tensors
            budgets = {0: self.budget(share), "cpu": 2 * self.size}
            inputs = {"input_ids": self.ids, "use_cache": False}

            def ours(budgets: Any = budgets, inputs: Any = inputs, **options: Any) -> Any:
                return graphplan.partition(self.model, budgets, kwargs=inputs, max_length=limit, **options)

            yield self.measured("graphplan", share, lambda ours=ours: ours(devices=measured))

            def theirs(budgets: Any = budgets) -> Any:
                room = {0: budgets[0] - _ROOM, "cpu": budgets["cpu"]}
                places = infer_auto_device_map(
                    self.model, room, no_split_module_classes=self.model._no_split_modules
                )
                return dispatch_model(self.model, places)

            yield self.measured("accelerate", share, theirs)


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    rows = []
    for row in Bench(asked).rows():
        rows.append(asdict(row))
        write("offload", {"workload": dict(vars(asked)), "rows": rows})
    names = [name for name in rows[0] if name not in ("budget", "peak", "planned")]
    sizes = ("budget", "peak", "planned")
    cells = [
        [row[name] if isinstance(row[name], str) else f"{row[name] or 0:.4f}" for name in names]
        + [f"{(row[name] or 0) / (1 << 30):.2f}" for name in sizes]
        for row in rows
    ]
    print(table([*names, *(f"{name} GiB" for name in sizes)], cells))


if __name__ == "__main__":
    main()
