"""What is computed again, selectively and as a whole."""

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


def test_selectively_no_product_is_computed_again() -> None:
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


def test_selectively_only_what_is_saved_is_read() -> None:
    """The product before the sum is not kept: to have it again would take a product."""
    step = Step()
    mm = step.add(aten.mm.default, step.x, step.w)
    added = step.add(aten.add.Tensor, mm, step.x)
    normed, mean, rstd = _norm(step, added)
    step.reads(added, normed, mean, rstd)
    (segment,) = segments_of(step.capture())
    saved, again = repeated(segment, selectively=True)
    assert set(saved) == {normed, mean, rstd}
    assert again == {normed.args[0], normed, mean, rstd}


def test_selectively_what_another_layer_makes_is_read_only_where_it_is_saved() -> None:
    step = Step()
    kept, gone = (step.add(aten.mm.default, step.x, step.w, path="before") for _ in range(2))
    one, other = step.add(aten.relu.default, kept), step.add(aten.relu.default, gone)
    step.reads(kept, one, other)
    _, segment = segments_of(step.capture())
    saved, again = repeated(segment, selectively=True)
    assert saved == [one]
    assert again == {one}


def test_the_backward_pass_reads_what_is_computed_again() -> None:
    step = Step()
    mm = step.add(aten.mm.default, step.x, step.w)
    gelu = step.add(aten.gelu.default, mm)
    step.reads(mm, gelu)
    capture = step.capture()
    recompute(capture, segments_of(capture), {"layer"})
    *_, copy, reader, _ = capture.graph.nodes
    assert (copy.target, copy.args, copy.meta["repeats"]) == (gelu.target, (mm,), gelu.name)
    assert reader.args == ([mm, copy],)


def test_what_one_layer_computes_again_does_not_depend_on_the_others() -> None:
    """A plan names its layers: what is repeated of each is found from the step as it was traced."""
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
