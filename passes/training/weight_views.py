"""Let the backward pass take its own views of weights, instead of those of the forward pass.

Autograd saves the view that a layer has read. Only for that view a streamed weight would stay on its device
from the forward pass to the backward pass. Before and after::

    t = t(w)                       t = t(w)
    mm = mm(x, t)                  mm = mm(x, t)
    ...                            ...
    t_1 = t(t)                     t_again = t(w)
    mm_1 = mm(tangent, t_1)        t_1 = t(t_again)
                                   mm_1 = mm(tangent, t_1)
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import torch
from torch import fx

from graphplan.capture.captured_graph import Capture

aten = torch.ops.aten

VIEWS = {
    aten.t.default,
    aten.view.default,
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.slice.Tensor,
    aten.select.int,
    aten.alias.default,
    aten.detach.default,
}
"""Operations whose results are views, so that a second one costs nothing."""


def duplicate_weight_views(capture: Capture) -> None:
    """Let the backward pass take its own views of weights, in place."""
    views = _views_of_weights(capture)
    order = {node: index for index, node in enumerate(capture.graph.nodes)}
    for view in views:
        duplicate_view(view, views, order)
    capture.graph.lint()


def duplicate_view(view: fx.Node, views: Container[fx.Node], order: dict[fx.Node, int]) -> None:
    """Let the backward pass take a view of its own, from the base of the chain of ``views``."""
    *chain, _ = view_chain(view, views)
    duplicate_for_backward(chain[::-1], [view], order)


def view_chain(node: fx.Node, views: Container[fx.Node]) -> list[fx.Node]:
    """Return the node, its base, the base of that, and so on, to the first not among ``views``."""
    chain = [node]
    while chain[-1] in views:
        base = chain[-1].args[0]
        assert isinstance(base, fx.Node)
        chain.append(base)
    return chain


def duplicate_for_backward(
    nodes: Iterable[fx.Node], saved: Sequence[fx.Node], order: dict[fx.Node, int], *, repeats: bool = False
) -> None:
    """Copy nodes to right before the first backward reader of ``saved``; backward readers use the copies.

    Args:
        nodes: the nodes to copy, in order.
        saved: those of them that the backward pass reads.
        order: node -> its position in the graph; the copies are added.
        repeats: whether the copies are recomputation, not only views.
    """
    readers = [user for node in saved for user in backward_readers(node)]
    if not readers:
        return
    first = min(readers, key=order.__getitem__)
    copied: dict[fx.Node, fx.Node] = {}
    with first.graph.inserting_before(first):
        for node in nodes:
            copy = copied[node] = first.graph.node_copy(node, lambda n: copied.get(n, n))
            copy.meta = {**node.meta, "backward": True, "forward": node.name}
            if repeats:
                copy.meta["repeats"] = node.name
            order[copy] = order[first]
    for node in saved:
        for reader in backward_readers(node):  # in order, so that plans are equal in all processes
            reader.replace_input_with(node, copied[node])


def backward_readers(node: fx.Node) -> list[fx.Node]:
    """Return the readers of a node in the backward pass."""
    return [user for user in node.users if user.meta.get("backward")]


def _views_of_weights(capture: Capture) -> dict[fx.Node, None]:
    """Return the views of weights that the forward pass takes, in order."""
    views: dict[fx.Node, None] = {}
    for node in capture.graph.nodes:
        if node.op != "call_function" or node.target not in VIEWS or node.meta.get("backward"):
            continue
        base = node.args[0]
        if isinstance(base, fx.Node) and (base in views or base.name in capture.weights):
            views[node] = None
    return views
