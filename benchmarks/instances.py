"""The instances of the placement benchmark: graphs with devices to place them on.

Cards are named by speed: A has 2.5 times the FLOP/s of B and five times those of C. Links have 25 GB/s and a
latency of 15 microseconds. Everything is torch-free; inputs and outputs of the model are in CPU memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "problems"))  # tests build these graphs too

from networks import clip, llama, moe, random_layers, segformer, t5, towers, unet

from graphplan.devices.speeds import Speed
from graphplan.devices.topology import CPU, DeviceSpec, Link, Topology
from graphplan.ir.graph import Graph
from graphplan.passes.placement.problem import Problem

GIB = 1 << 30
_OVERHEAD = 4e-6  # one kernel launch
_CPU_OVERHEAD = 20e-6  # the value of graphplan.devices.max_memory for the CPU


A = Speed(300e12, 2000e9)
B = Speed(120e12, 900e9)
C = Speed(60e12, 450e9)
TOP = Speed(600e12, 3300e9)
SLOW = Speed(10e12, 300e9)
MIDDLE = Speed(40e12, 900e9)
HOST = Speed(1.5e12, 60e9)


@dataclass(frozen=True, slots=True)
class Card:
    """An accelerator's speed, and its memory in GiB."""

    speed: Speed
    gib: float


@dataclass(frozen=True, slots=True)
class Instance:
    """A graph, and the devices to place it on; ``name`` is its key in its set."""

    name: str
    graph: Graph
    topology: Topology

    @property
    def problem(self) -> Problem:
        """The placement problem for a solver."""
        return Problem(self.graph, self.topology, CPU)


def devices(cards: Sequence[Card], cpu_gib: float = 0, cpu: Speed = HOST) -> Topology:
    """Return a topology of cards numbered from 0, and the CPU if it has memory."""
    specs = [
        DeviceSpec(i, f"cuda:{i}", int(card.gib * GIB), card.speed.flops, card.speed.bandwidth, _OVERHEAD)
        for i, card in enumerate(cards)
    ]
    if cpu_gib:
        specs.append(DeviceSpec(CPU, CPU, int(cpu_gib * GIB), cpu.flops, cpu.bandwidth, _CPU_OVERHEAD))
    return Topology(tuple(specs), default_link=Link(25e9, 15e-6))


# -- the first set ---------------------------------------------------------------------------------


def _llama_8b(layers: int = 32) -> Graph:
    return llama(layers, 4096, 14336, 1024, 128256, 512)


# DeepSeek-MoE 16B: 28 layers of 64 small experts and a shared one, the first layer dense
_deepseek = partial(moe, 28, 2048, 1408, 64, 6, 102400, 256, tied=False, shared=2816, dense=10944)
_WIDTHS = [512, 768, 1024, 1280, 640, 1536, 896, 2048, 768, 1152]  # of ten branches
_DEPTHS = [12, 8, 10, 6, 14, 5, 9, 4, 16, 7]


def _cards(*cards: tuple[Speed, float], cpu_gib: float = 0) -> Callable[[float], Topology]:
    return lambda _: devices([Card(speed, gib) for speed, gib in cards], cpu_gib)


# name -> functions that build the graph, and its devices from the GiB of its weights
_FIRST_SET: dict[str, tuple[Callable[[], Graph], Callable[[float], Topology]]] = {
    "llama-8b-two": (_llama_8b, _cards((A, 10), (B, 8))),
    "llama-8b-four": (_llama_8b, _cards((A, 5), (B, 5), (B, 4), (C, 3))),
    "llama-70b": (partial(llama, 80, 8192, 28672, 1024, 128256, 512), _cards(*[(A, 24)] * 4, *[(B, 16)] * 4)),
    "llama-405b": (
        partial(llama, 126, 16384, 53248, 1024, 128256, 512, tied=False),
        _cards(*[(TOP, 110)] * 8),
    ),
    "t5": (partial(t5, 24, 1024, 2816, 32128, 512, 64), _cards((A, 0.5), (B, 0.5), (B, 0.4), (C, 0.4))),
    "unet": (unet, _cards((A, 0.9), (B, 0.8), (C, 0.8))),
    "moe-four": (
        partial(moe, 16, 2048, 1408, 16, 4, 64000, 256),
        _cards((A, 2.0), (B, 1.5), (B, 1.5), (C, 1.2)),
    ),
    "moe-cpu": (partial(moe, 16, 2048, 1408, 16, 4, 64000, 1), _cards((A, 2.5), cpu_gib=64)),
    "clip": (partial(clip, (24, 1024, 257), (12, 768, 77)), _cards((A, 0.40), (B, 0.25), (C, 0.25))),
    "segformer-cpu": (
        segformer,
        lambda gib: devices([Card(SLOW, 0.9 * gib)], cpu_gib=64, cpu=Speed(0.5e12, 30e9)),
    ),
    "segformer-two": (segformer, lambda gib: devices([Card(MIDDLE, 0.14 * gib), Card(SLOW, 0.92 * gib)])),
    "llama-8b-streamed": (_llama_8b, _cards((A, 6), (B, 4), cpu_gib=64)),
    "deepseek-moe": (_deepseek, _cards(*[(A, 9)] * 4)),
    "ten-branches": (partial(towers, _WIDTHS, _DEPTHS, 256), _cards((A, 0.6), (B, 0.4), (B, 0.3), (C, 0.3))),
}


def _first(name: str) -> Instance:
    graph_of, devices_of = _FIRST_SET[name]
    graph = graph_of()
    return Instance(name, graph, devices_of(graph.weight_bytes / GIB))


INSTANCES: dict[str, Callable[[], Instance]] = {name: partial(_first, name) for name in _FIRST_SET}


# -- of any size -----------------------------------------------------------------------------------


def random_chain(operations: int, cards: int, seed: int = 0) -> Instance:
    """Return random operations for alternately fast and slow cards, with room as in :func:`_sized`."""
    graph = random_layers(operations, seed)
    return _sized(f"random-{operations}x{cards}", graph, cards, [A, B])


def stack(layers: int, cards: int) -> Instance:
    """Return layers of Llama 8B's width (15 operations each) for identical cards."""
    return _sized(f"stack-{layers}x{cards}", _llama_8b(layers), cards, [A])


def _sized(name: str, graph: Graph, count: int, speeds: Sequence[Speed]) -> Instance:
    """Return the graph with ``count`` cards: room for 1.2 times the weights, and for live values."""
    largest = max(weight.nbytes for weight in graph.weights.values())
    live = sum(sorted((value.nbytes for value in graph.values.values()), reverse=True)[:20])
    gib = (1.2 * graph.weight_bytes / count + largest + live) / GIB
    cards = [Card(speeds[i % len(speeds)], gib) for i in range(count)]
    return Instance(name, graph, devices(cards))
