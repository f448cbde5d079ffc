"""Which operations must share a device because they share memory that is written to.

A copy on another device is no longer a view: what is written to one is not seen in the other. So
where a storage is written to, and somebody reads it afterwards by another name than the writer's
result, everything that touches the storage stays together::

    b = view(a)           b shares a's storage
    c = add_(a, 1)        writes to it
    d = mul(b, c)         reads it by the older name: view, add_, mul share a device

Where only the result is read afterwards, nothing is tied: the writer may work on a copy.
"""

from __future__ import annotations

from collections import defaultdict

import networkx as nx

from graphplan.graph import Graph

__all__ = ["find_together"]


def find_together(graph: Graph) -> list[frozenset[str]]:
    """The sets of operations that aliasing ties to one device, disjoint, each of two or more."""
    roots = {name: graph.root(name) for name in graph.values}
    ties: nx.Graph[str] = nx.Graph()
    for root in _written_roots(graph, roots):
        users = _touching(graph, root, roots)
        if _must_stay(graph, root, roots):
            nx.add_path(ties, users)
    for operation in graph.operations.values():
        if operation.target == "as_strided" and (origin := _view_origin(graph, operation.inputs[0])):
            nx.add_path(ties, [origin, operation.name])
    return [frozenset(group) for group in nx.connected_components(ties) if len(group) > 1]


def _written_roots(graph: Graph, roots: dict[str, str]) -> list[str]:
    written = (name for op in graph.operations.values() for name in op.mutates)
    return list(dict.fromkeys(roots.get(name, name) for name in written))


def _touching(graph: Graph, root: str, roots: dict[str, str]) -> list[str]:
    """The operations that make or read the storage of ``root``, in order."""
    return [
        operation.name
        for operation in graph.operations.values()
        if any(roots.get(n, n) == root for n in (*operation.inputs, *operation.outputs))
        and not operation.host_only
    ]


def _must_stay(graph: Graph, root: str, roots: dict[str, str]) -> bool:
    if root in graph.weights or root in graph.inputs:
        return True  # the model, or the caller, sees the write after the call
    last_read: dict[str, int] = defaultdict(lambda: -1)
    for index, operation in enumerate(graph.operations.values()):
        for name in operation.inputs:
            last_read[name] = index
    for name in graph.outputs:
        last_read[name] = len(graph.operations)
    members = [name for name, base in roots.items() if base == root]
    for index, operation in enumerate(graph.operations.values()):
        for target in operation.mutates:
            if roots.get(target, target) != root:
                continue
            fresh = _descendants(graph, members, operation.outputs)
            if any(last_read[name] > index for name in members if name not in fresh):
                return True
    return False


def _descendants(graph: Graph, members: list[str], outputs: tuple[str, ...]) -> set[str]:
    """Those of ``members`` that are ``outputs`` or views of them."""
    found = set(outputs)
    for name in members:  # in order of creation, so one sweep reaches all
        if graph.values[name].alias_of in found:
            found.add(name)
    return found


def _view_origin(graph: Graph, name: str) -> str | None:
    """The operation that made the storage, if ``name`` is a view whose strides a copy would change."""
    if name not in graph.values or graph.values[name].alias_of is None:
        return None
    return graph.producer.get(graph.root(name)) or graph.producer.get(name)
