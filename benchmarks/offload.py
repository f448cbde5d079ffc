"""A model that does not fit its GPU: seconds and peak bytes with graphplan and with accelerate's hooks.

python benchmarks/offload.py

A Llama of the shape of Llama-3-8B with random weights in bfloat16, on budgets of GPU 0 that are shares of its
bytes plus 2 GiB; the rest resides on the CPU. Forward passes of one prompt, and ``generate()`` from that
prompt at batch 1: eager with all weights on the GPU, placed by graphplan, and under accelerate's
``device_map``, whose budget is without the 2 GiB, since it counts only weights. Speeds are measured first.
``copies`` is the time of the bytes streamed in a pass at the link's measured bandwidth: a lower bound of the
pass. Seconds are wall time; peaks are those of PyTorch's allocator, planning and warm-up included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from models import llama_8b, llama_by_gpu
from report import parser_of, quickest, require_cuda, set_up, write
from torch import nn

import graphplan

GPU = torch.device("cuda:0")
LAYERS, PROMPT, TOKENS, ROUNDS = 16, 512, 8, 3
SHARES = (0.5, 0.3)
_ROOM = 2 << 30  # bytes of the budget for activations, cache and workspaces


@dataclass(frozen=True, slots=True)
class Row:
    """One form of the model on one budget. Bytes and seconds.

    Attributes:
        share: the budget, as a share of the weights' bytes; ``_ROOM`` is added.
        peak: measured peak over all calls.
        planned: the plan's peak.
        forward: the fastest forward pass.
        generate: the third ``generate()``.
        estimated: the plan's estimate of the forward pass.
        copies: lower bound of the time of its copies.
        setup: placing the model, planning included.
        apart: the largest difference of a logit from eager's, as a share of the largest logit.
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


def llama() -> nn.Module:
    return llama_by_gpu(llama_8b(LAYERS, eos_token_id=None, pad_token_id=0)).eval()


class Bench:
    """The workload, and the measurement of each form of it."""

    def __init__(self) -> None:
        self.ids = torch.randint(0, 128256, (1, PROMPT), device="cuda:0")
        self.size = sum(t.nbytes for model in [llama()] for t in (*model.parameters(), *model.buffers()))
        self.expected: torch.Tensor | None = None

    def measured(self, form: str, share: float, make: Callable[[Any], Any]) -> Row:
        """Build one form of the model and measure it."""
        model, setup = set_up(partial(make, llama()), GPU)
        ids = self.ids
        logits = model(input_ids=ids, use_cache=False).logits.cpu().float()
        if self.expected is None:
            self.expected = logits
        apart = float((logits - self.expected).abs().max() / self.expected.abs().max())
        forward = quickest(lambda: model(input_ids=ids, use_cache=False), GPU, ROUNDS)
        generation = {"max_new_tokens": TOKENS, "do_sample": False}
        generate = quickest(lambda: model.generate(ids, **generation), GPU, 1)
        peak = torch.cuda.max_memory_allocated(0)
        plan = getattr(model, "plan", None)
        figures: dict[str, Any] = {}
        if isinstance(plan, graphplan.Plan):
            link = plan.topology.link("cpu", 0)
            figures = {
                "planned": max(p.peak_bytes[0] for p in model.plans),
                "estimated": plan.makespan,
                "copies": plan.streamed_bytes / link.bandwidth,
            }
        row = Row(form, share, self.budget(share), peak, forward, generate, setup, apart=apart, **figures)
        print(row, flush=True)
        return row

    def budget(self, share: float) -> int:
        return int(share * self.size) + _ROOM

    def rows(self) -> Iterator[Row]:
        yield self.measured("eager, all on the GPU", 1.0, lambda model: model.to("cuda:0"))
        measured = graphplan.measure_devices({0: self.budget(1.0), "cpu": "64GiB"}, dtype=torch.bfloat16)
        print(measured, flush=True)
        for share in SHARES:
            yield self.measured("graphplan", share, partial(self.ours, share, measured))
            yield self.measured("accelerate", share, partial(self.theirs, share))

    def ours(self, share: float, speeds: graphplan.Measurements, model: Any) -> Any:
        budgets = {0: self.budget(share), "cpu": 2 * self.size}
        inputs = {"input_ids": self.ids, "use_cache": False}
        return graphplan.partition(model, budgets, kwargs=inputs, max_length=PROMPT + TOKENS, devices=speeds)

    def theirs(self, share: float, model: Any) -> Any:
        room = {0: self.budget(share) - _ROOM, "cpu": 2 * self.size}
        places = infer_auto_device_map(model, room, no_split_module_classes=model._no_split_modules)
        return dispatch_model(model, places)


@torch.no_grad()
def main() -> None:
    parser_of(__doc__).parse_args()
    require_cuda()
    workload = {"layers": LAYERS, "shares": SHARES, "prompt": PROMPT, "tokens": TOKENS, "rounds": ROUNDS}
    rows = []
    for row in Bench().rows():
        rows.append(asdict(row))
        write("offload", {"workload": workload, "rows": rows})


if __name__ == "__main__":
    main()
