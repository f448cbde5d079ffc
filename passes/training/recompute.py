"""Compute segments of the forward pass again in the backward pass, instead of saving what they make.

What a segment reads stays saved; what it makes is freed in the forward pass and made again right before its
backward pass (Chen et al., "Training deep nets with sublinear memory cost", 2016). Before and after, for a
segment of ``mm`` and ``silu``::

    mm = mm(x, w)                          mm = mm(x, w)
    silu = silu(mm)                        silu = silu(mm)
    ...                                    ...
    silu_backward = f(tangent, mm)         mm_again = mm(x, w)                backward
                                           silu_backward = f(tangent, mm_again)

Random draws, and what is written to in place, are not repeated: their results stay saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from graphplan.capture.captured_graph import Capture
from graphplan.passes.training.segments import ModuleSegment, saved_nodes


def recompute(capture: Capture, paths: Iterable[str], segments: Sequence[ModuleSegment]) -> None:
    """Compute some segments again, in place.

    Args:
        capture: of a training step.
        paths: of the segments to compute again.
        segments: of the capture.
    """
    wanted = set(paths)
    order = {node: index for index, node in enumerate(capture.graph.nodes)}
    for segment in segments:
        if segment.path in wanted:
            _recompute(capture.graph, segment, order)
    capture.graph.lint()


def _recompute(graph: fx.Graph, segment: ModuleSegment, order: dict[fx.Node, int]) -> None:
    saved, again = repeated(segment)
    readers = [user for node in saved for user in node.users if user.meta.get("backward")]
    if not readers:
        return
    first = min(readers, key=order.__getitem__)
    copied: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(first):
        for node in segment.nodes:
            if node in again:
                made = graph.node_copy(node, lambda n: copied.get(n, n))
                made.meta = {**node.meta, "backward": True, "forward": node.name, "repeats": node.name}
                order[made] = order[first]
                copied[node] = made
    for node in saved:
        for user in list(node.users):
            if user.meta.get("backward") and user not in copied.values():
                user.replace_input_with(node, copied[node])


def repeated(segment: ModuleSegment) -> tuple[list[fx.Node], set[fx.Node]]:
    """What a segment does not save if it is computed again, and what is computed for that."""
    saved = [node for node in saved_nodes(segment) if node in segment.repeatable]
    return saved, _needed(segment, saved)


def _needed(segment: ModuleSegment, saved: Sequence[fx.Node]) -> set[fx.Node]:
    """What is to be computed again to have these again."""
    found: set[fx.Node] = set()
    pending = list(saved)
    while pending:
        node = pending.pop()
        if node in found or node not in segment.repeatable:
            continue
        found.add(node)
        pending += node.all_input_nodes
    return found
