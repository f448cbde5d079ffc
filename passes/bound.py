"""A lower bound on the seconds of any placement, from the graph and the budgets alone.

Every operation takes at least its time on the device that is fastest at it. Bytes of weights that no
accelerator has room for are computed with on the CPU, which adds to that (a fractional knapsack), or
streamed, which may overlap with it and takes at least its time on the links: the bound is the best
balance of the two. And where the weights need several devices, the graph, if it is connected, is cut
at least once per further device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import networkx as nx
import numpy as np

from graphplan.device import CPU, DeviceSpec, Topology
from graphplan.graph import Graph
from graphplan.passes.evaluate import Problem

__all__ = ["Bound", "lower_bound"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds below which no placement can go, and the argument in words."""

    seconds: float
    proof: str


def lower_bound(problem: Problem) -> Bound:
    """The best of the bounds below."""
    graph, topology = problem.graph, problem.topology
    computing = [spec for spec in topology.devices if spec.computes]
    accelerators = [spec for spec in computing if spec.is_accelerator]
    fastest = _fastest_seconds(problem, computing)
    if not accelerators:
        return Bound(fastest, "all operations on the CPU")
    cpu = next((spec for spec in computing if spec.device == CPU), None)
    cuts = _cut_seconds(graph, computing, topology)
    rooms = sorted((spec.room for spec in accelerators), reverse=True)
    if cpu is None or not problem.offload:
        total = sum(graph.weights[name].nbytes for name in _read_weights(graph))
        further = int(np.searchsorted(np.cumsum(sorted((s.room for s in computing), reverse=True)), total))
        seconds = fastest + cuts * further * (further < len(computing))
        return Bound(seconds, "fastest compute plus a cut per further device" if cuts else "fastest compute")
    # with fewer accelerators there are fewer cuts, and more that they do not hold
    choices = [
        max(fastest + used * cuts, _overflow_seconds(problem, accelerators, fastest, sum(rooms[: used + 1])))
        for used in range(len(rooms))
    ]
    best = min(choices)
    if best == choices[-1] and best > fastest + cuts * (len(rooms) - 1):
        return Bound(best, "fastest compute, overlapped with the weights that no accelerator holds")
    return Bound(
        best, "fastest compute plus a cut per further device" if best > fastest else "fastest compute"
    )


def _fastest_seconds(problem: Problem, computing: list[DeviceSpec]) -> float:
    clocks = (problem.clock(spec).values() for spec in computing)
    return math.fsum(map(min, zip(*clocks, strict=True)))


def _read_weights(graph: Graph) -> dict[str, list[str]]:
    """Weight -> the operations that read its data."""
    return {name: list(graph.readers[name]) for name in graph.weights if graph.readers.get(name)}


def _overflow_seconds(problem: Problem, accelerators: list[DeviceSpec], fastest: float, held: int) -> float:
    """Seconds of a call at least, where accelerators hold no more than ``held`` bytes of weights."""
    graph, topology = problem.graph, problem.topology
    readers = _read_weights(graph)
    total = sum(graph.weights[name].nbytes for name in readers)
    missing = total - held
    cpu = next((spec for spec in topology.devices if spec.device == CPU), None)
    if missing <= 0 or cpu is None:
        return fastest
    bandwidth = sum(topology.link(cpu.key, spec.key).bandwidth for spec in accelerators)
    # an operation moved to the CPU frees all its weights, and pays once
    prices = []
    for name, users in readers.items():
        nbytes = graph.weights[name].nbytes
        if nbytes:
            penalty = min(_cpu_penalty(problem, user, cpu, accelerators) for user in users)
            prices.append((penalty / nbytes, nbytes))
    return _balance(sorted(prices), missing, bandwidth, fastest)


def _balance(prices: list[tuple[float, int]], missing: float, bandwidth: float, fastest: float) -> float:
    """The least of max(compute, streaming) when bytes go to the CPU in the order of their price.

    Each byte on the CPU lengthens ``fastest`` by its price, and shortens streaming by 1 / bandwidth.
    """
    for price, nbytes in prices:
        # as many of these bytes as bring the two together
        level = (missing / bandwidth - fastest) / (price + 1.0 / bandwidth)
        part = min(float(nbytes), missing, level)
        if part <= 0:
            break
        fastest += price * part
        missing -= part
        if part < nbytes:
            break
    return max(fastest, missing / bandwidth)


def _cpu_penalty(problem: Problem, user: str, cpu: DeviceSpec, accelerators: list[DeviceSpec]) -> float:
    """Extra seconds of one operation on the CPU, shared out among the weights that it reads."""
    operation = problem.graph.operations[user]
    best = min(problem.seconds(operation, spec) for spec in (*accelerators, cpu))
    extra = problem.seconds(operation, cpu) - best
    weights = sum(1 for name in operation.inputs if name in problem.graph.weights)
    return extra / max(weights, 1)


def _cut_seconds(graph: Graph, computing: list[DeviceSpec], topology: Topology) -> float:
    """Latency and bytes of the cheapest edge: what each device beyond the first costs at least."""
    weighing = {reader for users in _read_weights(graph).values() for reader in users}
    if len(computing) < 2 or not weighing or not _connected(graph, weighing):
        return 0.0
    sizes_moved = _moved_bytes(graph)
    links = [topology.link(a.key, b.key) for a in computing for b in computing if a is not b]
    return min(link.seconds(min(sizes_moved)) for link in links)


def _moved_bytes(graph: Graph) -> list[int]:
    """Bytes of everything that a move between two devices can carry."""
    between = [
        graph.values[name].copy_bytes
        for _, _, values in graph.edges()
        for name in values
        if graph.values[name].is_tensor
    ]
    return between + [graph.weights[name].nbytes for name in _read_weights(graph)]


def _connected(graph: Graph, weighing: set[str]) -> bool:
    """Whether the operations that read weights hang together through values that cost something."""
    links: nx.Graph[str] = nx.Graph()
    links.add_nodes_from(weighing)
    for source, target, values in graph.edges():
        if graph.operations[target].host_only:
            continue  # it reads sizes from where the tensor is, and moves nothing
        if any(graph.values[name].is_tensor for name in values):
            links.add_edge(source, target)
    return len({frozenset(c) for c in nx.connected_components(links) if c & weighing}) <= 1
