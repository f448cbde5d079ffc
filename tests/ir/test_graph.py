from __future__ import annotations

import pytest
from builders import chain

from graphplan import Graph, Operation, Value, VerificationError, Weight


def test_text_form() -> None:
    assert str(chain(2)) == (
        "weights:\n"
        "  w0 : 4096 bytes\n"
        "  w1 : 4096 bytes\n"
        "inputs:\n"
        "  x : 1024 bytes\n"
        "operations:\n"
        "  v0 = linear(x, w0) : 1024 bytes, 1000000 FLOP  # layer0\n"
        "  v1 = linear(v0, w1) : 1024 bytes, 1000000 FLOP  # layer1\n"
        "outputs: v1"
    )


def test_text_form_of_views_and_writes() -> None:
    values = [Value("x", 64), Value("v", 0, alias_of="x"), Value("w", 0, alias_of="v")]
    operations = [
        Operation("v", "view", ("x",), ("v",)),
        Operation("w", "add_", ("v",), ("w",), mutates=("v",)),
    ]
    lines = str(Graph(operations, values, inputs=("x",), outputs=("w",))).splitlines()
    assert "  v = view(x) : 0 bytes, v is x" in lines
    assert "  w = add_(v) : 0 bytes, writes v, w is v" in lines


def test_edges_carry_values() -> None:
    graph = chain(3)
    assert list(graph.digraph.edges(data="values")) == [("v0", "v1", ("v0",)), ("v1", "v2", ("v1",))]
    copy = graph.to_networkx()
    copy.remove_node("v0")
    assert "v0" in graph.digraph


def test_dict_round_trip() -> None:
    graph = chain(3)
    assert Graph.from_dict(graph.to_dict()) == graph


def test_weight_bytes_and_flops_are_sums() -> None:
    graph = chain(3)
    assert (graph.weight_bytes, graph.flops) == (3 * 4096, 3_000_000)


def test_root_follows_views_of_views() -> None:
    values = [Value("a", 8, 8), Value("b", 0, 8, "a"), Value("c", 0, 8, "b")]
    operations = [Operation("a", "f", (), ("a",)), Operation("b", "view", ("a",), ("b",))]
    operations.append(Operation("c", "view", ("b",), ("c",)))
    assert Graph(operations, values).root("c") == "a"


@pytest.mark.parametrize(
    ("operation", "values", "message"),
    [
        (Operation("b", "f", ("nowhere",), ("b",)), [Value("b")], "reads 'nowhere' before it is made"),
        (Operation("b", "f", ("x",), ("x",)), [], "outputs 'x', which exists already"),
        (Operation("b", "f", ("x",), ("b",)), [], "not among the values"),
        (Operation("b", "f", (), ("b",), ("x",)), [Value("b")], "mutates 'x', which it does not read"),
        (Operation("b", "f", ("x", "x"), ("b",)), [Value("b")], "names an input twice"),
        (Operation("b", "f", ("x",), ("b",), flops=-1), [Value("b")], "negative size"),
        (Operation("b", "f", ("x",), ("b",)), [Value("b", -1)], "negative bytes"),
        (Operation("b", "f", ("x",), ("b",)), [Value("b", 1, 1, "x")], "with bytes of its own"),
        (Operation("b", "f", ("x",), ("b",)), [Value("b", 0, 1, "q")], "unknown 'q'"),
    ],
)
def test_verify_names_the_invalid_operation(operation: Operation, values: list[Value], message: str) -> None:
    graph = Graph([operation], [Value("x", 8, 8), *values], [], ["x"], [])
    with pytest.raises(VerificationError, match=message) as caught:
        graph.verify()
    assert "-> " in str(caught.value)


def test_verify_checks_outputs_groups_and_names() -> None:
    with pytest.raises(VerificationError, match="output 'q'"):
        Graph([], [Value("x")], [], ["x"], ["q"]).verify()
    with pytest.raises(VerificationError, match="unknown operations"):
        Graph([], [], [], [], [], [frozenset({"a", "b"})]).verify()
    with pytest.raises(VerificationError, match="share a name"):
        Graph([], [Value("x")], [Weight("x", 1)], ["x"]).verify()
