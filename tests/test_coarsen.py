"""An order in pieces of one heavy operation each, for searches of streamed weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_beam import MIB, SLOW_CPU

from graphplan import Graph, Link, Operation, Value, Weight
from graphplan.device import CPU, read_max_memory
from graphplan.passes.chain import Chain
from graphplan.passes.coarsen import coarsen
from graphplan.passes.evaluate import Problem
from graphplan.passes.limits import Limits
from graphplan.passes.settings import make_settings, movable_weights
from graphplan.passes.streaming import stream
from graphplan.speeds import Speed, with_speeds

FEW = 4096


def stack(layers: int, *, table: int = 0, tied: bool = False, light: int = 3) -> Graph:
    """A table, and layers of a norm, a matrix, and operations without weights, which make ever less."""
    weights, operations, values = [Weight("table", table or FEW)], list[Operation](), [Value("v0", FEW, FEW)]

    def add(name: str, inputs: tuple[str, ...], nbytes: int, flops: int) -> None:
        read = sum(weight.nbytes for weight in weights if weight.name in inputs)
        values.append(Value(name, nbytes, nbytes))
        accessed = read + 2 * nbytes if name != "look" else 2 * nbytes
        operations.append(Operation(name, "f", (*inputs,), (name,), (), flops, accessed))

    add("look", ("v0", "table"), FEW, 100)
    before = "look"
    for i in range(layers):
        weights.extend([Weight(f"norm{i}.w", 512), Weight(f"matrix{i}.w", MIB)])
        add(f"norm{i}", (before, f"norm{i}.w"), 2 * FEW, 1000)
        add(f"matrix{i}", (f"norm{i}", f"matrix{i}.w"), 3 * FEW, 50_000_000)
        before = f"matrix{i}"
        for k in range(light):
            add(f"light{i}.{k}", (before,), FEW if k == light - 1 else 2 * FEW, 1000)
            before = f"light{i}.{k}"
    add("head", (before, "table") if tied else (before,), FEW, 1000)
    return Graph(operations, values, weights, ["v0"], ["head"])


def problem_of(graph: Graph, *shares: float) -> Problem:
    budgets = {i: int(share * graph.weight_bytes) + MIB for i, share in enumerate(shares)}
    links = {("cpu", i): Link(10e9, 1e-5) for i in range(len(shares))}
    return Problem(graph, with_speeds(read_max_memory({**budgets, CPU: "64GiB"}, links), SLOW_CPU), CPU)


def pieces(problem: Problem) -> list[list[str]]:
    """The operations in order, those together that are placed as one."""
    chain = Chain(problem.graph, problem.topology.devices[0])
    coarse = coarsen(problem, chain).graph
    piece_of = {name: group for group in coarse.together for name in group}
    found: dict[frozenset[str], list[str]] = {}
    for name in coarse.operations:
        found.setdefault(piece_of.get(name, frozenset([name])), []).append(name)
    return list(found.values())


def test_a_piece_is_a_heavy_operation_and_what_lies_around_it() -> None:
    found = pieces(problem_of(stack(30), 0.6))
    assert found[1] == ["norm1", "matrix1", "light1.0", "light1.1", "light1.2"]
    assert found[-1] == ["norm29", "matrix29", "light29.0", "light29.1", "light29.2", "head"]
    assert [name for piece in found for name in piece] == list(stack(30).operations)


def test_what_the_cpu_computes_before_its_weights_are_copied_is_apart() -> None:
    found = pieces(problem_of(stack(30, table=64 * MIB), 0.6))
    assert found[:2] == [["look"], ["norm0", "matrix0", "light0.0", "light0.1", "light0.2"]]


def test_readers_of_one_weight_are_apart() -> None:
    slow = {"cpu": Speed(1e6, 1e6)}  # on which no operation is sooner done than a copy
    problem = problem_of(stack(30, table=64 * MIB, tied=True), 0.6)
    problem = replace(problem, topology=with_speeds(problem.topology, slow))
    assert pieces(problem)[0] == ["look"]
    assert pieces(problem)[-1] == ["head"]


def test_what_may_run_elsewhere_is_apart() -> None:
    problem = problem_of(stack(30), 0.4, 0.4)
    pinned = replace(problem, allowed={"light3.1": frozenset({1})})
    assert ["light3.1"] in pieces(pinned)
    assert ["light3.1"] not in pieces(problem)


def test_a_piece_is_not_long() -> None:
    found = pieces(problem_of(stack(4, light=50), 0.6))
    assert max(map(len, found)) <= 16
    assert [name for piece in found for name in piece] == list(stack(4, light=50).operations)


def test_small_graphs_and_ties_are_left_as_they_are() -> None:
    problem = problem_of(stack(10), 0.6)
    assert coarsen(problem, Chain(problem.graph, problem.topology.devices[0])) is problem
    graph = stack(30).tied([["matrix4", "norm5"]])
    found = pieces(problem_of(graph, 0.6))
    assert ["norm4", "matrix4", "light4.0", "light4.1", "light4.2", "norm5"] in found
    assert ["matrix5", "light5.0", "light5.1", "light5.2"] in found


def viewed(layers: int) -> Graph:
    """Layers of a view of a matrix, what reads the view, and operations without weights."""
    weights, operations, values = list[Weight](), list[Operation](), [Value("v0", FEW, FEW)]
    before = "v0"
    for i in range(layers):
        weights.append(Weight(f"matrix{i}", 8 * MIB))
        made = [Value(f"view{i}", 0, 8 * MIB, alias_of=f"matrix{i}")]
        operations.append(Operation(f"view{i}", "t", (f"matrix{i}",), (f"view{i}",), (), 0, 0))
        inputs = (before, f"view{i}")
        for name in (f"read{i}", f"light{i}"):
            made.append(Value(name, FEW, FEW))
            operations.append(Operation(name, "f", inputs, (name,), (), 10_000_000, FEW))
            inputs = (name,)
        values += made
        before = f"light{i}"
    return Graph(operations, values, weights, ["v0"], [before])


def test_a_view_of_weights_goes_with_what_reads_it() -> None:
    graph = viewed(50)
    assert graph.weights_read("view4") == frozenset()
    assert graph.weights_read("read4") == {"matrix4"}
    problem = problem_of(graph, 0.6)  # the CPU is sooner done than a copy
    assert pieces(problem)[8:10] == [["view4", "read4"], ["light4"]]


def test_a_group_that_is_spread_out_ties_no_more_than_its_members() -> None:
    spread = stack(30).tied([["look", "head"], ["light0.0", "light29.0"]])
    found = pieces(problem_of(spread, 0.6))
    assert ["norm7", "matrix7", "light7.0", "light7.1", "light7.2"] in found
    assert max(map(len, found)) == 12  # the first piece and the last, in one


def test_sizes_of_weights_are_no_reading() -> None:
    graph = stack(30)
    sizes = [Operation(f"size{i}", "size", (f"matrix{i}.w",), (f"s{i}",), host_only=True) for i in range(30)]
    operations = [
        each for i, one in enumerate(graph.operations.values()) for each in (*sizes[i : i + 1], one)
    ]
    values = [*graph.values.values(), *(Value(f"s{i}", is_tensor=False) for i in range(30))]
    asking = Graph(operations, values, graph.weights.values(), graph.inputs, graph.outputs)
    assert asking.weights_read("size3") == frozenset()
    assert len(pieces(problem_of(asking, 0.6))) < 40


def test_large_activations_leave_pieces_as_they_are() -> None:
    graph = viewed(50)
    values = [
        replace(v, nbytes=64 * MIB * (v.nbytes > 0), copy_bytes=64 * MIB) for v in graph.values.values()
    ]
    large = Graph(graph.operations.values(), values, graph.weights.values(), graph.inputs, graph.outputs)
    assert pieces(problem_of(large, 0.6))[8:10] == [["view4", "read4"], ["light4"]]


def test_without_weights_or_accelerators_there_are_pieces_too() -> None:
    graph = stack(30)
    inputs = [
        replace(o, inputs=tuple(n for n in o.inputs if n in graph.values)) for o in graph.operations.values()
    ]
    bare = Graph(inputs, graph.values.values(), (), graph.inputs, graph.outputs)
    assert max(map(len, pieces(problem_of(bare, 0.6)))) <= 16
    alone = Problem(graph, read_max_memory({CPU: "1GiB"}), CPU)
    assert [name for piece in pieces(alone) for name in piece] == list(graph.operations)


def test_a_piece_waits_for_its_copy_where_its_heavy_operation_begins() -> None:
    problem = problem_of(stack(40), 0.3, 0.3)
    coarse = coarsen(problem, Chain(problem.graph, problem.topology.devices[0]))
    frontier = make_settings(coarse, Limits())[0].frontier
    i = next(
        i for i, s in enumerate(frontier.steps) if "matrix7" in frontier.shares.items[s.variable].members
    )
    before, after = (float(seconds[0, i]) for seconds in frontier.beside)
    spec, operations = problem.topology[0], problem.graph.operations
    assert before == pytest.approx(problem.seconds(operations["norm7"], spec))
    assert after == pytest.approx(sum(problem.seconds(operations[f"light7.{k}"], spec) for k in range(3)))
    fine = make_settings(problem, Limits())[0].frontier
    assert not any(seconds.any() for seconds in fine.beside)


def test_a_light_weight_of_a_piece_is_kept_when_the_heavy_one_is_brought() -> None:
    problem = problem_of(stack(30), 0.4)
    coarse = coarsen(problem, Chain(problem.graph, problem.topology.devices[0]))
    setting = make_settings(coarse, Limits())[0]
    shares = setting.frontier.shares
    brought = [movable_weights(setting.problem, shares, item) for item in range(shares.units)]
    assert ["matrix3.w"] in brought
    assert not any("norm3.w" in names for names in brought)


def test_a_coarse_search_finds_what_a_fine_one_does() -> None:
    for shares in ((0.5,), (0.3, 0.3)):
        problem = problem_of(stack(40), *shares)
        chain = Chain(problem.graph, problem.topology.devices[0])
        fine = min(found.seconds for found in stream(problem, None, Limits()))
        coarse = list(stream(coarsen(problem, chain), None, Limits()))
        assert min(found.seconds for found in coarse) <= fine * 1.01
        homes = coarse[-1].schedule.assignment.weights
        assert set(homes.values()) == {*range(len(shares)), CPU}
