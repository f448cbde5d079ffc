"""Plans that the tests of pages and pictures share."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from builders import KIB
from torch import nn

import graphplan
from graphplan import Graph, Operation, Plan, Value, Weight
from graphplan.devices.max_memory import MaxMemory, read_max_memory
from graphplan.devices.topology import DeviceKey
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.problem import Problem

HOSTILE = "<script>document.title='taken'</script><!--"


def by_hand(graph: Graph, memory: MaxMemory, devices: dict[str, DeviceKey]) -> Plan:
    """A plan of a graph whose operations have been placed; weights fill 7 tenths of each accelerator."""
    topology = read_max_memory(memory)
    problem = Problem(graph, topology, "cpu")
    homes: dict[str, DeviceKey] = dict.fromkeys(graph.weights, "cpu")
    room = {spec.key: 0.7 * spec.memory for spec in topology.devices}
    for name, weight in graph.weights.items():
        reader = next((devices[user] for user in graph.consumers.get(name, ())), "cpu")
        if weight.nbytes <= room[reader]:
            homes[name], room[reader] = reader, room[reader] - weight.nbytes
    found = evaluate(problem, Assignment(devices, homes))
    assert found.feasible, found.excess
    return Plan(graph, topology, found.schedule, found.seconds, found.seconds, "placed by hand", "hand")


@cache
def large_plan(count: int = 10_000) -> Plan:
    """So many operations in layers of 20, over four devices in 40 stages."""
    operations, values, weights = [], [Value("x", KIB, KIB)], []
    placed: dict[str, DeviceKey] = {}
    for i in range(count):
        layer, step = divmod(i, 20)
        reads = [values[-1].name] + ([f"v{i - 20}"] if i >= 20 and step == 19 else [])
        if step % 4 == 0:
            weights.append(Weight(f"layers.{layer}.w{step}", 4 * KIB, (f"layers.{layer}.w{step}",)))
            reads.append(weights[-1].name)
        path = f"model.layers.{layer}.{'attn' if step < 12 else 'mlp'}"
        values.append(Value(f"v{i}", KIB, KIB, None, True, (256,), "float32"))
        operations.append(
            Operation(
                f"v{i}", "linear", tuple(reads), (f"v{i}",), (), 10**6, KIB, {}, path, source="model.py:7"
            )
        )
        placed[f"v{i}"] = (layer * 40 // (count // 20)) % 4
    graph = Graph(operations, values, weights, ["x"], [f"v{count - 1}"])
    return by_hand(graph, dict.fromkeys(range(4), "32MiB") | {"cpu": "1GiB"}, placed)


@cache
def hostile_plan() -> Plan:
    """Names of a model that a page must escape: elements, scripts and comments."""
    values = [Value("x", KIB, KIB), Value("a", KIB, KIB), Value("b", KIB, KIB)]
    weight = Weight(f"{HOSTILE}.weight", KIB, (f"{HOSTILE}.weight",))
    operations = [
        Operation("a", HOSTILE, ("x", weight.name), ("a",), (), 10**6, KIB, {}, HOSTILE, source=HOSTILE),
        Operation("b", "</script>", ("a",), ("b",), (), 10**6, KIB, {}, "&lt;b&gt;"),
    ]
    graph = Graph(operations, values, [weight], ["x"], ["b"])
    return by_hand(graph, {0: "1MiB", 1: "1MiB", "cpu": "1MiB"}, {"a": 0, "b": 1})


def llama(layers: int = 3) -> tuple[nn.Module, dict[str, Any]]:
    """A small language model and its inputs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval(), {"input_ids": torch.ones(2, 16, dtype=torch.long)}


def budgets_of(model: nn.Module, share: float) -> MaxMemory:
    """Two accelerators with a share each of the bytes of a model, and much of the CPU."""
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return {0: int(nbytes * share), 1: int(nbytes * share), "cpu": "1GiB"}


@cache
def llama_plan() -> Plan:
    """A language model cut in two, on accelerators that hold three fifths of it: the rest is streamed."""
    model, inputs = llama()
    free = graphplan.plan(model.to("meta"), {0: "1GiB", "cpu": "1GiB"}, kwargs=inputs)
    names = list(free.graph.operations)
    second = next(n for n in names if free.graph.operations[n].module_path.startswith("model.layers.1.mlp"))
    devices = {name: int(names.index(name) >= names.index(second)) for name in names}
    return replace(by_hand(free.graph, budgets_of(model, 0.45), devices), method=free.method)


class _Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.GroupNorm(4, after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x))) + self.skip(x)


class UNet(nn.Module):
    """Branches that skip layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_Block(4, 16), _Block(16, 32), _Block(32, 64)])
        self.middle = _Block(64, 64)
        self.up = nn.ModuleList([_Block(128, 32), _Block(64, 16), _Block(32, 8)])
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, kept.pop()], 1))
        return self.head(x)


@cache
def unet_plan() -> Plan:
    """A branchy model over two accelerators that are balanced."""
    memory: MaxMemory = {0: "700KiB", 1: "700KiB", "cpu": "1GiB"}
    return graphplan.plan(UNet().eval(), memory, (torch.ones(1, 4, 32, 32),), balance=True)
