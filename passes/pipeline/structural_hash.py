"""Whether two graphs are the same but for their names: what one has been given then does for the other.

Layers of a stack that are on machines of their own are placed once.
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
    """Equal for two stretches of the order, from ``start`` to ``end``, that differ in names only.

    ``received`` and ``sent`` are the values that cross the cuts before and after it.
    """
    number: dict[str, int] = {}
    described: list[Hashable] = []

    def of(names: Sequence[str]) -> tuple[int, ...]:
        for name in names:
            if name not in number:
                number[name] = len(number)
                described.append(_described(graph, name, of))
        return tuple(number[name] for name in names)

    operations = tuple(
        (op.target, *map(of, (op.inputs, op.outputs, op.mutates)), _cost(op))
        for op in islice(graph.operations.values(), start, end)
    )
    return operations, of(received), of(sent), tuple(described)


def _cost(op: Operation) -> Hashable:
    return op.flops, op.bytes_accessed, tuple(op.workspace.items()), op.host_only


def _described(graph: Graph, name: str, of: Callable[[Sequence[str]], tuple[int, ...]]) -> Hashable:
    """What is to be equal of a value or weight, beside its name."""
    if name in graph.weights:
        w = graph.weights[name]
        return w.nbytes, w.kind, w.mutated, w.movable, w.shape, w.dtype, len(graph.readers.get(name, ()))
    v = graph.values[name]
    base = None if v.alias_of is None else of([v.alias_of])
    return v.nbytes, v.copy_bytes, base, v.is_tensor, v.shape, v.dtype, v.stays, name in graph.inputs


def renamed(assignment: Assignment, graph: Graph, like: Graph) -> Assignment:
    """The assignment of ``graph`` for ``like``, a graph of the same structure.

    Raises:
        ValueError: they have different numbers of operations or weights.
    """
    operations = zip(graph.operations, like.operations, strict=True)
    weights = zip(graph.weights, like.weights, strict=True)
    return Assignment(
        {new: assignment.operations[old] for old, new in operations},
        {new: assignment.weights[old] for old, new in weights},
        assignment.slots,
    )
