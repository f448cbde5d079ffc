"""Where weights reside, once it is known where operations run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from graphplan.devices.topology import DeviceKey, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.problem import Problem, cpu_key


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


def reside(
    problem: Problem,
    operations: Mapping[str, DeviceKey],
    streamed: Collection[str] = (),
    homes: Mapping[str, DeviceKey] | None = None,
) -> Assignment:
    """Give every weight a home.

    A weight resides where ``homes`` says, in CPU memory if it is streamed, else where its first reader
    runs; one that nobody reads, on the CPU, or where most room is left.

    Args:
        problem: its ``fixed_weights`` stay where they are.
        operations: operation -> device.
        streamed: weights to hold in CPU memory though an accelerator reads them.
        homes: weights whose home is decided.
    """
    graph, topology = problem.graph, problem.topology
    decided = {**(homes or {}), **problem.fixed_weights}
    cpu, streamed = cpu_key(topology), set(streamed)
    found: dict[str, DeviceKey] = {}
    taken: dict[DeviceKey, int] = defaultdict(int)
    for weight in graph.weights.values():
        readers = graph.readers.get(weight.name, ())
        home: DeviceKey | None = decided.get(weight.name)
        if home is None and weight.name in streamed and weight.streamable:
            home = cpu
        if home is None and readers:
            home = operations[readers[0]]
        if home is not None:
            found[weight.name] = home
            taken[home] += weight.held_bytes
    beside = {module_of(name): key for name, key in found.items() if graph.weights[name].kind == "buffer"}
    for weight in graph.weights.values():
        if weight.name not in found:
            idle = cpu if cpu is not None else _roomiest(topology, taken)
            # a buffer that this call does not read, another may write to, with its neighbours
            home = beside.get(module_of(weight.name), idle) if weight.kind == "buffer" else idle
            found[weight.name] = home
            taken[home] += weight.held_bytes
    return Assignment(dict(operations), found)


def module_of(name: str) -> str:
    """``layers.0.norm.mean -> layers.0.norm``."""
    return name.rpartition(".")[0]


def _roomiest(topology: Topology, taken: Mapping[DeviceKey, int]) -> DeviceKey:
    computing = [spec for spec in topology.devices if spec.computes]
    return max(computing, key=lambda spec: spec.room - taken[spec.key]).key
