"""Recompute segments of the forward pass in the backward pass, instead of saving their values.

The inputs of a segment stay saved; its values are freed in the forward pass and recomputed right before its
backward pass (Chen et al., "Training deep nets with sublinear memory cost", 2016). Before and after, for a
segment of ``mm`` and ``silu``::

    mm = mm(x, w)                          mm = mm(x, w)
    silu = silu(mm)                        silu = silu(mm)
    ...                                    ...
    silu_backward = f(tangent, mm)         mm_again = mm(x, w)                backward
                                           silu_backward = f(tangent, mm_again)

Random draws, and values that are written to in place, are not recomputed but stay saved. Selective
recomputation repeats no matrix products, and starts from values that stay saved (Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from torch import fx

from graphplan.capture.captured_graph import Capture
from graphplan.capture.structure import reachable
from graphplan.passes.frontend.flop_formulas import multiplies
from graphplan.passes.training.segments import ModuleSegment, is_view, saved_nodes
from graphplan.passes.training.weight_views import duplicate_for_backward


def recompute(
    capture: Capture, segments: Iterable[ModuleSegment], selectively: Container[str] = frozenset()
) -> None:
    """Recompute these segments of a training step in place, those of paths in ``selectively`` in part."""
    order = {node: index for index, node in enumerate(capture.graph.nodes)}
    # find all before the first change: copies are readers, which would make more nodes count as saved
    repeats = [(segment, *repeated(segment, selectively=segment.path in selectively)) for segment in segments]
    for segment, saved, recomputed in repeats:
        duplicate_for_backward(
            [node for node in segment.nodes if node in recomputed], saved, order, repeats=True
        )
    capture.graph.lint()


def repeated(segment: ModuleSegment, *, selectively: bool = False) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return the nodes that a segment does not save if it is recomputed, and those that are recomputed."""
    saved = saved_nodes(segment)
    able = _cheap(segment, saved) if selectively else segment.repeatable
    freed = [node for node in saved if node in able and not (selectively and _views_saved_memory(node, able))]
    return freed, _needed(able, freed, set(saved).difference(freed))


def _needed(
    able: Container[fx.Node], freed: Sequence[fx.Node], still_saved: Container[fx.Node]
) -> set[fx.Node]:
    """Return the nodes to recompute for the values of ``freed``."""

    def recomputable(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if node in able and node not in still_saved]

    return set(reachable(recomputable(freed), lambda node: recomputable(node.all_input_nodes)))


def _cheap(segment: ModuleSegment, saved: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that can be recomputed without matrix products, from values saved in any case."""
    inside, cheap = set(segment.nodes), set[fx.Node]()
    available = set(saved)
    for node in segment.nodes:
        outside = [n for n in node.all_input_nodes if n not in inside]
        outer_ok = all(
            n.op != "call_function" or any(u.meta.get("backward") for u in n.users) for n in outside
        )
        inner_ok = (n in available for n in node.all_input_nodes if n in inside)
        if outer_ok and node in segment.repeatable and not multiplies(node.target) and all(inner_ok):
            cheap.add(node)
            available.add(node)
    return cheap


def _views_saved_memory(node: fx.Node, able: Container[fx.Node]) -> bool:
    """Whether a node is a view of memory that stays allocated."""
    while is_view(node) and node.args[0] in able:
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return is_view(node)
