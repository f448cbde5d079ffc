"""The folded order of a training step, and placements that are searched in it."""

from __future__ import annotations

from placements import cards

from graphplan.devices.topology import CPU
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.folding import fold, folded_order
from graphplan.passes.placement.problem import Problem

MIB = 1 << 20
LAYERS = 8


def step(layers: int = LAYERS) -> Graph:
    """A stack of layers with a weight, a gradient and saved values each."""
    operations, values, last = [], [Value("x", MIB, MIB), Value("t", 64, 64)], "x"
    for i in range(layers):
        operations.append(Operation(f"a{i}", "mm", (last, f"w{i}"), (f"a{i}",), flops=10**9))
        values.append(Value(f"a{i}", MIB, MIB))
        last = f"a{i}"
    tangent = "t"
    for i in reversed(range(layers)):
        saved = f"a{i - 1}" if i else "x"
        made = (f"b{i}", f"g{i}")
        inputs = (tangent, f"w{i}", saved)
        operations.append(
            Operation(f"b{i}", "mm", inputs, made, flops=2 * 10**9, backward=True, forward=f"a{i}")
        )
        values += [Value(f"b{i}", MIB, MIB), Value(f"g{i}", MIB, MIB, gradient_of=f"w{i}")]
        tangent = f"b{i}"
    weights = [Weight(f"w{i}", 4 * MIB, beside=(4 * MIB,)) for i in range(layers)]
    return Graph(operations, values, weights, ["x", "t"], [last])


def test_backward_operations_follow_their_forward_operations() -> None:
    graph = step()
    assert graph.trains
    assert folded_order(graph)[:4] == ["a0", "b0", "a1", "b1"]
    assert set(fold(Problem(graph, cards(2), CPU)).graph.together) == {
        frozenset({f"a{i}", f"b{i}"}) for i in range(LAYERS)
    }


def test_backward_with_other_allowed_devices_is_not_folded() -> None:
    problem = Problem(step(), cards(2), CPU, allowed={"b0": frozenset({1})})
    assert frozenset({"a0", "b0"}) not in fold(problem).graph.together


def test_backward_pass_is_cut_at_the_same_layer() -> None:
    # contiguous segments of the order in which it runs would have all weights of one pass elsewhere
    graph = step()
    topology = cards(2, memory=46 * MIB)
    found = place(Problem(graph, topology, CPU)).evaluation
    devices = found.assignment.operations
    assert all(devices[f"a{i}"] == devices[f"b{i}"] for i in range(LAYERS))
    moved = [step.value for step in found.schedule.moves() if step.kind == "activation"]
    assert len(moved) <= 3


def test_warm_start_with_split_backward_is_not_worsened() -> None:
    problem = Problem(step(5), cards(2, memory=57 * MIB // 2), CPU)
    known = place(problem).evaluation
    devices = known.assignment.operations
    assert any(devices[f"a{i}"] != devices[f"b{i}"] for i in range(5))
    assert place(problem, warm_start=known.assignment).evaluation.seconds <= known.seconds
