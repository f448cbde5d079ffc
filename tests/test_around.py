"""Contiguous pieces around weights that several operations read, and with cuts anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphplan import Graph, Operation, Value, Weight
from graphplan.device import read_max_memory
from graphplan.passes.around import finer_split, splits_around
from graphplan.passes.chain import Chain
from graphplan.passes.close import close_gap
from graphplan.passes.evaluate import Problem
from graphplan.passes.least import Least
from graphplan.passes.limits import Limits
from graphplan.passes.split_again import contiguous_split
from graphplan.speeds import Speed, with_speeds

UNIT = 1 << 26  # bytes: large enough that weights count for more than moves


def language_model(layers: int, *, tied: bool = True, small_last: bool = False) -> Graph:
    """An embedding that is also the head, and layers of ten units in four projections."""
    names = ["large", "q", "less", "k"] if small_last else ["q", "k", "less", "large"]
    nbytes = {"large": 5 * UNIT, "less": 3 * UNIT, "q": UNIT, "k": UNIT}
    weights = [Weight("embedding", 12 * UNIT)]
    values, operations = [Value("ids", 512, 512)], []

    def add(name: str, *reads: str) -> str:
        values.append(Value(name, 4096, 4096))
        size = sum(weight.nbytes for weight in weights if weight.name in reads)
        operations.append(Operation(name, "mm", reads, (name,), (), 100 * size, size))
        return name

    last = add("embed", "ids", "embedding")
    for layer in range(layers):
        made = []
        for name in names:
            weights.append(Weight(f"w{layer}.{name}", nbytes[name]))
            made.append(add(f"l{layer}.{name}", last, f"w{layer}.{name}"))
        last = add(f"l{layer}.sum", *made)
    if not tied:
        weights.append(Weight("head", 12 * UNIT))
    add("logits", last, "embedding" if tied else "head")
    return Graph(operations, values, weights, ["ids"], ["logits"])


def over(graph: Graph, *sizes: int) -> Problem:
    """Accelerators of these budgets, each half as fast as the one before; nothing is offloaded."""
    topology = read_max_memory({**dict(enumerate(sizes)), "cpu": 1 << 40})
    speeds = {index: Speed(1e13 / 2**index, 5e11 / 2**index) for index in range(len(sizes))}
    keys = frozenset(range(len(sizes)))
    return Problem(
        graph,
        with_speeds(topology, speeds),
        "cpu",
        allowed=dict.fromkeys(graph.operations, keys),
        offload=False,
    )


def test_a_tied_embedding_is_where_it_costs_least() -> None:
    problem = over(language_model(8), 70 * UNIT, 70 * UNIT)
    found = list(splits_around(problem))
    assert {placed.schedule.assignment.weights["embedding"] for placed in found} == {0, 1}
    for placed in found:
        home = placed.schedule.assignment.weights["embedding"]
        operations = placed.schedule.assignment.operations
        assert operations["embed"] == operations["logits"] == home
    best = min((placed for placed in found if placed.feasible), key=lambda placed: placed.seconds)
    chain = Chain(problem.graph, problem.topology.devices[0])
    plain = contiguous_split(problem, chain, use_cpu=False, fetch=False)
    assert plain is None or not plain.feasible or best.seconds <= plain.seconds


def test_without_a_shared_weight_there_is_nothing_to_go_around() -> None:
    assert list(splits_around(over(language_model(4, tied=False), 40 * UNIT, 40 * UNIT))) == []


def test_a_weight_that_has_a_home_is_left_there() -> None:
    problem = replace(over(language_model(8), 70 * UNIT, 70 * UNIT), fixed_weights={"embedding": 1})
    assert list(splits_around(problem)) == []


def test_a_home_that_a_reader_may_not_run_on_is_none() -> None:
    problem = over(language_model(8), 70 * UNIT, 70 * UNIT)
    allowed = {**problem.allowed, "logits": frozenset([1])}
    found = list(splits_around(replace(problem, allowed=allowed)))
    assert [placed.schedule.assignment.weights["embedding"] for placed in found] == [1]


def test_a_home_that_is_too_small_is_none() -> None:
    problem = over(language_model(8), 130 * UNIT, 10 * UNIT)
    assert [p.schedule.assignment.weights["embedding"] for p in splits_around(problem)] == [0]


@pytest.mark.parametrize("tied", [True, False])
def test_small_weights_come_together_where_that_fills_a_card(tied: bool) -> None:
    """A card holds six layers and the two small projections of a seventh, which do not follow each other."""
    graph = language_model(9, tied=tied, small_last=True)
    shared = 12 * UNIT
    problem = over(graph, 60 * UNIT + 2 * UNIT + shared + UNIT // 2, 60 * UNIT + (0 if tied else shared))
    chain = Chain(graph, problem.topology.devices[0])
    plain = contiguous_split(problem, chain, use_cpu=False, fetch=False)
    best = min([plain, *splits_around(problem)], key=lambda p: (not p.feasible, p.seconds) if p else (True,))
    assert best is not None
    assert best.feasible
    both = [finer_split(problem, best, small_first=first) for first in (True, False)]
    finer = min([found for found in both if found], key=lambda placed: (not placed.feasible, placed.seconds))
    assert finer.feasible
    assert finer.seconds < best.seconds
    kept = [name for name, key in finer.schedule.assignment.weights.items() if key == 0]
    assert sum(graph.weights[name].nbytes for name in kept) // UNIT == 62 + 12


def test_shared_weights_on_the_cpu_are_not_gone_around() -> None:
    graph = language_model(8)
    problem = replace(over(graph, 70 * UNIT, 70 * UNIT), offload=True, allowed={})
    best = next(iter(splits_around(problem)))
    weights = {**best.schedule.assignment.weights, "embedding": "cpu"}
    assignment = replace(best.schedule.assignment, weights=weights)
    elsewhere = replace(best, schedule=replace(best.schedule, assignment=assignment))
    assert finer_split(problem, elsewhere, small_first=True) is None


def test_a_stack_comes_out_with_its_card_full() -> None:
    problem = over(language_model(20, small_last=True), 152 * UNIT, 152 * UNIT)
    chain = Chain(problem.graph, problem.topology.devices[0])
    start = next(iter(splits_around(problem)))
    best, bound = close_gap(problem, chain, start, Least.of(problem), Limits())
    assert best.feasible
    assert bound.seconds <= best.seconds <= min(start.seconds, 1.01 * bound.seconds)
