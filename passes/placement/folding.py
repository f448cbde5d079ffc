"""A training step folded at its middle: the backward pass of each operation lies beside the operation.

A device that runs a part of the forward pass has that part's weights, and what it saves, so it runs the same
part of the backward pass; and segments of a stack are contiguous in the forward pass only. So placements are
searched in another order, in which an operation and what computes its gradient are one macro-operation
(the V-shaped order of Narayanan et al., "PipeDream", 2019)::

    runs         a  b  loss  loss'  b'  a'
    is searched  a a'  b b'  loss loss'

Bounds are proven on the problem itself, and peaks are those of the order in which operations run.
"""

from __future__ import annotations

from dataclasses import replace

from graphplan.ir.graph import Graph
from graphplan.passes.placement.problem import Problem


def fold(problem: Problem) -> Problem:
    """The same problem, with what belongs to an operation of the forward pass tied to it."""
    groups: dict[str, list[str]] = {}
    for operation in problem.graph.operations.values():
        first = operation.forward
        if first in problem.graph.operations and _alike(problem, first, operation.name):
            groups.setdefault(first, [first]).append(operation.name)
    return replace(problem, graph=problem.graph.tied(groups.values()))


def _alike(problem: Problem, one: str, other: str) -> bool:
    """Whether the same devices may run two operations."""
    operations = problem.graph.operations
    hosts = operations[one].host_only, operations[other].host_only
    return not any(hosts) and problem.allowed.get(one) == problem.allowed.get(other)


def folded_order(graph: Graph) -> list[str]:
    """The operations, each of the backward pass beside the one that it belongs to."""
    position = {name: index for index, name in enumerate(graph.operations)}
    place, last = dict[str, int](), 0
    for name, operation in graph.operations.items():
        last = position.get(operation.forward, last) if operation.backward else position[name]
        place[name] = last
    return sorted(graph.operations, key=lambda name: (place[name], position[name]))
