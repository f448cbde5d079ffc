"""Find the first difference between two graphs that should be of the same call of the same model.

Budgets and devices change the graph in two ways only: weights that no device holds are read in parts,
and a training step saves less, so that operations are recomputed or keep values on the CPU. The operations of
a module in which one of the graphs does so are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Weight


def graph_difference(graph: Graph, other: Graph, called: tuple[str, str] = ("this plan", "the other")) -> str:
    """Return how the call of ``other`` differs from that of ``graph``, in words; empty if they agree."""
    return next(_differences(graph, other, called), "")


def _differences(graph: Graph, other: Graph, called: tuple[str, str]) -> Iterator[str]:
    if graph.trains != other.trains:
        kinds = ("a forward pass", "a training step")
        yield f"it is of {kinds[other.trains]}, not of {kinds[graph.trains]}"
    yield from _differing_weights(graph, other, called)
    yield from _differing_inputs(graph, other)
    yield from _differing_operations(graph, other, called)


def _differing_weights(graph: Graph, other: Graph, called: tuple[str, str]) -> Iterator[str]:
    first, second = _weights_by_name(graph), _weights_by_name(other)
    for name in sorted(first.keys() ^ second.keys()):
        yield f"only {called[name not in first]} has the weight {name!r}"
    for name in (name for name in first if name in second):
        ours, theirs = (f"{weight.dtype}{list(weight.shape)}" for weight in (first[name], second[name]))
        if ours != theirs:
            yield f"{name!r} is {theirs} in {called[1]}, and {ours} in {called[0]}"


def _weights_by_name(graph: Graph) -> dict[str, Weight]:
    """Return the model's weights by all of their names; whole ones, if a plan reads them in parts."""
    own = (weight for weight in graph.weights.values() if weight.kind in ("parameter", "buffer"))
    return {name: weight for weight in own for name in weight.names or (weight.name,)}


def _differing_inputs(graph: Graph, other: Graph) -> Iterator[str]:
    for name, other_name in zip_longest(graph.inputs, other.inputs):
        if name is None or other_name is None:
            yield f"it has {len(other.inputs)} inputs, not {len(graph.inputs)}"
            return
        ours, theirs = graph.values[name], other.values[other_name]
        if (ours.shape, ours.dtype, ours.nbytes) != (theirs.shape, theirs.dtype, theirs.nbytes):
            expected, actual = (f"{value.dtype}{list(value.shape)}" for value in (ours, theirs))
            yield f"its input {other_name!r} is {actual}, not {expected}"


def _differing_operations(graph: Graph, other: Graph, called: tuple[str, str]) -> Iterator[str]:
    rewritten = _rewritten(graph) | _rewritten(other)
    for mine, theirs, who in ((graph, other, called[0]), (other, graph, called[1])):
        for name, operation in mine.operations.items():
            counterpart = theirs.operations.get(name)
            alike = counterpart is not None and (counterpart.target, counterpart.module_path) == (
                operation.target,
                operation.module_path,
            )
            if not alike and operation.module_path not in rewritten:
                where = f" of {operation.module_path!r}" if operation.module_path else ""
                yield f"only {who} has {operation.target}{where}"


def _rewritten(graph: Graph) -> set[str]:
    """Return the modules in which weights are read in parts, or less is saved for the backward pass."""
    parts = {part.name for part in graph.parts}
    return {
        operation.module_path
        for operation in graph.operations.values()
        if operation.repeats or operation.offloads or not parts.isdisjoint(operation.inputs)
    }
