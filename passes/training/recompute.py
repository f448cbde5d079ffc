"""Compute segments of the forward pass again in the backward pass, instead of saving what they make.

What a segment reads stays saved; what it makes is freed in the forward pass and made again right before its
backward pass (Chen et al., "Training deep nets with sublinear memory cost", 2016). Before and after, for a
segment of ``mm`` and ``silu``::

    mm = mm(x, w)                          mm = mm(x, w)
    silu = silu(mm)                        silu = silu(mm)
    ...                                    ...
    silu_backward = f(tangent, mm)         mm_again = mm(x, w)                backward
                                           silu_backward = f(tangent, mm_again)

Random draws, and what is written to in place, are not repeated: their results stay saved. Selectively, only
what needs no product of matrices is repeated, from what is saved beside it (Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from torch import fx

from graphplan.capture.captured_graph import Capture
from graphplan.capture.structure import reached
from graphplan.passes.frontend.flop_formulas import multiplies
from graphplan.passes.training.segments import ModuleSegment, is_view, saved_nodes
from graphplan.passes.training.weight_views import make_again


def recompute(
    capture: Capture, segments: Iterable[ModuleSegment], selectively: Container[str] = frozenset()
) -> None:
    """Compute these segments of a training step again, in place; those of some paths selectively."""
    order = {node: index for index, node in enumerate(capture.graph.nodes)}
    # all before the first change: copies of one segment read what another would then find saved
    found = [(segment, *repeated(segment, selectively=segment.path in selectively)) for segment in segments]
    for segment, saved, again in found:
        make_again([node for node in segment.nodes if node in again], saved, order, repeats=True)
    capture.graph.lint()


def repeated(segment: ModuleSegment, *, selectively: bool = False) -> tuple[list[fx.Node], set[fx.Node]]:
    """What a segment does not save if it is computed again, and what is computed for that."""
    saved = saved_nodes(segment)
    able = _cheap(segment, saved) if selectively else segment.repeatable
    freed = [node for node in saved if node in able and not (selectively and _is_of_kept(node, able))]
    return freed, _needed(able, freed, set(saved).difference(freed))


def _needed(able: Container[fx.Node], freed: Sequence[fx.Node], kept: Container[fx.Node]) -> set[fx.Node]:
    """What is to be computed again to have these again."""

    def again(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if node in able and node not in kept]

    return set(reached(again(freed), lambda node: again(node.all_input_nodes)))


def _cheap(segment: ModuleSegment, saved: Sequence[fx.Node]) -> set[fx.Node]:
    """What can be made again without a product of matrices, from what is saved in any case."""
    inside, found = set(segment.nodes), set[fx.Node]()
    at_hand = set(saved)
    for node in segment.nodes:
        outside = [one for one in node.all_input_nodes if one not in inside]
        there = all(
            one.op != "call_function" or any(u.meta.get("backward") for u in one.users) for one in outside
        )
        within = (one in at_hand for one in node.all_input_nodes if one in inside)
        if there and node in segment.repeatable and not multiplies(node.target) and all(within):
            found.add(node)
            at_hand.add(node)
    return found


def _is_of_kept(node: fx.Node, able: Container[fx.Node]) -> bool:
    """Whether it is a view of memory that stays."""
    while is_view(node) and node.args[0] in able:
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return is_view(node)
