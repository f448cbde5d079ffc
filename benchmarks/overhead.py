"""Overhead of a forward pass besides its kernels: tiny models whose time is dispatch, one thread.

python benchmarks/overhead.py [--device cpu]

A forward pass of a chain of linear layers and of a toy Llama, and ``generate()`` of that Llama at batch 1:
eager, placed by graphplan, and under accelerate's hooks. Every form is called once in each round, in turn,
and timed in processor time of this process, which other load on the machine hardly affects; with
``--device 0``, in wall time until the GPU is done. Ratios are those of the least times, and of the medians.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import cpu_offload, dispatch_model
from models import llama_of
from report import finished, in_turn, parser_of, table, write
from torch import nn
from torch.utils import _pytree as pytree
from transformers import LlamaForCausalLM

import graphplan

EAGER, OURS = "eager", "graphplan"
ROUNDS, GENERATIONS = 200, 5  # of forward passes, and of generate()


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the call that is measured.

    Attributes:
        name: name of the workload.
        model: the model in eval mode.
        inputs: named arguments of the call.
        parts: paths of the modules in accelerate's device map.
        tokens: number of tokens that ``generate`` adds; 0: a forward pass is measured.
    """

    name: str
    model: nn.Module
    inputs: dict[str, Any]
    parts: tuple[str, ...]
    tokens: int = 0

    def call_of(self, model: Any) -> Callable[[], Any]:
        """Return the call with a form of the model."""
        if self.tokens:
            return lambda: model.generate(**self.inputs, max_new_tokens=self.tokens, do_sample=False)
        return lambda: model(**self.inputs)


def linears(count: int = 300, width: int = 16) -> Workload:
    """Return a chain of linear layers."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).eval()
    parts = tuple(str(i) for i in range(count))
    return Workload(f"{count} x Linear({width})", model, {"input": torch.randn(1, width)}, parts)


def llama(layers: int = 24, hidden: int = 64, tokens: int = 0) -> Workload:
    """Return a toy Llama that returns its cache, as it does by default."""
    config = llama_of(hidden, 2 * hidden, layers, 4, 2, 256, eos_token_id=None, pad_token_id=0)()
    blocks = (f"model.layers.{i}" for i in range(layers))
    parts = ("model.embed_tokens", *blocks, "model.norm", "model.rotary_emb", "lm_head")
    name = f"Llama, {layers} layers of {hidden}" + (f", {tokens} tokens generated" if tokens else "")
    inputs = {"input_ids": torch.randint(0, 256, (1, 16 if tokens else 8))}
    return Workload(name, LlamaForCausalLM(config).eval(), inputs, parts, tokens)


def forms(workload: Workload, key: str | int) -> dict[str, Callable[[], Any]]:
    """Return name of each form -> its call: eager, placed by graphplan, and under accelerate's hooks."""
    device = torch.device("cpu" if key == "cpu" else f"cuda:{key}")
    inputs = {name: tensor.to(device) for name, tensor in workload.inputs.items()}
    workload = replace(workload, model=workload.model.to(device), inputs=inputs)
    model = workload.model
    options = {"max_length": inputs["input_ids"].shape[1] + workload.tokens} if workload.tokens else {}
    places = dict.fromkeys(workload.parts, key)
    models = {
        EAGER: model,
        OURS: graphplan.partition(model, {key: "8GiB"}, kwargs=inputs, **options),
        "accelerate dispatch_model": dispatch_model(
            copy.deepcopy(model), places, main_device=key, force_hooks=True
        ),
        "accelerate cpu_offload": cpu_offload(copy.deepcopy(model), execution_device=device),
    }
    return {name: partial(finished, workload.call_of(each), device) for name, each in models.items()}


def require_equal(calls: Mapping[str, Callable[[], Any]]) -> None:
    """Raise AssertionError if a form returns another result than eager."""
    with torch.no_grad():
        expected = pytree.tree_leaves(calls[EAGER]())
        for name, call in calls.items():
            for a, b in zip(expected, pytree.tree_leaves(call()), strict=True):
                if isinstance(a, torch.Tensor):
                    torch.testing.assert_close(a, b, msg=f"{name} differs from eager")


def measure(workload: Workload, rounds: int, key: str | int = "cpu") -> list[dict[str, Any]]:
    """Return a row for each form."""
    torch.set_num_threads(1)
    calls = forms(workload, key)
    require_equal(calls)
    with torch.no_grad():
        seconds = in_turn(calls, rounds, time.process_time if key == "cpu" else time.perf_counter)
    least = {name: min(values) for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        {
            "workload": workload.name,
            "form": name,
            "best_ms": 1e3 * least[name],
            "median_ms": 1e3 * medians[name],
            "ratio_of_best": least[name] / least[EAGER],
            "ratio_of_median": medians[name] / medians[EAGER],
        }
        for name in calls
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or the index of a GPU")
    arguments = parser.parse_args()
    key = arguments.device if arguments.device == "cpu" else int(arguments.device)
    torch.manual_seed(0)
    rows = list[dict[str, Any]]()
    for workload in (linears(), llama(), llama(tokens=128)):
        rows += measure(workload, GENERATIONS if workload.tokens else ROUNDS, key)
    print(table(rows))
    clock = "processor" if key == "cpu" else "wall"
    method = f"{clock} time of one process and one thread, forms in turn, garbage collection off"
    rounds = {"rounds": ROUNDS, "generations": GENERATIONS}
    name = "overhead" if key == "cpu" else "gpu_overhead"
    print(f"wrote {write(name, {**rounds, 'clock': method, 'rows': rows})}")


if __name__ == "__main__":
    main()
