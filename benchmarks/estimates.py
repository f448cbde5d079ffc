"""Estimated and measured seconds of a forward pass on one device, for ten models of different kinds.

python benchmarks/estimates.py [--device cpu]

The device is measured first, in the models' dtype float32. Each model is planned with these speeds and run;
the fastest forward pass counts. It is planned again with the efficiencies of its operation types from a
profile. On the CPU one thread is used, and timed by its own clock, as other processes may wait for the
processor.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers as hf
from models import llama_of
from report import parser_of, quickest, table, write
from torch import nn

import graphplan

ROUNDS = 12


def models() -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Yield name, model and inputs of each model."""
    image, ids = torch.randn(1, 3, 224, 224), torch.randint(0, 1000, (1, 128))
    llama = hf.LlamaForCausalLM(llama_of(512, 1408, 8, 32, 32, 8000)())
    yield "BERT", hf.BertModel(hf.BertConfig(num_hidden_layers=6)), {"input_ids": ids}
    yield "ResNet-50", hf.ResNetModel(hf.ResNetConfig()), {"pixel_values": image}
    yield "GPT-2, one token", hf.GPT2Model(hf.GPT2Config()), {"input_ids": ids[:, :1], "use_cache": False}
    yield "ConvNeXt", hf.ConvNextModel(hf.ConvNextConfig()), {"pixel_values": image}
    segformer = hf.SegformerForSemanticSegmentation(hf.SegformerConfig())
    yield "Segformer", segformer, {"pixel_values": torch.randn(1, 3, 256, 256)}
    yield "ViT", hf.ViTModel(hf.ViTConfig(num_hidden_layers=6)), {"pixel_values": image}
    yield "Llama", llama, {"input_ids": ids, "use_cache": False}
    yield "Swin", hf.SwinModel(hf.SwinConfig()), {"pixel_values": image}
    yield "MobileNetV2", hf.MobileNetV2Model(hf.MobileNetV2Config()), {"pixel_values": image}
    tiny = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100)))
    yield "100 x Linear(16)", tiny, {"input": torch.randn(1, 16)}


@torch.no_grad()
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or the index of a GPU")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    key = arguments.device if arguments.device == "cpu" else int(arguments.device)
    measured = graphplan.measure_devices({key: "8GiB"}, dtype=torch.float32)
    rows = []
    for name, model, inputs in models():
        budgets, options = {key: "8GiB"}, {"kwargs": inputs, "return_outputs": False}
        placed = graphplan.partition(model.eval(), budgets, devices=measured, **options)
        device = placed.plan.devices[key]
        clock = time.thread_time if device.type == "cpu" else time.perf_counter
        seconds = quickest(partial(placed, **inputs), device, ROUNDS, clock)
        profiled = placed.profile(**inputs).measurements
        replanned = graphplan.plan(model, budgets, devices=profiled, **options)
        row = {"model": name, "seconds": seconds, "estimated / measured": placed.plan.makespan / seconds}
        rows.append({**row, "by its profile / measured": replanned.makespan / seconds})
    print(table(rows))
    name = "estimates" if key == "cpu" else "gpu_estimates"
    print(f"wrote {write(name, {'device': arguments.device, 'measured': str(measured), 'rows': rows})}")


if __name__ == "__main__":
    main()
