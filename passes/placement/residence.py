"""The homes of weights: the device that each resides on, once every operation has a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from graphplan.devices.topology import DeviceKey, round_up
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Weight
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.problem import Problem


def place_host_scalars(graph: Graph, placed: Mapping[str, DeviceKey]) -> dict[str, DeviceKey]:
    """Return a device for every operation: one that makes only host scalars runs where its inputs are."""
    device_of = {value: key for name, key in placed.items() for value in graph.operations[name].outputs}
    default = next(iter(placed.values()))
    devices: dict[str, DeviceKey] = {}
    for name, operation in graph.operations.items():
        key = placed.get(name)
        if key is None:
            key = next((device_of[value] for value in operation.inputs if value in device_of), default)
            device_of.update(dict.fromkeys(operation.outputs, key))
        devices[name] = key
    return devices


def assign_weights(
    problem: Problem,
    operations: Mapping[str, DeviceKey],
    streamed: Collection[str] = (),
    homes: Mapping[str, DeviceKey] | None = None,
) -> Assignment:
    """Assign every weight to a device, its home.

    A weight resides where ``homes`` says, in CPU memory if it is streamed, else where its first reader
    runs. An unread weight resides with its sibling, else on the CPU, else where most room is left.

    Args:
        problem: the problem, whose ``fixed_weights`` stay where they are.
        operations: operation -> device.
        streamed: weights to hold in CPU memory though an accelerator reads them.
        homes: weight -> its device, for weights whose home is decided.
    """
    graph, topology = problem.graph, problem.topology
    decided = {**(homes or {}), **problem.fixed_weights}
    cpu, streamed = topology.cpu, set(streamed)
    residence: dict[str, DeviceKey] = {}
    taken: dict[DeviceKey, int] = defaultdict(int)
    for weight in graph.weights.values():
        readers = graph.readers.get(weight.name, ())
        home: DeviceKey | None = decided.get(weight.name)
        if home is None and weight.name in streamed and weight.streamable:
            home = cpu
        if home is None and readers:
            home = operations[readers[0]]
        if home is not None:
            residence[weight.name] = home
            taken[home] += weight.held_bytes
    sibling_of = siblings(problem)
    for weight in graph.weights.values():
        if weight.name not in residence:
            home = cpu
            if weight.name in sibling_of:  # another pass may write to this buffer and to its sibling
                home = residence[sibling_of[weight.name]]
            elif home is None:
                home = max(topology.computing, key=lambda spec: spec.room - taken[spec.key]).key
            residence[weight.name] = home
            taken[home] += weight.held_bytes
    return Assignment(dict(operations), residence)


def on_one_device(problem: Problem, key: DeviceKey) -> Assignment:
    """Return the assignment of all operations that may run there to one device, with their weights."""
    return assign_weights(problem, problem.on_allowed_devices(dict.fromkeys(problem.graph.operations, key)))


def siblings(problem: Problem) -> dict[str, str]:
    """Return unread buffer -> a buffer of the same module that is read or fixed: they reside together."""
    graph, fixed = problem.graph, problem.fixed_weights
    buffers = [w.name for w in graph.weights.values() if w.kind == "buffer"]
    read = {module_of(name): name for name in buffers if graph.readers.get(name) or name in fixed}
    sibling_of = {name: read.get(module_of(name), name) for name in buffers if not graph.readers.get(name)}
    return {name: other for name, other in sibling_of.items() if name != other}


def unread_weights(problem: Problem) -> list[Weight]:
    """Return the weights that may reside anywhere: unread, not returned, not fixed, without a sibling."""
    graph, sibling_of = problem.graph, siblings(problem)
    decided = {*problem.fixed_weights, *graph.outputs, *sibling_of}
    return [
        weight
        for weight in graph.weights.values()
        if weight.nbytes and not graph.readers.get(weight.name) and weight.name not in decided
    ]


def fill(
    unread: Iterable[Weight],
    cpu: DeviceKey | None,
    left: Callable[[Mapping[DeviceKey, int], int], Mapping[DeviceKey, float]],
) -> dict[str, DeviceKey]:
    """Return the homes of unread weights: in CPU memory while it has room, else where most room is left.

    Args:
        unread: the weights to place, of which the largest come first.
        cpu: the CPU's key, if it has a budget.
        left: function of device -> bytes of the unread weights placed there so far, and of the bytes of the
            next; returns for each computing device the bytes that stay free if the next resides there.
    """
    homes, placed = dict[str, DeviceKey](), defaultdict[DeviceKey, int](int)
    for weight in sorted(unread, key=lambda w: -w.held_bytes):
        nbytes = round_up(weight.held_bytes)
        free = left(placed, nbytes)
        home = cpu if cpu is not None and free[cpu] >= 0 else max(free, key=lambda key: free[key])
        placed[home] += nbytes
        homes[weight.name] = home
    return homes


def module_of(name: str) -> str:
    """Return the module of a weight: ``layers.0.norm.mean -> layers.0.norm``."""
    return name.rpartition(".")[0]
