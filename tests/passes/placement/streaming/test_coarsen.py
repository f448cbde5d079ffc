"""Coarser macro-operations: the operations that they tie together."""

from __future__ import annotations

import pytest
from placements import CARD, HOST

from graphplan.devices.topology import CPU, Link, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.streaming.coarsen import coarsen

MIB = 1 << 20


def layers(count: int, *, casts: bool) -> Graph:
    """Each takes a view of its weight, or casts it, multiplies by that, and does two light operations."""
    made = 16 * MIB if casts else 0
    operations, values, previous = list[Operation](), [Value("x", 512, 512)], "x"
    for i in range(count):
        values.append(Value(f"view{i}", made, made or 8 * MIB, alias_of=None if casts else f"w{i}"))
        values += [Value(f"{name}{i}", 512, 512) for name in ("mm", "silu", "add")]
        operations += [
            Operation(f"view{i}", "to" if casts else "t", (f"w{i}",), (f"view{i}",), (), 0, made),
            Operation(f"mm{i}", "mm", (previous, f"view{i}"), (f"mm{i}",), (), 10**7, 8 * MIB),
            Operation(f"silu{i}", "silu", (f"mm{i}",), (f"silu{i}",), (), 1000, 1024),
            Operation(f"add{i}", "add", (f"silu{i}", previous), (f"add{i}",), (), 1000, 1536),
        ]
        previous = f"add{i}"
    weights = [Weight(f"w{i}", 8 * MIB, (f"w{i}",)) for i in range(count)]
    return Graph(operations, values, weights, ["x"], [previous])


@pytest.mark.parametrize("casts", [False, True])
def test_views_and_casts_of_weights_join_their_readers(casts: bool) -> None:
    """Alone they take little time on the CPU, and then a copy that is as large as the weight."""
    topology = Topology((CARD, HOST), {}, Link(5e9, 1e-5))
    tied = coarsen(Arrays(Problem(layers(40, casts=casts), topology, CPU)))
    group_of = {name: members for members in tied.graph.together for name in members}
    assert all(f"mm{i}" in group_of.get(f"view{i}", ()) for i in range(40))
