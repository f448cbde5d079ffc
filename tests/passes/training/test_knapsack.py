"""Which segments save less."""

from __future__ import annotations

from graphplan.passes.training.knapsack import Item, Savings, cheapest

CHEAP = [Item(f"layers.{i}", True, 100, 1.0) for i in range(4)]
DEAR = Item("head", False, 100, 9.0)


def test_the_cheapest_bytes_are_freed_first_and_equal_segments_evenly() -> None:
    items = [DEAR, *CHEAP]
    assert cheapest(items, 0.0) == Savings()
    assert cheapest(items, 0.4) == Savings(again=("layers.1", "layers.3"))
    assert cheapest(items, 0.3) == Savings(again=("layers.1", "layers.3"))  # one would free too little
    assert cheapest(items, 0.8) == Savings(again=tuple(item.path for item in CHEAP))
    assert cheapest(items, 1.0) == Savings(tuple(item.path for item in CHEAP), ("head",))
