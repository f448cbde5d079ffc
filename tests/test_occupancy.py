"""What devices hold while operations run: values wait where they were made until somebody reads them."""

from __future__ import annotations

from graphplan import Graph, Operation, Value
from graphplan.passes.occupancy import Held, Occupancy

UNITS = {"a": 0, "b": 1, "c": 2, "d": 3}


def graph(late: tuple[str, ...]) -> Graph:
    """A chain of four operations, of which the last also reads ``late``."""
    reads = {"a": ("x",), "b": ("ya",), "c": ("yb",), "d": ("yc", *late)}
    operations = [Operation(name, "op", inputs, (f"y{name}",), (), 1, 1) for name, inputs in reads.items()]
    sizes = {"x": 512, "ya": 1024, "yb": 2048, "yc": 3072, "yd": 4096}
    values = [Value(name, nbytes, nbytes) for name, nbytes in sizes.items()]
    return Graph(operations, values, [], ["x"], ["yd"])


def held(graph: Graph, operation: str) -> dict[tuple[int, ...], tuple[frozenset[int], ...]]:
    found: list[Held] = Occupancy(graph, UNITS).during(operation, "cuda", unread=True)
    return {one.nbytes: one.units for one in found}


def test_what_nobody_has_read_yet_is_where_it_was_made() -> None:
    """``ya`` is read by ``d`` only, which has it copied when it begins."""
    waiting = Graph(
        [
            Operation("a", "op", ("x",), ("ya",), (), 1, 1),
            Operation("b", "op", ("x",), ("yb",), (), 1, 1),
            Operation("c", "op", ("yb",), ("yc",), (), 1, 1),
            Operation("d", "op", ("ya", "yc"), ("yd",), (), 1, 1),
        ],
        [Value(name, 1024, 1024) for name in ("x", "ya", "yb", "yc", "yd")],
        [],
        ["x"],
        ["yd"],
    )
    occupancy = Occupancy(waiting, UNITS)
    for operation in ("b", "c"):
        unread = [
            one for one in occupancy.during(operation, "cuda", unread=True) if one.units == (frozenset({0}),)
        ]
        assert [one.nbytes for one in unread] == [(1024,)]


def test_what_has_been_read_may_be_elsewhere() -> None:
    """``ya`` is read by ``b``, which may have taken the only copy that ``d`` needs with it."""
    found = held(graph(late=("ya",)), "c")
    assert found[1024,] == (frozenset({0, 3}), frozenset({1, 3}))
