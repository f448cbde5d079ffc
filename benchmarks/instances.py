"""The instances of the placement benchmark: graphs with devices to place them on.

Cards have names for their speed: A is twice the B and five times the C in FLOP/s. Links carry
25 GB/s with 15 microseconds of latency. Everything is torch-free; inputs and outputs of the model
are in CPU memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from networks import clip, llama, moe, random_layers, segformer, t5, towers, unet
from planner_api import Problem

from graphplan.devices.topology import CPU, DeviceSpec, Link, Topology
from graphplan.ir.graph import Graph

GIB = 1 << 30
_OVERHEAD = 4e-6  # one kernel launch
_CPU_OVERHEAD = 20e-6  # what graphplan.devices.max_memory takes for the CPU


@dataclass(frozen=True, slots=True)
class Speed:
    """FLOP/s and bytes/s of a card."""

    flops: float
    bandwidth: float


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
        """What a solver is asked."""
        return Problem(self.graph, self.topology, CPU)


def devices(cards: Sequence[Card], cpu_gib: float = 0, cpu: Speed = HOST) -> Topology:
    """Cards numbered from 0, and the CPU where it has memory."""
    specs = [
        DeviceSpec(i, f"cuda:{i}", int(card.gib * GIB), card.speed.flops, card.speed.bandwidth, _OVERHEAD)
        for i, card in enumerate(cards)
    ]
    if cpu_gib:
        specs.append(DeviceSpec(CPU, CPU, int(cpu_gib * GIB), cpu.flops, cpu.bandwidth, _CPU_OVERHEAD))
    return Topology(tuple(specs), default_link=Link(25e9, 15e-6))


def _llama_8b() -> Graph:
    return llama(32, 4096, 14336, 1024, 128256, 512)


def _llama_8b_two() -> Instance:
    return Instance("llama-8b-two", _llama_8b(), devices([Card(A, 10), Card(B, 8)]))


def _llama_8b_four() -> Instance:
    cards = [Card(A, 5), Card(B, 5), Card(B, 4), Card(C, 3)]
    return Instance("llama-8b-four", _llama_8b(), devices(cards))


def _llama_8b_streamed() -> Instance:
    topology = devices([Card(A, 6), Card(B, 4)], cpu_gib=64)
    return Instance("llama-8b-streamed", _llama_8b(), topology)


def _llama_70b() -> Instance:
    cards = [Card(A, 24)] * 4 + [Card(B, 16)] * 4
    return Instance("llama-70b", llama(80, 8192, 28672, 1024, 128256, 512), devices(cards))


def _llama_405b() -> Instance:
    graph = llama(126, 16384, 53248, 1024, 128256, 512, tied=False)
    return Instance("llama-405b", graph, devices([Card(TOP, 110)] * 8))


def _t5() -> Instance:
    cards = [Card(A, 0.5), Card(B, 0.5), Card(B, 0.4), Card(C, 0.4)]
    return Instance("t5", t5(24, 1024, 2816, 32128, 512, 64), devices(cards))


def _unet() -> Instance:
    cards = [Card(A, 0.9), Card(B, 0.8), Card(C, 0.8)]
    return Instance("unet", unet(), devices(cards))


def _moe_four() -> Instance:
    cards = [Card(A, 2.0), Card(B, 1.5), Card(B, 1.5), Card(C, 1.2)]
    return Instance("moe-four", moe(16, 2048, 1408, 16, 4, 64000, 256), devices(cards))


def _moe_cpu() -> Instance:
    graph = moe(16, 2048, 1408, 16, 4, 64000, 1)
    return Instance("moe-cpu", graph, devices([Card(A, 2.5)], cpu_gib=64))


def _clip() -> Instance:
    cards = [Card(A, 0.40), Card(B, 0.25), Card(C, 0.25)]
    return Instance("clip", clip((24, 1024, 257), (12, 768, 77)), devices(cards))


def _segformer_cpu() -> Instance:
    graph = segformer()
    share = 0.9 * graph.weight_bytes / GIB
    topology = devices([Card(SLOW, share)], cpu_gib=64, cpu=Speed(0.5e12, 30e9))
    return Instance("segformer-cpu", graph, topology)


def _segformer_two() -> Instance:
    graph = segformer()
    size = graph.weight_bytes / GIB
    cards = [Card(MIDDLE, 0.14 * size), Card(SLOW, 0.92 * size)]
    return Instance("segformer-two", graph, devices(cards))


def _deepseek() -> Instance:
    """DeepSeek-MoE 16B: 28 layers of 64 small experts and a shared one, the first layer dense."""
    graph = moe(28, 2048, 1408, 64, 6, 102400, 256, tied=False, shared=2816, dense=10944)
    return Instance("deepseek-moe", graph, devices([Card(A, 9)] * 4))


def _ten_branches() -> Instance:
    widths = [512, 768, 1024, 1280, 640, 1536, 896, 2048, 768, 1152]
    depths = [12, 8, 10, 6, 14, 5, 9, 4, 16, 7]
    cards = [Card(A, 0.6), Card(B, 0.4), Card(B, 0.3), Card(C, 0.3)]
    return Instance("ten-branches", towers(widths, depths, 256), devices(cards))


INSTANCES: dict[str, Callable[[], Instance]] = {
    "llama-8b-two": _llama_8b_two,
    "llama-8b-four": _llama_8b_four,
    "llama-70b": _llama_70b,
    "llama-405b": _llama_405b,
    "t5": _t5,
    "unet": _unet,
    "moe-four": _moe_four,
    "moe-cpu": _moe_cpu,
    "clip": _clip,
    "segformer-cpu": _segformer_cpu,
    "segformer-two": _segformer_two,
    "llama-8b-streamed": _llama_8b_streamed,
    "deepseek-moe": _deepseek,
    "ten-branches": _ten_branches,
}


def random_chain(operations: int, cards: int, seed: int = 0) -> Instance:
    """Random operations on alternately fast and slow cards with a fifth more room than the weights take."""
    graph = random_layers(operations, seed)
    return _sized(f"random-{operations}x{cards}", graph, cards, [A, B])


def stack(layers: int, cards: int) -> Instance:
    """Layers of a Llama of the 8B's width (15 operations each) on like cards."""
    graph = llama(layers, 4096, 14336, 1024, 128256, 512)
    return _sized(f"stack-{layers}x{cards}", graph, cards, [A])


def _sized(name: str, graph: Graph, count: int, speeds: Sequence[Speed]) -> Instance:
    """``count`` cards that hold the graph with a fifth to spare, and what is live at once."""
    largest = max(weight.nbytes for weight in graph.weights.values())
    live = sum(sorted((value.nbytes for value in graph.values.values()), reverse=True)[:20])
    gib = (1.2 * graph.weight_bytes / count + largest + live) / GIB
    cards = [Card(speeds[i % len(speeds)], gib) for i in range(count)]
    return Instance(name, graph, devices(cards))
