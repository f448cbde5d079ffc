"""Whether two graphs are the same but for their names: what one has been given then does for the other.

Layers of a stack that are on machines of their own are placed once.
"""

from __future__ import annotations

from collections.abc import Hashable

from graphplan.ir.graph import Graph
from graphplan.ir.schedule import Assignment


def structure_of(graph: Graph) -> Hashable:
    """Equal for two graphs that differ in names only, items compared in order."""
    number = {name: index for index, name in enumerate((*graph.weights, *graph.values, *graph.operations))}

    def of(*names: str) -> tuple[int, ...]:
        return tuple(number[name] for name in names)

    weights = tuple(
        (w.nbytes, w.kind, w.persistent, w.mutated, w.movable, w.shape, w.dtype, w.part_of, w.start)
        for w in graph.weights.values()
    )
    values = tuple(
        (v.nbytes, v.copy_bytes, v.alias_of and of(v.alias_of), v.is_tensor, v.shape, v.dtype, v.stays)
        for v in graph.values.values()
    )
    operations = tuple(
        (
            (op.target, of(*op.inputs), of(*op.outputs), of(*op.mutates), op.flops, op.bytes_accessed)
            + (tuple(op.workspace.items()), op.host_only)
        )
        for op in graph.operations.values()
    )
    groups = tuple(sorted(tuple(sorted(of(*group))) for group in graph.together))
    return weights, values, operations, of(*graph.inputs), of(*graph.outputs), groups


def renamed(assignment: Assignment, graph: Graph, like: Graph) -> Assignment:
    """The assignment of ``graph`` for ``like``, a graph of the same structure."""
    operations = zip(graph.operations, like.operations, strict=True)
    weights = zip(graph.weights, like.weights, strict=True)
    return Assignment(
        {new: assignment.operations[old] for old, new in operations},
        {new: assignment.weights[old] for old, new in weights},
        assignment.slots,
    )
