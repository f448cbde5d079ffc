"""Contiguous pieces around weights that several operations read.

No sequence of pieces has its first operation and its last on one device, as an embedding that is also the
head asks for. So such weights and what reads them are settled first, and the rest is split around them. And
pieces of equal layers fill a card to within a projection: where the small projections of a layer come before
the large ones, or after them, as they may, a cut between them leaves a card just as full as it can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from graphplan.device import DeviceKey
from graphplan.graph import Graph, Operation
from graphplan.passes.chain import Chain
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.residence import reside
from graphplan.passes.shares import kinds_of
from graphplan.passes.split_again import contiguous_split

__all__ = ["finer_split", "splits_around"]

_SHARED = 0.01  # of all weights: one that is read twice, from which on its home is settled first
_CUTS = 400  # places at most where pieces may end, ...
_FINE_CUTS = 1300  # ... and where time is taken for it

Homes = Mapping[str, DeviceKey]


def splits_around(problem: Problem) -> Iterator[Evaluation]:
    """Placements on the accelerators, one for each home that the shared weights may have together."""
    shared = _shared(problem)
    if not shared:
        return
    nbytes = sum(problem.graph.weights[name].nbytes for name in shared)
    for kind in kinds_of(problem):
        key = kind.keys[0]  # others of the kind: the same by another name
        if kind.spec.is_accelerator and nbytes <= kind.spec.room and _may_run(problem, shared, key):
            found = _split(problem, problem.graph, dict.fromkeys(shared, key), _CUTS)
            if found is not None:
                yield found


def finer_split(problem: Problem, best: Evaluation, *, small_first: bool) -> Evaluation | None:
    """Pieces with cuts nearly anywhere, in an order that has small weights first or last.

    Weights that several operations read are where ``best`` has them; None where that is the CPU.
    """
    homes = best.schedule.assignment.weights
    chosen = {name: homes[name] for name in _shared(problem)}
    if any(not problem.topology[key].is_accelerator for key in chosen.values()):
        return None
    return _split(problem, _by_size(problem.graph, small_first=small_first), chosen, _FINE_CUTS)


def _shared(problem: Problem) -> list[str]:
    """Large weights that several operations read, and that nobody has given a home."""
    graph = problem.graph
    least = _SHARED * graph.weight_bytes
    large = (w.name for w in graph.weights.values() if w.nbytes >= max(1, least))
    return [n for n in large if n not in problem.fixed_weights and len(graph.readers.get(n, ())) > 1]


def _may_run(problem: Problem, weights: list[str], key: DeviceKey) -> bool:
    readers = (reader for name in weights for reader in problem.graph.readers.get(name, ()))
    return all(key in problem.allowed.get(reader, {key}) for reader in readers)


def _split(problem: Problem, graph: Graph, homes: Homes, limit: int) -> Evaluation | None:
    """Pieces of ``graph``, an order of the problem's, with these weights and their readers settled."""
    readers = {name: graph.readers.get(name, ()) for name in homes}
    settled = {reader: homes[name] for name, listed in readers.items() for reader in listed}
    # one end of the sequence may be where such a weight is: the last, which most often reads all of it
    last = {listed[-1]: frozenset({homes[name]}) for name, listed in readers.items()}
    taken: dict[DeviceKey, int] = {}
    for name, key in homes.items():
        taken[key] = taken.get(key, 0) + graph.weights[name].nbytes
    left = {key: max(0, problem.topology[key].memory - nbytes) for key, nbytes in taken.items()}
    rest = _without(graph, homes)
    smaller = replace(
        problem,
        graph=rest,
        topology=problem.topology.with_memory(left),
        allowed={**problem.allowed, **last},
    )
    spec = next(spec for spec in problem.topology.devices if spec.is_accelerator)
    found = contiguous_split(smaller, Chain(rest, spec), use_cpu=False, fetch=False, limit=limit)
    if found is None:
        return None
    placed = problem.obey({**found.schedule.assignment.operations, **settled})
    return evaluate(problem, reside(problem, placed))


def _without(graph: Graph, weights: Homes) -> Graph:
    """The same operations, of which none reads these weights."""
    if not weights:
        return graph
    return _changed(
        graph,
        [
            replace(operation, inputs=tuple(name for name in operation.inputs if name not in weights))
            for operation in graph.operations.values()
        ],
        weights,
    )


def _by_size(graph: Graph, *, small_first: bool) -> Graph:
    """Operations that follow each other without reading each other, by the bytes of their weights."""
    operations = list(graph.operations.values())
    sign = 1 if small_first else -1
    sizes = {operation.name: sign * _weight_bytes(graph, operation) for operation in operations}
    for index in range(1, len(operations)):
        operation, place = operations[index], index
        while place and sizes[operation.name]:
            before = operations[place - 1]
            if not sizes[before.name] or sizes[operation.name] >= sizes[before.name]:
                break
            if set(before.outputs) & set(operation.inputs):
                break
            operations[place] = before
            place -= 1
        operations[place] = operation
    return _changed(graph, operations, {})


def _changed(graph: Graph, operations: list[Operation], without: Homes) -> Graph:
    kept = [weight for weight in graph.weights.values() if weight.name not in without]
    values, shapes = graph.values.values(), graph.shapes_known
    return Graph(operations, values, kept, graph.inputs, graph.outputs, graph.together, shapes_known=shapes)


def _weight_bytes(graph: Graph, operation: Operation) -> int:
    return sum(graph.weights[name].nbytes for name in operation.inputs if name in graph.weights)
