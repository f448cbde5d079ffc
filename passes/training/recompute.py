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
from graphplan.passes.training.weight_views import make_again


def recompute(capture: Capture, segments: Iterable[ModuleSegment]) -> None:
    """Compute these segments of a training step again, in place."""
    order = {node: index for index, node in enumerate(capture.graph.nodes)}
    for segment in segments:
        saved, again = repeated(segment)
        make_again([node for node in segment.nodes if node in again], saved, order, repeats=True)
    capture.graph.lint()


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
