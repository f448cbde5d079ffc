"""Where weights live, once it is settled where operations run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from graphplan.device import CPU, DeviceKey, Topology
from graphplan.graph import Graph
from graphplan.passes.evaluate import Problem
from graphplan.schedule import Assignment

__all__ = ["cpu_key", "follow", "reside"]


def cpu_key(topology: Topology) -> DeviceKey | None:
    """The caller's key for the CPU, or None where it has no budget."""
    return next((spec.key for spec in topology.devices if spec.device == CPU), None)


def follow(graph: Graph, placed: Mapping[str, DeviceKey]) -> dict[str, DeviceKey]:
    """A device for every operation: those that make only host scalars go with what they read."""
    home = {value: key for name, key in placed.items() for value in graph.operations[name].outputs}
    anywhere = next(iter(placed.values()))
    devices: dict[str, DeviceKey] = {}
    for name, operation in graph.operations.items():
        key = placed.get(name)
        if key is None:
            key = next((home[value] for value in operation.inputs if value in home), anywhere)
            home.update(dict.fromkeys(operation.outputs, key))
        devices[name] = key
    return devices


def reside(problem: Problem, operations: Mapping[str, DeviceKey], fetched: Iterable[str] = ()) -> Assignment:
    """Give every weight a home.

    A weight lives where its first reader runs; one of ``fetched`` lives on the CPU, and its readers
    fetch it; one that nobody reads lives on the CPU, or where most room is left.

    Args:
        problem: its ``fixed_weights`` stay where they are.
        operations: operation -> device.
        fetched: weights to keep on the CPU though an accelerator reads them.
    """
    graph, topology = problem.graph, problem.topology
    fixed, cpu, away = problem.fixed_weights, cpu_key(topology), set(fetched)
    homes: dict[str, DeviceKey] = {}
    taken: dict[DeviceKey, int] = defaultdict(int)
    for weight in graph.weights.values():
        readers = graph.readers.get(weight.name, ())
        home: DeviceKey | None = fixed.get(weight.name)
        if home is None and weight.name in away and weight.fetchable:
            home = cpu
        if home is None and readers:
            home = operations[readers[0]]
        if home is not None:
            homes[weight.name] = home
            taken[home] += weight.nbytes
    beside = {_module(name): key for name, key in homes.items() if graph.weights[name].kind == "buffer"}
    for weight in graph.weights.values():
        if weight.name not in homes:
            idle = cpu if cpu is not None else _roomiest(topology, taken)
            # a buffer that this call does not read, another may write to, with its neighbours
            home = beside.get(_module(weight.name), idle) if weight.kind == "buffer" else idle
            homes[weight.name] = home
            taken[home] += weight.nbytes
    return Assignment(dict(operations), homes)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _roomiest(topology: Topology, taken: Mapping[DeviceKey, int]) -> DeviceKey:
    computing = [spec for spec in topology.devices if spec.computes]
    return max(computing, key=lambda spec: spec.room - taken[spec.key]).key
