"""Which operations must share a device because they share memory that is written to.

A copy on another device is no longer a view: a write to one is not seen in the other. So where a
storage is written to, and an operation reads it afterwards by another name than the writer's result, the
writer, that reader and the makers of the views between them stay together::

    b = view(a)           b shares a's storage
    e = sin(a)            reads it before the write: free to go anywhere, with a copy
    c = add_(a, 1)        writes to it
    d = mul(b, c)         reads it by the older name: view, add_, mul share a device

Where only the result is read afterwards, nothing is tied: the writer may work on a copy. All operations
that read or write a mutated weight or input stay together: the model, or the caller, sees the write after
the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import networkx as nx

from graphplan.ir.graph import Graph


def find_together(graph: Graph, groups: Iterable[Sequence[str]]) -> list[frozenset[str]]:
    """Return the disjoint sets of two or more operations that aliasing ties to one device.

    ``groups`` are sets of values that must be on one device, whichever operations make them.
    """
    roots = {name: graph.root(name) for name in graph.values}
    order = {name: index for index, name in enumerate(graph.operations)}
    members: dict[str, list[str]] = {}
    for name, root in roots.items():
        members.setdefault(root, []).append(name)
    same_device: nx.Graph[str] = nx.Graph()
    written = (name for operation in graph.operations.values() for name in operation.mutates)
    for root in dict.fromkeys(roots.get(name, name) for name in written):
        if root in graph.weights or root in graph.inputs:
            nx.add_path(same_device, _accessing(graph, root, roots))
        else:
            nx.add_path(same_device, _entangled(graph, root, members.get(root, []), order))
    for operation in graph.operations.values():
        if operation.target == "as_strided" and (origin := _view_origin(graph, operation.inputs[0])):
            nx.add_path(same_device, [origin, operation.name])
    for weight in graph.weights.values():
        if not weight.movable:
            nx.add_path(same_device, graph.readers.get(weight.name, ()))
    for names in groups:
        nx.add_path(same_device, [graph.producer[name] for name in names if name in graph.producer])
    return [frozenset(group) for group in nx.connected_components(same_device) if len(group) > 1]


def _accessing(graph: Graph, root: str, roots: dict[str, str]) -> list[str]:
    """Return the operations that make or read the storage of ``root``, in order."""
    return [
        operation.name
        for operation in graph.operations.values()
        if any(roots.get(n, n) == root for n in (*operation.inputs, *operation.outputs))
        and not operation.host_only
    ]


def _entangled(graph: Graph, root: str, members: list[str], order: Mapping[str, int]) -> list[str]:
    """Return a storage's writers, its later readers by an older name, and the makers of both names."""
    tied: dict[str, None] = {}
    inside = {*members, root}
    readers = [
        (order[reader], reader, name)
        for name in members
        for reader in dict.fromkeys(graph.readers.get(name, ()))
    ]
    writers = {reader for name in inside for reader in graph.consumers.get(name, ())}
    for writer in sorted(writers, key=lambda name: order[name]):
        operation = graph.operations[writer]
        targets = [name for name in operation.mutates if name in inside]
        if not targets:
            continue
        results_and_views = _descendants(graph, members, operation.outputs)
        later_reads = [use for use in readers if use[0] > order[writer] and use[2] not in results_and_views]
        results = (*graph.outputs, *graph.values_kept_after_call)
        returned = [name for name in results if name in inside and name not in results_and_views]
        if not later_reads and not returned:
            continue
        # the returned value must not be a copy that an earlier reader needed
        earlier_reads = [use for use in readers if use[0] < order[writer] and use[2] in returned]
        names = {*targets, *returned, *(name for _, _, name in later_reads)}
        makers = [maker for name in names for maker in _view_makers(graph, name)]
        # a returned value is taken from its producer's device
        owners = [graph.producer[name] for name in (*returned, root) if returned and name in graph.producer]
        tied.update(
            dict.fromkeys(
                [writer, *(reader for _, reader, _ in (*earlier_reads, *later_reads)), *makers, *owners]
            )
        )
    return sorted(tied, key=lambda name: order[name])


def _view_makers(graph: Graph, name: str) -> list[str]:
    """Return the operations that made ``name`` from its storage, view by view."""
    makers = []
    while name in graph.values:
        base = graph.values[name].alias_of
        if base is None:
            break
        if name in graph.producer:
            makers.append(graph.producer[name])
        name = base
    return makers


def _descendants(graph: Graph, members: list[str], outputs: tuple[str, ...]) -> set[str]:
    """Return ``outputs``, and those of ``members`` that are views of them."""
    descendants = set(outputs)
    for name in members:  # in order of creation, so one sweep reaches all
        if graph.values[name].alias_of in descendants:
            descendants.add(name)
    return descendants


def _view_origin(graph: Graph, name: str) -> str | None:
    """Return the producer of the storage if ``name`` is a view, whose strides a copy would change."""
    if name not in graph.values or graph.values[name].alias_of is None:
        return None
    return graph.producer.get(graph.root(name)) or graph.producer.get(name)
