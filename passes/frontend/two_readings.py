"""Combine two readings of a capture: layouts, and so copies, depend on devices and on moves."""

from __future__ import annotations

from dataclasses import replace

from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Value


def upper_bound_graph(a: Graph, b: Graph) -> Graph:
    """Return a graph that bounds two readings of a capture: each value and workspace has the larger bytes.

    A value that is a view in only one of them does not count as a view.
    """
    values = [_upper_bound_value(value, b.values[name]) for name, value in a.values.items()]
    operations = []
    for name, operation in a.operations.items():
        other = b.operations[name]
        types = {*operation.workspace, *other.workspace}
        workspace = {t: max(operation.workspace_on(t), other.workspace_on(t)) for t in sorted(types)}
        operations.append(replace(operation, workspace=workspace))
    return a.changed(operations=operations, values=values).tied(b.together)


def with_least_costs(a: Graph, b: Graph) -> Graph:
    """Return the first of two readings, with the FLOPs and bytes of the second where these are fewer.

    A ``contiguous`` that copies the result of one device's kernel may return a view on another.
    """
    operations = []
    for name, operation in a.operations.items():
        flops = min(operation.flops, b.operations[name].flops)
        nbytes = min(operation.bytes_accessed, b.operations[name].bytes_accessed)
        operations.append(replace(operation, flops=flops, bytes_accessed=nbytes))
    return a.changed(operations=operations)


def _upper_bound_value(a: Value, b: Value) -> Value:
    if a.alias_of == b.alias_of:
        return replace(a, nbytes=max(a.nbytes, b.nbytes), copy_bytes=max(a.copy_bytes, b.copy_bytes))
    return a if a.alias_of is None else b
