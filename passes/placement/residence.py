"""Where weights reside, once it is known where operations run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from graphplan.devices.topology import DeviceKey, round_up
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Weight
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.problem import Problem


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
    cpu, streamed = topology.cpu, set(streamed)
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
    beside = siblings(problem)
    for weight in graph.weights.values():
        if weight.name not in found:
            home = cpu
            if weight.name in beside:  # another call may write to this buffer, with its neighbours
                home = found[beside[weight.name]]
            elif home is None:
                home = max(topology.computing, key=lambda spec: spec.room - taken[spec.key]).key
            found[weight.name] = home
            taken[home] += weight.held_bytes
    return Assignment(dict(operations), found)


def on_one_device(problem: Problem, key: DeviceKey) -> Assignment:
    """Every operation on one device, but for those that may not run there, with the weights that it reads."""
    return reside(problem, problem.obey(dict.fromkeys(problem.graph.operations, key)))


def siblings(problem: Problem) -> dict[str, str]:
    """Buffers that nobody reads -> a buffer of the same module that is read: they reside together."""
    graph, fixed = problem.graph, problem.fixed_weights
    buffers = [w.name for w in graph.weights.values() if w.kind == "buffer"]
    read = {module_of(name): name for name in buffers if graph.readers.get(name) or name in fixed}
    places = {name: read.get(module_of(name), name) for name in buffers if not graph.readers.get(name)}
    return {name: other for name, other in places.items() if name != other}


def unread_weights(problem: Problem) -> list[Weight]:
    """Weights that may reside anywhere: nobody reads or returns them, and no rule or neighbour decides."""
    graph, beside = problem.graph, siblings(problem)
    decided = {*problem.fixed_weights, *graph.outputs, *beside}
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
    """Homes of weights that nobody reads: in CPU memory while it has room, else where most room is left.

    Args:
        unread: these.
        cpu: the CPU's key, if it is a device.
        left: from device -> bytes of those that are placed, and the bytes of the next, to device that
            computes -> bytes that it would leave free there.
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
    """``layers.0.norm.mean -> layers.0.norm``."""
    return name.rpartition(".")[0]
