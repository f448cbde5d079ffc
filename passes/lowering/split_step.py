"""Cut a lowered training step in two: a graph of the forward pass and one of the backward pass.

The forward graph returns the results and the saved values; the backward graph takes the saved values, as a
list that it empties, and the gradients with respect to the results. Before and after::

    def forward(x, tangent):             def forward(x):
        w = self.w                           w = self.w
        mm = x @ w                           mm = x @ w
        loss = mm.sum()                      loss = mm.sum()
        grad = tangent.expand_as(mm)         return (loss,), (mm,)
        ...
        return (loss,)                   def backward(saved, tangent):
                                             mm = take_saved(saved, 0)
                                             grad = tangent.expand_as(mm)
                                             ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from graphplan.ir.lowered_ops import take_saved


def split_step(graph: fx.Graph, tangents: Sequence[str], results: int) -> tuple[fx.Graph, fx.Graph]:
    """Return the forward and the backward graph of a lowered training step.

    Args:
        graph: nodes of the backward pass have ``backward`` in their ``meta``.
        tangents: names of the placeholders of the backward pass.
        results: number of leading outputs that are the forward pass's; gradients of inputs follow.

    Returns:
        a graph from the inputs to a pair, results and saved values; and one from the saved values and the
        tangents to the gradients of inputs.
    """
    later = [n for n in graph.nodes if n.meta.get("backward") and n.op not in ("get_attr", "output")]
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, tuple)
    leading, of_inputs = outputs[:results], outputs[results:]
    backward_nodes = set(later)
    needed = [source for node in later for source in node.all_input_nodes]
    needed += [node for node in of_inputs if isinstance(node, fx.Node)]
    saved = [
        node
        for node in dict.fromkeys(needed)
        if node not in backward_nodes and node.op != "get_attr" and node.name not in tangents
    ]
    forward = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        is_forward = not node.meta.get("backward") or (
            node.op == "get_attr" and _is_read_by_forward(node, backward_nodes, leading)
        )
        if is_forward and node.op != "output" and node.name not in tangents:
            env[node] = forward.node_copy(node, env.__getitem__)
    forward.output((fx.map_arg(leading, env.__getitem__), tuple(env[node] for node in saved)))
    return forward, _backward(graph, later, saved, tangents, of_inputs)


def _is_read_by_forward(attribute: fx.Node, backward_nodes: set[fx.Node], results: Sequence[object]) -> bool:
    """Whether the forward pass reads an attribute."""
    return attribute in results or any(
        user not in backward_nodes and user.op != "output" for user in attribute.users
    )


def _backward(
    graph: fx.Graph,
    later: Sequence[fx.Node],
    saved: Sequence[fx.Node],
    tangents: Sequence[str],
    of_inputs: Sequence[Any],
) -> fx.Graph:
    backward = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    saved_list = backward.placeholder("saved")
    for node in graph.nodes:
        if node.name in tangents:
            env[node] = backward.placeholder(node.name)
            env[node].meta = dict(node.meta)  # describes the zeros that replace a missing gradient
    index_of = {node: index for index, node in enumerate(saved)}

    def find(node: fx.Node) -> fx.Node:
        if node not in env and node in index_of:  # right before its first reader
            env[node] = backward.call_function(take_saved, (saved_list, index_of[node]))
        elif node not in env:
            env[node] = backward.get_attr(str(node.target))
        return env[node]

    for node in later:
        for source in node.all_input_nodes:
            find(source)
        env[node] = backward.node_copy(node, find)
    backward.output(fx.map_arg(tuple(of_inputs), find))
    return backward
