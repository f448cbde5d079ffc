"""Nodes that are recomputed, selectively and as a whole."""

from __future__ import annotations

from operator import getitem
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from graphplan.passes.training.recompute import recompute, repeated
from graphplan.passes.training.segments import segments_of

aten = torch.ops.aten


class Step:
    """A step of which operations of one layer save values; ``reads`` is a reader in the backward pass."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.w = self.graph.placeholder("x"), self.graph.placeholder("w")

    def add(self, target: Any, *args: Any, path: str = "layer") -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["nn_module_stack"] = {"": (path, torch.nn.Linear)}
        return node

    def reads(self, *saved: fx.Node) -> None:
        self.graph.call_function(aten.cat.default, (list(saved),)).meta["backward"] = True

    def capture(self) -> Any:
        self.graph.output(())
        return SimpleNamespace(graph=self.graph)


def test_selective_recomputation_repeats_no_matrix_product() -> None:
    step = Step()
    mm = step.add(aten.mm.default, step.x, step.w)
    gelu = step.add(aten.gelu.default, mm)
    view = step.add(aten.view.default, gelu, [-1])
    flat = step.add(aten.view.default, mm, [-1])
    step.reads(mm, view, flat)
    (segment,) = segments_of(step.capture())
    saved, again = repeated(segment, selectively=True)
    assert (saved, again) == ([view], {gelu, view})  # a view of what is kept frees nothing
    saved, again = repeated(segment)
    assert (set(saved), again) == ({mm, view, flat}, {mm, gelu, view, flat})


def test_selective_recomputation_reads_only_saved_values() -> None:
    """The product before the sum is not saved: recomputing it would take a product."""
    step = Step()
    mm = step.add(aten.mm.default, step.x, step.w)
    added = step.add(aten.add.Tensor, mm, step.x)
    normed, mean, rstd = _norm(step, added)
    step.reads(added, normed, mean, rstd)
    (segment,) = segments_of(step.capture())
    saved, again = repeated(segment, selectively=True)
    assert set(saved) == {normed, mean, rstd}
    assert again == {normed.args[0], normed, mean, rstd}


def test_selective_recomputation_reads_other_layers_values_only_if_saved() -> None:
    step = Step()
    kept, gone = (step.add(aten.mm.default, step.x, step.w, path="before") for _ in range(2))
    one, other = step.add(aten.relu.default, kept), step.add(aten.relu.default, gone)
    step.reads(kept, one, other)
    _, segment = segments_of(step.capture())
    saved, again = repeated(segment, selectively=True)
    assert saved == [one]
    assert again == {one}


def test_backward_pass_reads_recomputed_values() -> None:
    step = Step()
    mm = step.add(aten.mm.default, step.x, step.w)
    gelu = step.add(aten.gelu.default, mm)
    step.reads(mm, gelu)
    capture = step.capture()
    recompute(capture, segments_of(capture), {"layer"})
    *_, copy, reader, _ = capture.graph.nodes
    assert (copy.target, copy.args, copy.meta["repeats"]) == (gelu.target, (mm,), gelu.name)
    assert reader.args == ([mm, copy],)


def test_recomputed_nodes_do_not_depend_on_other_layers() -> None:
    """A plan names its layers; the nodes to repeat are found in the step as traced."""
    step = Step()
    gone = step.add(aten.mm.default, step.x, step.w, path="before")
    one = step.add(aten.relu.default, gone, path="one")
    other = step.add(aten.relu.default, gone, path="other")
    step.reads(one, other)
    capture = step.capture()
    recompute(capture, segments_of(capture), {"other"})
    assert [node.meta["repeats"] for node in capture.graph.nodes if "repeats" in node.meta] == [one.name]


def _norm(step: Step, node: fx.Node) -> list[fx.Node]:
    norm = step.add(aten.native_layer_norm.default, node, [4], None, None, 1e-5)
    return [step.add(getitem, norm, index) for index in range(3)]
