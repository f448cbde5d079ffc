"""Where weights live, once it is settled where operations run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from graphplan.device import CPU, DeviceKey, Topology
from graphplan.graph import Graph
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.schedule import Assignment

_LARGE_BUFFER = 1 << 20  # a smaller one is not worth fetching, and another call may write to it

__all__ = ["cpu_key", "fetch_excess", "reside"]


def cpu_key(topology: Topology) -> DeviceKey | None:
    """The caller's key for the CPU, or None where it has no budget."""
    return next((spec.key for spec in topology.devices if spec.device == CPU), None)


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
        readers = [r for r in graph.consumers.get(weight.name, ()) if not graph.operations[r].host_only]
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


def fetch_excess(
    problem: Problem, operations: Mapping[str, DeviceKey], rounds: int = 64
) -> Evaluation | None:
    """Keep weights on the CPU until every accelerator fits; None where that cannot be.

    Each round takes, on a device that is over its budget by ``x`` bytes, the smallest weight of at
    least ``x``, else the largest: few bytes are fetched, and few times.
    """
    graph, cpu = problem.graph, cpu_key(problem.topology)
    fetched: set[str] = set()
    for _ in range(rounds + len(graph.weights)):
        found = evaluate(problem, reside(problem, operations, fetched))
        over = [key for key in found.excess if key != cpu]
        if not over:
            return found if found.feasible else None
        if cpu is None:
            return None
        for key in over:
            chosen = _choose(graph, found, key, found.excess[key], fetched)
            if chosen is None:
                return None
            fetched.update(chosen)
    return None


def _choose(
    graph: Graph, found: Evaluation, key: DeviceKey, excess: int, fetched: set[str]
) -> list[str] | None:
    """Weights of ``key`` to fetch from now on, of together about ``excess`` bytes."""
    homes = found.schedule.assignment.weights
    busy = _read_at_peak(graph, found, key)
    resident = [
        weight
        for weight in graph.weights.values()
        if homes[weight.name] == key
        and weight.fetchable
        and (weight.kind != "buffer" or weight.nbytes >= _LARGE_BUFFER)
        and weight.nbytes
        and weight.name not in fetched
        and graph.consumers.get(weight.name)
    ]
    # fetching what is read at the peak itself frees nothing there
    useful = [weight for weight in resident if weight.name not in busy] or resident
    if not useful:
        return None
    useful.sort(key=lambda weight: weight.nbytes)
    covering = [weight for weight in useful if weight.nbytes >= excess]
    if covering:
        return [covering[0].name]
    chosen, total = [], 0
    while useful and total + useful[-1].nbytes <= excess:
        chosen.append(useful[-1].name)
        total += useful.pop().nbytes
    return chosen or [useful[-1].name]


def _read_at_peak(graph: Graph, found: Evaluation, key: DeviceKey) -> set[str]:
    operation = graph.operations.get(found.peak(key).operation)
    return set(operation.inputs) if operation is not None else set()
