"""Planning time of each compiler stage, by the depth of a model, and for well-known models.

python benchmarks/planning_time.py

Llamas of the 70B's width on the meta device are planned over eight devices, and well-known models in their
true sizes over two. Seconds are processor time, which excludes other load on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import transformers as hf
from models import LLAMA_70B, MODELS, Model, llama_8b
from report import parser_of, table, write

from graphplan.capture.model.model_copy import ModelCopy
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.devices.max_memory import read_max_memory

T = TypeVar("T")
LAYERS, MODEL_DEVICES = (2, 32, 80), 8


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


def model_row(name: str, recipe: Model) -> dict[str, Any]:
    """Return the seconds of planning a model, the faster of two runs."""
    runs = [stages(recipe, 2) for _ in range(2)]
    return {"model": name, **min(runs, key=lambda run: sum(run["seconds"].values()))}


def main() -> None:
    parser_of(__doc__).parse_args()
    stages(llama_70b(1), 2)  # imports and first-use caches
    depths = [{"layers": layers, **stages(llama_70b(layers), MODEL_DEVICES)} for layers in LAYERS]
    print(table(depths))
    models = [model_row(name, recipe) for name, recipe in FULL_SIZE.items()]
    print("\n" + table(models))
    planned = {"devices": MODEL_DEVICES, "rows": depths, "models": models}
    print(f"wrote {write('planning_time', planned)}")


if __name__ == "__main__":
    main()
