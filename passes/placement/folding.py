"""A training step folded at its middle: each operation is placed together with its backward pass.

A device that runs a part of the forward pass holds that part's weights and saved activations, so it should
run the same part of the backward pass: two stretches of the order of execution. Placements are therefore
searched in a folded order, in which an operation and those that compute its gradient are one macro-operation
(the V-shaped order of Narayanan et al., "PipeDream", 2019)::

    order of execution  a  b  loss  loss'  b'  a'
    folded order        a a'  b b'  loss loss'

Bounds are of the problem itself, unfolded. Peaks are those of the order of execution.
"""

from __future__ import annotations

from dataclasses import replace

from graphplan.ir.graph import Graph
from graphplan.passes.placement.problem import Problem


def fold(problem: Problem) -> Problem:
    """Return the problem with each forward operation tied to its gradient computation and its repetition."""
    groups: dict[str, list[str]] = {}
    for operation in problem.graph.operations.values():
        forward = operation.forward
        if forward in problem.graph.operations and _may_be_tied(problem, forward, operation.name):
            groups.setdefault(forward, [forward]).append(operation.name)
    return replace(problem, graph=problem.graph.tied(groups.values()))


def _may_be_tied(problem: Problem, first: str, second: str) -> bool:
    """Whether two operations may run on the same devices, and neither makes host scalars."""
    operations = problem.graph.operations
    hosts = operations[first].host_only, operations[second].host_only
    return not any(hosts) and problem.allowed.get(first) == problem.allowed.get(second)


def folded_order(graph: Graph) -> list[str]:
    """Return the operations in folded order: each backward operation follows its forward operation."""
    position = graph.position_of
    place, last = dict[str, int](), 0
    for name, operation in graph.operations.items():
        last = position.get(operation.forward, last) if operation.backward else position[name]
        place[name] = last
    return sorted(graph.operations, key=lambda name: (place[name], position[name]))
