"""Let the backward pass take its own views of weights, and not those of the forward pass.

Autograd saves the view that a layer has read. A weight that is streamed would stay where it is used from
the forward pass to the backward one only for that view's sake. Before and after::

    t = t(w)                       t = t(w)
    mm = mm(x, t)                  mm = mm(x, t)
    ...                            ...
    t_1 = t(t)                     t_again = t(w)
    mm_1 = mm(tangent, t_1)        t_1 = t(t_again)
                                   mm_1 = mm(tangent, t_1)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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
"""Operations whose results are views, of which a copy costs nothing."""


def read_weights_anew(capture: Capture) -> None:
    """Give each reader in the backward pass a view of a weight that is taken there, in place."""
    views = _views_of_weights(capture)
    order = {node: index for index, node in enumerate(capture.graph.nodes)}
    for view in views:
        view_anew(view, views, order)
    capture.graph.lint()


def view_anew(view: fx.Node, views: Collection[fx.Node], order: dict[fx.Node, int]) -> None:
    """Let the backward pass take a view of its own, of what the chain of views begins with."""
    chain = [view]
    while (base := chain[-1].args[0]) in views:
        assert isinstance(base, fx.Node)
        chain.append(base)
    make_again(chain[::-1], [view], order)


def make_again(
    nodes: Iterable[fx.Node], saved: Sequence[fx.Node], order: dict[fx.Node, int], *, repeats: bool = False
) -> None:
    """Copy nodes to before the backward pass first reads one of these, which it then takes from the copies.

    Args:
        nodes: in order.
        saved: those of them that the backward pass reads.
        order: node -> its place in the graph; the copies are added.
        repeats: whether the copies compute something again.
    """
    readers = [user for node in saved for user in backward_readers(node)]
    if not readers:
        return
    first = min(readers, key=order.__getitem__)
    copied: dict[fx.Node, fx.Node] = {}
    with first.graph.inserting_before(first):
        for node in nodes:
            made = copied[node] = first.graph.node_copy(node, lambda n: copied.get(n, n))
            made.meta = {**node.meta, "backward": True, "forward": node.name}
            made.meta.update({"repeats": node.name} if repeats else {})
            order[made] = order[first]
    for node in saved:
        for reader in backward_readers(node):  # in order: plans are the same in every process
            reader.replace_input_with(node, copied[node])


def backward_readers(node: fx.Node) -> list[fx.Node]:
    """What reads it in the backward pass."""
    return [user for user in node.users if user.meta.get("backward")]


def _views_of_weights(capture: Capture) -> dict[fx.Node, None]:
    """Views of weights that nothing writes to, in order."""
    found: dict[fx.Node, None] = {}
    for node in capture.graph.nodes:
        if node.op != "call_function" or node.target not in VIEWS or node.meta.get("backward"):
            continue
        base = node.args[0]
        if isinstance(base, fx.Node) and (base in found or base.name in capture.weights):
            found[node] = None
    return found
