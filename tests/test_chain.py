from __future__ import annotations

from itertools import pairwise

from builders import chain

from graphplan import Graph, Operation, Value, Weight
from graphplan.device import read_max_memory
from graphplan.passes.chain import Chain

SPEC = read_max_memory({0: 1 << 30}).devices[0]


def test_cuts_are_where_little_crosses() -> None:
    values = [Value("x", 512, 512), Value("a", 512, 512), Value("b", 8192, 8192), Value("c", 512, 512)]
    operations = [
        Operation("a", "f", ("x",), ("a",)),
        Operation("b", "f", ("a",), ("b",)),
        Operation("c", "f", ("b",), ("c",)),
    ]
    found = Chain(Graph(operations, values, [], ["x"], ["c"]), SPEC)
    assert list(found.crossing) == [0, 512, 8192, 0]
    assert list(found.positions(3)) == [0, 1, 3]


def test_cuts_are_spread_over_the_weights() -> None:
    # seen on T5-11B: the decoder's cuts are cheaper, and the encoder was left whole
    values, weights, operations, previous = [Value("x", 512, 512)], [], [], "x"
    for i in range(200):
        nbytes = 8192 if i < 100 else 512
        values.append(Value(f"v{i}", nbytes, nbytes))
        weights.append(Weight(f"w{i}", 4096))
        operations.append(Operation(f"v{i}", "f", (previous, f"w{i}"), (f"v{i}",)))
        previous = f"v{i}"
    positions = Chain(Graph(operations, values, weights, ["x"], [previous]), SPEC).positions(40)
    assert len(positions) <= 40
    assert max(b - a for a, b in pairwise(positions)) <= 12


def test_groups_are_not_cut() -> None:
    plain = chain(4)
    parts = (plain.operations.values(), plain.values.values(), plain.weights.values(), ["x"], ["v3"])
    tied = Chain(Graph(*parts, [frozenset({"v1", "v2"})]), SPEC)
    assert list(tied.positions(10)) == [0, 1, 3, 4]
    assert list(tied.positions(10, part_groups=True)) == [0, 1, 2, 3, 4]
