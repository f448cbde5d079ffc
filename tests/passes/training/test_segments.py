"""Nodes that a training step may recompute."""

from __future__ import annotations

from operator import attrgetter, getitem
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from graphplan.passes.training.segments import segments_of
from graphplan.passes.training.weight_views import duplicate_for_backward

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("view", "arguments"),
    [("view.default", ([-1],)), ("diagonal.default", ()), ("unsafe_split.Tensor", (1,))],
)
def test_readers_of_later_written_values_are_not_repeatable(view: str, arguments: tuple[Any, ...]) -> None:
    graph = fx.Graph()
    x, buffer = graph.placeholder("x"), graph.placeholder("buffer")

    def add(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["nn_module_stack"] = {"": ("layer", torch.nn.Linear)}
        return node

    first = add(aten.relu.default, x)
    before, scaled = add(aten.clone.default, first), add(aten.mul.Tensor, x, buffer)
    part = add(attrgetter(view)(aten), first, *arguments)
    add(aten.mul_.Tensor, add(getitem, part, 0) if "split" in view else part, 2)
    add(aten.add_.Tensor, buffer, 1)
    last = add(aten.relu.default, x)
    (segment,) = segments_of(SimpleNamespace(graph=graph))  # type: ignore[arg-type]  # all that is read
    assert segment.repeatable == {last}, (before, scaled)


def test_readers_take_copies_in_the_order_of_the_graph() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.relu.default, (graph.placeholder("x"),))
    readers = [graph.call_function(aten.relu.default, (node,)) for _ in range(100)]
    for reader in readers:
        reader.meta["backward"] = True
    duplicate_for_backward([node], [node], {one: index for index, one in enumerate(graph.nodes)})
    (copy,) = {reader.args[0] for reader in readers}
    assert isinstance(copy, fx.Node)
    assert copy is not node
    assert list(copy.users) == readers
