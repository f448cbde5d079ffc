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
    graph = capture.graph
    views = _views_of_weights(capture)
    first = next((node for node in graph.nodes if node.meta.get("backward")), None)
    if first is None:
        return
    order = {node: index for index, node in enumerate(graph.nodes)}
    for view in views:
        readers = [user for user in view.users if user.meta.get("backward")]
        if readers:
            copy_for(view, sorted(readers, key=order.__getitem__), set(views))
    graph.lint()


def copy_for(view: fx.Node, readers: list[fx.Node], views: set[fx.Node]) -> None:
    """Copies of a chain of views for its readers in the backward pass, before the first of them."""
    chain = [view]
    while (base := chain[-1].args[0]) in views:
        assert isinstance(base, fx.Node)
        chain.append(base)
    copied: dict[fx.Node, fx.Node] = {}
    with view.graph.inserting_before(readers[0]):
        for node in reversed(chain):
            made = view.graph.node_copy(node, lambda n: copied.get(n, n))
            made.meta = {**node.meta, "backward": True, "forward": node.name}
            copied[node] = made
    for reader in readers:
        reader.replace_input_with(view, copied[view])


def _views_of_weights(capture: Capture) -> list[fx.Node]:
    """Views of weights that nothing writes to, in order."""
    found: dict[fx.Node, None] = {}
    for node in capture.graph.nodes:
        if node.op != "call_function" or node.target not in VIEWS or node.meta.get("backward"):
            continue
        base = node.args[0]
        if isinstance(base, fx.Node) and (base in found or base.name in capture.weights):
            found[node] = None
    return list(found)
