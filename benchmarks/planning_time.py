"""Planning time: of each compiler stage by the depth of a model, and of the search by operations.

python benchmarks/planning_time.py

Llamas of the 70B's width on the meta device are planned over eight devices, and well-known models in their
true sizes over two. For comparison, plain ``torch.export.export`` exports the same call with fixed sizes, and
with dynamic batch and length, as graphplan does. Language models are exported without a cache, whose class
torch.export does not support. The search alone runs on two kinds of graph: layers of a Llama on identical
cards, and random operations on cards of two speeds. For each kind and number of devices, seconds =
a * operations^p is fitted by least squares on logarithms. Seconds are processor time, which excludes other
load on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import transformers as hf
from instances import Instance, random_chain, stack
from models import LLAMA_70B, MODELS, Model, llama_8b
from report import parser_of, table, write
from torch.fx.experimental import _config as symbolic_config

from graphplan.capture.model.model_copy import ModelCopy
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.devices.max_memory import read_max_memory
from graphplan.passes.placement.driver import place

T = TypeVar("T")
LAYERS, MODEL_DEVICES = (2, 32, 80), 8
OPERATIONS, DEVICES = (500, 1000, 2000, 4000, 8000), (2, 4, 8, 16)
LAYER = 15  # operations in a layer of ``stack``
KINDS: dict[str, Callable[[int, int], Instance]] = {
    "stack": lambda operations, devices: stack(round(operations / LAYER), devices),
    "random": random_chain,
}


# -- stage by stage --------------------------------------------------------------------------------


def llama_70b(layers: int) -> Model:
    """Return a Llama of the 70B's width."""
    config = partial(LLAMA_70B, num_hidden_layers=layers)
    return Model(hf.LlamaForCausalLM, config, MODELS["llama-3-70b"].inputs)


_BERT = partial(
    hf.BertConfig, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
)
FULL_SIZE = {
    "llama-3-8b": Model(hf.LlamaForCausalLM, llama_8b(rope_theta=500000.0), MODELS["llama-3-70b"].inputs),
    "bert-large": Model(hf.BertForMaskedLM, _BERT, MODELS["llama-3-70b"].inputs),
    **{name: MODELS[name] for name in ("whisper-large", "segformer-b5", "resnet-152")},
}


def timed(seconds: dict[str, float], stage: str, work: Callable[[], T]) -> T:
    """Return the result of ``work``; store its processor seconds in ``seconds[stage]``."""
    start = time.process_time()
    result = work()
    seconds[stage] = time.process_time() - start
    return result


def stages(recipe: Model, devices: int) -> dict[str, Any]:
    """Return the size and gap of a model's plan, and the seconds of each stage of planning."""
    model, inputs = recipe.build(), recipe.example()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    topology = read_max_memory({i: int(size / devices * 1.15) + (6 << 30) for i in range(devices)})
    seconds: dict[str, float] = {}
    model_copy = timed(seconds, "copy", lambda: ModelCopy(model))
    compiler = Compiler(model_copy, topology, Options())
    call = model_copy.bind((), inputs)
    timed(seconds, "capture", lambda: compiler.captures.traced(call))
    timed(seconds, "annotate", lambda: compiler.problem_of(call))
    planned = timed(seconds, "place", lambda: compiler.plan(call))
    return {"operations": len(planned.plan.graph.operations), "gap": planned.plan.gap, "seconds": seconds}


def exported(recipe: Model) -> dict[str, float]:
    """Return the seconds of plain ``torch.export`` with fixed sizes, and with dynamic batch and length."""
    model, inputs = recipe.build(), recipe.example()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    auto = torch.export.Dim.AUTO
    varying = {
        name: dict.fromkeys([0] if tensor.is_floating_point() else [0, 1], auto)
        for name, tensor in inputs.items()
    }
    seconds: dict[str, float] = {}

    def export(shapes: Any) -> None:
        with torch.no_grad(), symbolic_config.patch(backed_size_oblivious=True):
            torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)

    timed(seconds, "export", lambda: export(None))
    timed(seconds, "export, sizes vary", lambda: export(varying))
    return seconds


def model_row(name: str, recipe: Model) -> dict[str, Any]:
    """Return the seconds of planning and of exporting a model, the faster of two runs of each."""
    runs = [(stages(recipe, 2), exported(recipe)) for _ in range(2)]
    best = min((run for run, _ in runs), key=lambda run: sum(run["seconds"].values()))
    plain = {way: min(seconds[way] for _, seconds in runs) for way in runs[0][1]}
    return {"model": name, **best, "plain": plain}


# -- the search alone ------------------------------------------------------------------------------


def search(kind: str, operations: int, devices: int) -> dict[str, Any]:
    """Place one instance; return its size, processor seconds, and proven gap as a share."""
    problem = KINDS[kind](operations, devices).problem
    start = time.process_time()
    result = place(problem)
    seconds, count = time.process_time() - start, len(problem.graph.operations)
    return {"kind": kind, "operations": count, "devices": devices, "seconds": seconds, "gap": result.gap}


def laws(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fit seconds = scale * operations^exponent for each kind and number of devices with several sizes."""
    fitted = []
    for kind, devices in dict.fromkeys((row["kind"], row["devices"]) for row in rows):
        group = [row for row in rows if (row["kind"], row["devices"]) == (kind, devices)]
        if len({row["operations"] for row in group}) > 1:
            sizes, seconds = np.log([(row["operations"], row["seconds"]) for row in group]).T
            exponent, constant = np.polyfit(sizes, seconds, 1)
            law = {"scale": float(np.exp(constant)), "exponent": float(exponent)}
            fitted.append({"kind": kind, "devices": devices, **law})
    return fitted


def main() -> None:
    parser_of(__doc__).parse_args()
    stages(llama_70b(1), 2)  # imports and first-use caches
    depths = [{"layers": layers, **stages(llama_70b(layers), MODEL_DEVICES)} for layers in LAYERS]
    print(table(depths))
    models = [model_row(name, recipe) for name, recipe in FULL_SIZE.items()]
    print("\n" + table(models))
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        search(kind, OPERATIONS[0], DEVICES[0])  # first-use caches
        rows += [search(kind, size, cards) for size in OPERATIONS for cards in DEVICES]
    searches = {"searches": rows, "laws": laws(rows)}
    for found in searches.values():
        print("\n" + table(found))
    planned = {"devices": MODEL_DEVICES, "rows": depths, "models": models}
    print(f"wrote {write('planning_time', {**planned, **searches})}")


if __name__ == "__main__":
    main()
