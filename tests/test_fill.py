"""First fit with the readers of a weight together: what it proposes fits, and copies no weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import KIB
from test_dozen import draw_problem

from graphplan import Graph, Operation, Value, Weight
from graphplan.device import read_max_memory
from graphplan.passes.evaluate import Evaluation, Problem
from graphplan.passes.fill import fill


def placed(found: Evaluation) -> dict[str, object]:
    return dict(found.schedule.assignment.operations)


def tied(count: int = 6, nbytes: int = 64 * KIB) -> Graph:
    """A chain whose last operation reads the weight of the first."""
    weights = [Weight(f"w{i}", nbytes) for i in range(count - 1)]
    values = [Value("x", 512, 512), *(Value(f"v{i}", 512, 512) for i in range(count))]
    reads = [*range(count - 1), 0]
    operations = [
        Operation(f"v{i}", "f", (values[i].name, f"w{reads[i]}"), (f"v{i}",), (), 10**6, 10**4)
        for i in range(count)
    ]
    return Graph(operations, values, weights, ["x"], [f"v{count - 1}"])


def test_the_readers_of_a_weight_run_together() -> None:
    size = (3 * 64 + 4) * KIB
    problem = Problem(tied(), read_max_memory({0: size, 1: size}), "cpu")
    (found,) = fill(problem)
    assert list(placed(found).values()) == [0, 0, 0, 1, 1, 0]
    assert not list(found.schedule.moves("weight"))


def test_weights_that_do_not_fit_give_nothing() -> None:
    size = (2 * 64 + 4) * KIB
    assert not list(fill(Problem(tied(), read_max_memory({0: size, 1: size, "cpu": "1GiB"}), "cpu")))


def test_a_passed_budget_gets_fewer_weights() -> None:
    graph = tied()
    wide = [replace(v, nbytes=40 * KIB) if v.name == "v1" else v for v in graph.values.values()]
    graph = Graph(graph.operations.values(), wide, graph.weights.values(), graph.inputs, graph.outputs)
    size = (3 * 64 + 8) * KIB
    problem = Problem(graph, read_max_memory({0: size, 1: size, 2: size}), "cpu")
    (found,) = fill(problem)
    assert list(placed(found).values()) == [0, 0, 1, 1, 1, 0]


def parts(count: int) -> Graph:
    """Operations that make a large value each, which one without weights joins."""
    weights = [Weight(f"w{i}", 64 * KIB) for i in range(count)]
    values = [Value("x", 512, 512), *(Value(f"v{i}", 16 * KIB, 16 * KIB) for i in range(count))]
    values.append(Value("joined", 16 * count * KIB, 16 * count * KIB))
    operations = [Operation(f"v{i}", "f", ("x", f"w{i}"), (f"v{i}",), (), 10**6, 10**4) for i in range(count)]
    operations.append(Operation("joined", "cat", tuple(f"v{i}" for i in range(count)), ("joined",), (), 0, 1))
    return Graph(operations, values, weights, ["x"], ["joined"])


def test_a_large_result_is_joined_where_room_is() -> None:
    size = (2 * 64 + 60) * KIB
    problem = Problem(parts(4), read_max_memory({0: size, 1: size, 2: size}), "cpu")
    (found,) = fill(problem)
    assert placed(found)["joined"] == 2


def test_a_group_stays_together() -> None:
    graph = tied()
    grouped = Graph(
        graph.operations.values(),
        graph.values.values(),
        graph.weights.values(),
        graph.inputs,
        graph.outputs,
        together=[frozenset(["v2", "v3"])],
    )
    size = (3 * 64 + 4) * KIB
    (found,) = fill(Problem(grouped, read_max_memory({0: size, 1: size}), "cpu"))
    assert placed(found)["v2"] == placed(found)["v3"]


@pytest.mark.parametrize("kind", ["two", "three", "two and the CPU"])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_proposed_fits_the_accelerators(seed: int, kind: str) -> None:
    problem = draw_problem(seed, kind, ties=seed % 2 == 0)
    for found in fill(problem):
        assert found.feasible
        assert "cpu" not in placed(found).values()
        assert not list(found.schedule.moves("weight"))
        assert not found.schedule.rings


def test_something_is_proposed_for_many() -> None:
    found = [list(fill(draw_problem(seed, "three", ties=False))) for seed in range(20)]
    assert sum(map(bool, found)) >= 10
