"""Whether two graphs are of one call of one model, and what tells them apart if they are not.

Budgets and devices change what is computed in two ways only: weights are read in parts where no device holds
them, and a training step saves less, so that operations are repeated or keep values on the CPU. Operations
that only one graph has are looked for in the modules where one of the graphs does so.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Weight


def graph_difference(graph: Graph, other: Graph, called: tuple[str, str] = ("this plan", "the other")) -> str:
    """What tells the call of ``other`` from that of ``graph``, in words; empty where it is the same."""
    return next(_differences(graph, other, called), "")


def _differences(graph: Graph, other: Graph, called: tuple[str, str]) -> Iterator[str]:
    if graph.trains != other.trains:
        kinds = ("a forward pass", "a training step")
        yield f"it is of {kinds[other.trains]}, not of {kinds[graph.trains]}"
    yield from _unlike_weights(graph, other, called)
    yield from _unlike_inputs(graph, other)
    yield from _unlike_operations(graph, other, called)


def _unlike_weights(graph: Graph, other: Graph, called: tuple[str, str]) -> Iterator[str]:
    here, there = _own(graph), _own(other)
    for name in sorted(here.keys() ^ there.keys()):
        yield f"only {called[name not in here]} has the weight {name!r}"
    for name in (name for name in here if name in there):
        ours, theirs = (f"{one.dtype}{list(one.shape)}" for one in (here[name], there[name]))
        if ours != theirs:
            yield f"{name!r} is {theirs} in {called[1]}, and {ours} in {called[0]}"


def _own(graph: Graph) -> dict[str, Weight]:
    """The weights of the model, by all of their names; whole ones, where a plan reads them in parts."""
    own = (weight for weight in graph.weights.values() if weight.kind in ("parameter", "buffer"))
    return {name: weight for weight in own for name in weight.names or (weight.name,)}


def _unlike_inputs(graph: Graph, other: Graph) -> Iterator[str]:
    for name, beside in zip_longest(graph.inputs, other.inputs):
        if name is None or beside is None:
            yield f"it has {len(other.inputs)} inputs, not {len(graph.inputs)}"
            return
        ours, theirs = graph.values[name], other.values[beside]
        if (ours.shape, ours.dtype, ours.nbytes) != (theirs.shape, theirs.dtype, theirs.nbytes):
            asked, given = (f"{one.dtype}{list(one.shape)}" for one in (ours, theirs))
            yield f"its input {beside!r} is {given}, not {asked}"


def _unlike_operations(graph: Graph, other: Graph, called: tuple[str, str]) -> Iterator[str]:
    rewritten = _rewritten(graph) | _rewritten(other)
    for one, another, who in ((graph, other, called[0]), (other, graph, called[1])):
        for name, operation in one.operations.items():
            known = another.operations.get(name)
            alike = known is not None and (known.target, known.module_path) == (
                operation.target,
                operation.module_path,
            )
            if not alike and operation.module_path not in rewritten:
                where = f" of {operation.module_path!r}" if operation.module_path else ""
                yield f"only {who} has {operation.target}{where}"


def _rewritten(graph: Graph) -> set[str]:
    """Modules in which weights are read in parts, or less is saved for the backward pass."""
    parts = {part.name for part in graph.parts}
    return {
        operation.module_path
        for operation in graph.operations.values()
        if operation.repeats or operation.offloads or not parts.isdisjoint(operation.inputs)
    }
