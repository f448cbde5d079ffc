"""The choice of segments that save less."""

from __future__ import annotations

import torch
from torch import fx

from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value
from graphplan.passes.training.knapsack import Item, Savings, cheapest, count_to_free, freed_bytes, items_of
from graphplan.passes.training.segments import ModuleSegment

CHEAP = [Item(f"layers.{i}", "fully", 100, 1.0) for i in range(4)]
DEAR = Item("head", "offloaded", 100, 9.0)


def test_cheapest_segments_save_first_and_equal_ones_evenly() -> None:
    items = [DEAR, *CHEAP]
    assert cheapest(items, 0) == Savings()
    assert cheapest(items, 2) == Savings(fully=("layers.1", "layers.3"))
    assert cheapest(items, 4) == Savings(fully=tuple(item.path for item in CHEAP))
    assert cheapest(items, 5) == Savings(fully=tuple(item.path for item in CHEAP), offloaded=("head",))


def test_last_of_equally_priced_steps_counts() -> None:
    """Rounding may put the later of two steps first."""
    items = [Item("layer", "selectively", 100, 1.0 + 1e-12), Item("layer", "fully", 100, 1.0)]
    assert cheapest(items, 2) == Savings(fully=("layer",))


def test_count_to_free_reaches_the_requested_bytes() -> None:
    items = [DEAR, *CHEAP]
    assert [count_to_free(items, nbytes) for nbytes in (-1, 0, 1, 100, 101, 500, 501)] == [
        0,
        0,
        1,
        1,
        2,
        5,
        5,
    ]
    assert [freed_bytes(items, count) for count in range(6)] == [0, 100, 200, 300, 400, 500]


def test_equal_segments_take_equally_long() -> None:
    """Sums in another order differ in their last bits: segments that do are not spread evenly."""
    traced, count = fx.Graph(), 50
    seconds = {f"n{i}": 0.1 * i**3 for i in range(count)}
    segments = []
    for path in ("layers.0", "layers.1", "layers.2"):
        nodes = []
        for _ in range(count):
            node = traced.call_function(torch.ops.aten.relu.default, (nodes[-1] if nodes else None,))
            traced.call_function(torch.ops.aten.relu.default, (node,)).meta["backward"] = True
            nodes.append(node)
        segments.append(ModuleSegment(path, tuple(nodes), frozenset(nodes)))
    order = {node.name: f"n{i % count}" for i, node in enumerate(n for s in segments for n in s.nodes)}
    graph = Graph([Operation(n, "relu", (), (n,)) for n in order], [Value(n, 4) for n in order])
    items = items_of(segments, graph, lambda name: seconds[order[name]], None)
    assert len({item.seconds for item in items}) == 1
