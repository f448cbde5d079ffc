"""Structural hashing: graphs that differ in names only share one placement.

Equal stages of a stack of layers, on different machines, are placed once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import islice

from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.schedule import Assignment


def structure_of(
    graph: Graph, start: int, end: int, received: Sequence[str], sent: Sequence[str]
) -> Hashable:
    """Return a key of the operations from ``start`` to ``end``, equal for those that differ in names only.

    ``received`` and ``sent`` are the values that cross the cuts before and after them.
    """
    number_of: dict[str, int] = {}
    properties: list[Hashable] = []

    def numbers(names: Sequence[str]) -> tuple[int, ...]:
        for name in names:
            if name not in number_of:
                number_of[name] = len(number_of)
                properties.append(_properties(graph, name, numbers))
        return tuple(number_of[name] for name in names)

    operations = tuple(
        (op.target, *map(numbers, (op.inputs, op.outputs, op.mutates)), _cost(op))
        for op in islice(graph.operations.values(), start, end)
    )
    return operations, numbers(received), numbers(sent), tuple(properties)


def _cost(op: Operation) -> Hashable:
    return op.flops, op.bytes_accessed, tuple(op.workspace.items()), op.host_only


def _properties(graph: Graph, name: str, numbers: Callable[[Sequence[str]], tuple[int, ...]]) -> Hashable:
    """Return the properties of a value or weight that must be equal, which excludes its name."""
    if name in graph.weights:
        w = graph.weights[name]
        return w.nbytes, w.kind, w.mutated, w.movable, w.shape, w.dtype, len(graph.readers.get(name, ()))
    v = graph.values[name]
    base = None if v.alias_of is None else numbers([v.alias_of])
    return v.nbytes, v.copy_bytes, base, v.is_tensor, v.shape, v.dtype, v.stays, name in graph.inputs


def renamed(assignment: Assignment, graph: Graph, target: Graph) -> Assignment:
    """Return the assignment of ``graph`` for ``target``, a graph of the same structure.

    Raises:
        ValueError: they have different numbers of operations or weights.
    """
    operations = zip(graph.operations, target.operations, strict=True)
    weights = zip(graph.weights, target.weights, strict=True)
    return Assignment(
        {new: assignment.operations[old] for old, new in operations},
        {new: assignment.weights[old] for old, new in weights},
        assignment.slots,
    )
