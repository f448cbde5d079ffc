"""A lower bound on the seconds of any placement, from the graph and the budgets alone.

Three parts that add up. Every operation takes at least its time on the device that is fastest at it.
Bytes of weights that no accelerator has room for are computed with on the CPU or fetched, whichever
is cheaper per byte (a fractional knapsack). And where the weights need several devices, the graph,
if it is connected, is cut at least once per further device.
"""

from __future__ import annotations

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
    overflow = _overflow_seconds(problem, accelerators)
    if overflow > 0:
        return Bound(fastest + overflow, "fastest compute plus the weights that no accelerator holds")
    cuts = _cut_seconds(graph, topology, computing)
    proof = "fastest compute plus a cut per further device" if cuts else "fastest compute"
    return Bound(fastest + cuts, proof)


def _fastest_seconds(problem: Problem, computing: list[DeviceSpec]) -> float:
    return sum(
        min(problem.seconds(operation, spec) for spec in computing)
        for operation in problem.graph.operations.values()
    )


def _read_weights(graph: Graph) -> dict[str, list[str]]:
    """Weight -> the operations that read its data."""
    found = {}
    for name in graph.weights:
        readers = [r for r in graph.consumers.get(name, ()) if not graph.operations[r].host_only]
        if readers:
            found[name] = readers
    return found


def _overflow_seconds(problem: Problem, accelerators: list[DeviceSpec]) -> float:
    """Seconds that the bytes beyond the accelerators' memory cost at least."""
    graph, topology = problem.graph, problem.topology
    readers = _read_weights(graph)
    total = sum(graph.weights[name].nbytes for name in readers)
    missing = total - sum(spec.room for spec in accelerators)
    cpu = next((spec for spec in topology.devices if spec.device == CPU), None)
    if missing <= 0 or cpu is None:
        return 0.0
    fetch = min(1.0 / topology.link(cpu.key, spec.key).bandwidth for spec in accelerators)
    # an operation moved to the CPU frees all its weights, and pays once
    prices = []
    for name, users in readers.items():
        nbytes = graph.weights[name].nbytes
        if not nbytes:
            continue
        penalty = min(_cpu_penalty(problem, user, cpu, accelerators) for user in users)
        prices.append((min(fetch, penalty / nbytes), nbytes))
    prices.sort()
    seconds = 0.0
    for price, nbytes in prices:
        part = min(missing, nbytes)
        seconds += price * part
        missing -= part
        if missing <= 0:
            break
    return seconds


def _cpu_penalty(problem: Problem, user: str, cpu: DeviceSpec, accelerators: list[DeviceSpec]) -> float:
    """Extra seconds of one operation on the CPU, shared out among the weights that it reads."""
    operation = problem.graph.operations[user]
    best = min(problem.seconds(operation, spec) for spec in (*accelerators, cpu))
    extra = problem.seconds(operation, cpu) - best
    weights = sum(1 for name in operation.inputs if name in problem.graph.weights)
    return extra / max(weights, 1)


def _cut_seconds(graph: Graph, topology: Topology, computing: list[DeviceSpec]) -> float:
    """Latency and bytes of the cheapest edges, one per device beyond the first that must be used."""
    readers = _read_weights(graph)
    total = sum(graph.weights[name].nbytes for name in readers)
    sizes = sorted((spec.room for spec in computing), reverse=True)
    needed = int(np.searchsorted(np.cumsum(sizes), total)) + 1
    if needed < 2 or needed > len(sizes):
        return 0.0
    weighing = {reader for users in readers.values() for reader in users}
    if not _connected(graph, weighing):
        return 0.0
    sizes_moved = _moved_bytes(graph)
    links = [topology.link(a.key, b.key) for a in computing for b in computing if a is not b]
    return (needed - 1) * min(link.seconds(min(sizes_moved)) for link in links)


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
