"""The graph of a step whose loss is computed in parts."""

from __future__ import annotations

from operator import getitem
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from graphplan.capture.captured_graph import Capture
from graphplan.passes.frontend.fx_nodes import target_name
from graphplan.passes.training.loss_parts import LossParts, count_parts, loss_in_parts

aten = torch.ops.aten


class Step:
    """A training step of a linear layer and its loss: 6 rows of 4 numbers, 10 classes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        shapes = {"x": (6, 4), "w": (10, 4), "tangent": ()}
        self.x, self.w, self.tangent = (self.place(n, torch.empty(s, dtype=dtype)) for n, s in shapes.items())
        self.target = self.place("target", torch.zeros(6, dtype=torch.int64))
        self.backward = False

    def place(self, name: str, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def add(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=target_name(target))
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda one: one.meta["val"]))
        node.meta |= {"backward": True} if self.backward else {}
        return node

    def loss(self) -> fx.Node:
        self.logits = self.add(aten.mm.default, self.x, self.add(aten.t.default, self.w))
        self.logp = self.add(aten._log_softmax.default, self.logits, 1, False)
        self.nll = self.add(aten.nll_loss_forward.default, self.logp, self.target, None, 1, -100)
        return self.add(getitem, self.nll, 0)

    def gradient(self) -> fx.Node:
        total = self.add(getitem, self.nll, 1)
        self.backward = True
        arguments = (self.tangent, self.logp, self.target, None, 1, -100, total)
        gradient = self.add(aten.nll_loss_backward.default, *arguments)
        dtype = self.logp.meta["val"].dtype
        return self.add(aten._log_softmax_backward_data.default, gradient, self.logp, 1, dtype)

    def capture(self, *results: fx.Node) -> Capture:
        self.graph.output(results)
        module = fx.GraphModule(nn.Module(), self.graph)
        return Capture(module, {"w": "w"}, {}, ("x", "target"), None, None, "export")  # type: ignore[arg-type]


def text(capture: Capture) -> list[str]:
    """The operations of a graph, a line each; those of the backward pass begin with a star."""
    nodes = [node for node in capture.graph.nodes if node.op == "call_function"]
    return [
        f"{'* ' * bool(node.meta.get('backward'))}{node.name} = "
        f"{target_name(node.target).partition('.')[0]}({', '.join(map(str, node.args))})"
        for node in nodes
    ]


def whole(dtype: torch.dtype = torch.float32) -> Capture:
    step = Step(dtype)
    loss, gradient = step.loss(), step.gradient()
    by_x = step.add(aten.mm.default, gradient, step.w)
    by_w = step.add(aten.mm.default, step.add(aten.t.default, gradient), step.x)
    return step.capture(loss, by_x, by_w)


PARTS = """
t = t(w)
x_rows_0 = slice(x, 0, 0, 3)
mm_part_0 = mm(x_rows_0, t)
_log_softmax_part_0 = _log_softmax(mm_part_0, 1, False)
target_rows_0 = slice(target, 0, 0, 3)
loss_part_0 = nll_loss_forward(_log_softmax_part_0, target_rows_0, None, 2, -100)
nll_loss_forward_0_part_0 = getitem(loss_part_0, 0)
nll_loss_forward_1_part_0 = getitem(loss_part_0, 1)
x_rows_1 = slice(x, 0, 3, 6)
mm_part_1 = mm(x_rows_1, t)
_log_softmax_part_1 = _log_softmax(mm_part_1, 1, False)
target_rows_1 = slice(target, 0, 3, 6)
loss_part_1 = nll_loss_forward(_log_softmax_part_1, target_rows_1, None, 2, -100)
nll_loss_forward_0_part_1 = getitem(loss_part_1, 0)
nll_loss_forward_sum = add(nll_loss_forward_0_part_0, nll_loss_forward_0_part_1)
nll_loss_forward_1_part_1 = getitem(loss_part_1, 1)
nll_loss_forward_sum_1 = add(nll_loss_forward_1_part_0, nll_loss_forward_1_part_1)
loss_mean = div(nll_loss_forward_sum, nll_loss_forward_sum_1)
* x_rows_2 = slice(x, 0, 0, 3)
* t_2 = t(w)
* mm_again_0 = mm(x_rows_2, t_2)
* _log_softmax_again_0 = _log_softmax(mm_again_0, 1, False)
* target_rows_2 = slice(target, 0, 0, 3)
* nll_loss_backward_part_0 = nll_loss_backward(tangent, _log_softmax_again_0, target_rows_2, None, 1, -100, \
nll_loss_forward_sum_1)
* _log_softmax_backward_data_part_0 = _log_softmax_backward_data(nll_loss_backward_part_0, \
_log_softmax_again_0, 1, torch.float32)
* mm_1_part_0 = mm(_log_softmax_backward_data_part_0, w)
* t_1_part_0 = t(_log_softmax_backward_data_part_0)
* x_rows_3 = slice(x, 0, 0, 3)
* mm_2_part_0 = mm(t_1_part_0, x_rows_3)
* x_rows_4 = slice(x, 0, 3, 6)
* mm_again_1 = mm(x_rows_4, t_2)
* _log_softmax_again_1 = _log_softmax(mm_again_1, 1, False)
* target_rows_3 = slice(target, 0, 3, 6)
* nll_loss_backward_part_1 = nll_loss_backward(tangent, _log_softmax_again_1, target_rows_3, None, 1, -100, \
nll_loss_forward_sum_1)
* _log_softmax_backward_data_part_1 = _log_softmax_backward_data(nll_loss_backward_part_1, \
_log_softmax_again_1, 1, torch.float32)
* mm_1_part_1 = mm(_log_softmax_backward_data_part_1, w)
* t_1_part_1 = t(_log_softmax_backward_data_part_1)
* x_rows_5 = slice(x, 0, 3, 6)
* mm_2_part_1 = mm(t_1_part_1, x_rows_5)
* mm_2 = add(mm_2_part_0, mm_2_part_1)
* mm_1 = cat([mm_1_part_0, mm_1_part_1])
"""


def test_rows_are_joined_and_sums_added() -> None:
    assert text(loss_in_parts(whole(), LossParts(2))) == PARTS.strip().splitlines()


def test_sums_in_half_precision_are_in_float32() -> None:
    parts = loss_in_parts(whole(torch.bfloat16), LossParts(3))
    sums = [node for node in parts.graph.nodes if node.target is aten.add.Tensor]
    assert len(sums) == 6  # of losses, counts and a gradient
    assert {node.meta["val"].dtype for node in sums} == {torch.float32}
    results = parts.graph.output_node().args[0]
    assert [one.meta["val"].dtype for one in results] == [torch.bfloat16] * 3


def test_values_of_parts_are_no_larger_than_others() -> None:
    assert count_parts(whole(), ()) == 2  # 240 bytes of logits; of 160 and 96 of gradients


def test_parts_are_limited_by_rows_and_overheads() -> None:
    step = Step()
    capture = step.capture(step.loss())  # all other values are numbers
    assert count_parts(capture, ()) == 6
    with patch("graphplan.passes.training.loss_parts._MOST", 4):
        assert count_parts(capture, ()) == 4


def test_named_operation_keeps_a_loss_whole() -> None:
    assert count_parts(whole(), {"_log_softmax"}) == 1


def test_sum_of_each_row_keeps_a_loss_whole() -> None:
    step = Step()
    loss, gradient = step.loss(), step.gradient()
    total = step.add(aten.sum.dim_IntList, step.add(aten.t.default, gradient), [0])
    assert count_parts(step.capture(loss, total), ()) == 1


@pytest.mark.parametrize("reader", [aten.sum.default, aten.relu_.default])
def test_other_readers_keep_a_loss_whole(reader: Any) -> None:
    step = Step()
    loss, gradient = step.loss(), step.gradient()
    capture = step.capture(loss, step.add(reader, gradient))
    assert loss_in_parts(capture, LossParts(2)) is capture
    assert count_parts(capture, ()) == 1


def test_target_that_depends_on_logits_keeps_a_loss_whole() -> None:
    step = Step()
    logits = step.add(aten.mm.default, step.x, step.add(aten.t.default, step.w))
    step.target = step.add(aten.argmax.default, logits, 1)
    step.logp = step.add(aten._log_softmax.default, logits, 1, False)
    step.nll = step.add(aten.nll_loss_forward.default, step.logp, step.target, None, 1, -100)
    capture = step.capture(step.add(getitem, step.nll, 0), step.gradient())
    assert loss_in_parts(capture, LossParts(2)) is capture


def test_mean_in_float16_stays_whole() -> None:
    """The sum of a part may be larger than any number of float16, though the mean is not."""
    assert count_parts(whole(torch.float16), ()) == 1
