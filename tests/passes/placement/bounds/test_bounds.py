"""Bounds of plans are valid; time limits and budgets are kept."""

from __future__ import annotations

import itertools
import math
import random
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from brute import Brute
from placements import cards
from random_problems import MEDIUM, random_instance
from test_optimal import KINDS, budgets_of, random_graph
from torch import nn

import graphplan
from graphplan import Graph, Link, Operation, Value, Weight
from graphplan.devices.max_memory import read_max_memory
from graphplan.devices.speeds import Speed, with_speeds
from graphplan.devices.topology import CPU
from graphplan.ir.constraints import Constraints
from graphplan.passes.placement import driver
from graphplan.passes.placement.calls.joint import Call, place_jointly
from graphplan.passes.placement.certificate import Scope
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.params import Limits
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import assign_weights

MIB = 1 << 20
TIGHT = 1 + 1e-9
SPEEDS = {0: Speed(1e12, 5e11), 1: Speed(4e11, 2e11), "cpu": Speed(5e10, 2e10)}


def best_of(problem: Problem) -> Evaluation | None:
    """The best placement: on the accelerators alone if one fits, else on all devices."""
    accelerators = [key for key in problem.topology.keys if key != CPU]
    best = Brute(problem, accelerators, stream=False).best_below(math.inf)
    if best is not None or not problem.offload or CPU not in problem.topology:
        return best
    return Brute(problem, list(problem.topology.keys), stream=True).best_below(math.inf)


def quick(first: int) -> list[Any]:
    """Thirty seeds, of which all but five are slow tests."""
    return [
        *range(first, first + 5),
        *(pytest.param(first + n, marks=pytest.mark.slow) for n in range(5, 30)),
    ]


def problem_of(seed: int, kind: str, max_operations: int) -> tuple[Problem, Evaluation]:
    """A small problem with its best placement: the first from this seed on that has any."""
    return next(
        made for number in itertools.count(seed, 1000) if (made := draw_problem(number, kind, max_operations))
    )


def draw_problem(seed: int, kind: str, max_operations: int) -> tuple[Problem, Evaluation] | None:
    """On mixed devices every second time; None where nothing fits."""
    drawn = random_graph(seed, max_operations)
    read = [weight for name, weight in drawn.weights.items() if drawn.consumers.get(name)]
    graph = Graph(drawn.operations.values(), drawn.values.values(), read, drawn.inputs, drawn.outputs)
    links = {(0, 1): Link(2e9, 1e-5), (1, 0): Link(2e9, 1e-5)} if "two" in kind and seed % 3 == 0 else None
    topology = read_max_memory(budgets_of(graph, kind, seed), links)
    if seed % 2:
        topology = with_speeds(topology, {key: SPEEDS[key] for key in topology.keys})
    problem = Problem(graph, topology, "cpu")
    best = best_of(problem)
    return None if best is None else (problem, best)


# -- bounds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        # with two cards and the CPU, all placements of most seeds take seconds
        pytest.param(seed, kind, marks=[pytest.mark.slow] * (seed > (100 if "two and" in kind else 104)))
        for seed in range(100, 130)
        for kind in KINDS
    ],
)
def test_no_bound_exceeds_the_best_placement(seed: int, kind: str) -> None:
    problem, best = problem_of(seed, kind, 7 if kind == "two and the CPU" else 9)
    solution = place(problem)
    assert solution.bound.seconds <= best.seconds * TIGHT
    assert best.seconds <= solution.evaluation.seconds * TIGHT


@pytest.mark.parametrize("accelerators", [2, 3])
@pytest.mark.parametrize("seed", quick(300))
def test_the_best_placement_on_accelerators_is_found(seed: int, accelerators: int) -> None:
    problem, best = accelerated(seed, accelerators)
    solution = place(problem)
    # of plans of the same time to a tenth of a percent, the one with most head-room is chosen
    assert solution.evaluation.seconds == pytest.approx(best.seconds, rel=1e-3)
    assert solution.bound.seconds <= best.seconds * TIGHT


def accelerated(seed: int, accelerators: int) -> tuple[Problem, Evaluation]:
    """A small problem on accelerators alone, mixed ones every second time, and its best placement."""
    for number in itertools.count(seed, 1000):
        drawn = random_graph(number, 8 if accelerators == 2 else 6)
        read = [weight for name, weight in drawn.weights.items() if drawn.consumers.get(name)]
        graph = Graph(drawn.operations.values(), drawn.values.values(), read, drawn.inputs, drawn.outputs)
        draw = random.Random(number)
        total = graph.weight_bytes + sum(value.nbytes for value in graph.values.values())
        budgets = {key: int(total * draw.uniform(0.2, 0.8)) + 3072 for key in range(accelerators)}
        topology = read_max_memory({**budgets, "cpu": 1 << 34})
        if number % 2:
            speeds = {**SPEEDS, 2: Speed(2e11, 3e11)}
            topology = with_speeds(topology, {key: speeds[key] for key in topology.keys})
        allowed = dict.fromkeys(graph.operations, frozenset(range(accelerators)))
        problem = Problem(graph, topology, "cpu", allowed=allowed, offload=False)
        best = best_of(problem)
        if best is not None:
            return problem, best
    raise AssertionError


# -- larger graphs ----------------------------------------------------------------------------------------


def layers(count: int, nbytes: int = 1 << 20, *, kinds: int = 3) -> Graph:
    """A chain of operations whose weights come in a few sizes, with a skip over every four."""
    weights = [Weight(f"w{i}", nbytes * (1 + i % kinds)) for i in range(count)]
    values, operations = [Value("x", 4096, 4096)], []
    for i in range(count):
        reads = [values[-1].name, f"w{i}"] + ([f"v{i - 4}"] if i % 4 == 0 and i else [])
        values.append(Value(f"v{i}", 4096, 4096))
        operations.append(
            Operation(f"v{i}", "f", tuple(reads), (f"v{i}",), (), 10**8 * (1 + i % kinds), 10**6)
        )
    return Graph(operations, values, weights, ["x"], [f"v{count - 1}"])


def mixed(graph: Graph, share: float) -> Problem:
    """Two accelerators, of which the second is half as fast, with so much of the weights between them."""
    size = int(graph.weight_bytes * share / 2) + 65536
    topology = read_max_memory({0: size, 1: size, "cpu": 1 << 34})
    speeds = {0: Speed(1e12, 5e11), 1: Speed(5e11, 25e10)}
    return Problem(graph, with_speeds(topology, speeds), "cpu")


def test_a_stack_is_proven_nearly_optimal() -> None:
    solution = place(mixed(layers(60), 1.3))
    assert solution.bound.seconds <= solution.evaluation.seconds <= 1.002 * solution.bound.seconds


def waiting_layers(count: int) -> Graph:
    """Layers in which a value waits while others are made of it, and all read a mask."""
    size, inner = 1 << 20, 8 << 20
    values, weights = [Value("x", size, size), Value("mask", size // 4, size // 4)], []
    operations: list[Operation] = []

    def run(name: str, *reads: str, nbytes: int = size, weight: int = 0) -> str:
        if weight:
            weights.append(Weight(f"w.{name}", weight))
            reads = (*reads, f"w.{name}")
        values.append(Value(name, nbytes, nbytes))
        operations.append(Operation(f"op.{name}", "f", reads, (name,), (), 10**9, nbytes + weight))
        return name

    x = "x"
    for i in range(count):
        normed = run(f"norm.{i}", x, weight=4096)
        made = [run(f"{part}.{i}", normed, weight=inner) for part in "qkv"]
        q, k = (run(f"turned.{part}", part, "mask") for part in made[:2])
        mixed = run(f"mixed.{i}", q, k, made[2], "mask")
        x = run(f"add.{i}", x, run(f"o.{i}", mixed, weight=inner))
        normed = run(f"norm2.{i}", x, weight=4096)
        both = [run(f"{part}.{i}", normed, nbytes=2 * size, weight=2 * inner) for part in ("gate", "up")]
        product = run(f"mul.{i}", *both, nbytes=2 * size)
        x = run(f"add2.{i}", x, run(f"down.{i}", product, weight=2 * inner))
    return Graph(operations, values, weights, ["x", "mask"], [x])


def test_the_same_input_gives_the_same_plan() -> None:
    first, second = (place(mixed(layers(60), 1.3)) for _ in range(2))
    assert first == second


def test_bound_holds_with_shared_weights_on_idle_devices() -> None:
    # device 0 holds one shared weight at a time beside its own, device 1 all of them and no operation
    values, operations, last = [Value("x", 5 * MIB, 5 * MIB)], [], "x"
    weights = [*(f"shared{i}" for i in range(8) for _ in range(2)), "own"]
    for i, weight in enumerate(weights):
        operations.append(Operation(f"op{i}", "mm", (last, weight), (f"v{i}",), flops=10**9))
        values.append(Value(f"v{i}", 5 * MIB, 5 * MIB))
        last = f"v{i}"
    sizes = [Weight(name, 8 * MIB if name == "own" else MIB) for name in dict.fromkeys(weights)]
    graph = Graph(operations, values, sizes, ["x"], [last])
    topology = cards(2).with_memory({0: 22 * MIB, 1: 9 * MIB})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = place(Problem(graph, topology, CPU))
    assert set(found.evaluation.assignment.operations.values()) == {0}
    assert found.bound.scope is Scope.SEARCHED
    assert 0 < found.bound.seconds < found.evaluation.seconds


@pytest.mark.parametrize("share", [1.3, 0.7])
def test_bound_holds_under_a_time_limit(share: float) -> None:
    problem = mixed(layers(40), share)
    whole = place(problem)
    for seconds in (0.01, 0.5):
        hasty = place(problem, Limits.within(seconds))
        assert hasty.evaluation.feasible
        assert hasty.bound.seconds <= min(whole.evaluation.seconds, hasty.evaluation.seconds) * TIGHT
        assert whole.bound.seconds <= hasty.evaluation.seconds * TIGHT


@pytest.mark.parametrize("share", [1.3, 0.7])
def test_no_relaxation_after_the_time_limit(share: float) -> None:
    problem, over = mixed(layers(40), share), Limits(deadline=time.monotonic())
    for hasty in (place(problem, over), *place_jointly([Call(problem, Constraints(), 1.0)] * 2, over)):
        assert "least seconds of each operation" in hasty.bound.text
        least = min(sum(problem.clock(spec).values()) for spec in problem.topology.devices)
        assert 0 < hasty.bound.seconds <= least


def test_a_time_limit_begins_with_the_default_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a search with more effort from the start found slower placements."""
    problem, efforts = random_instance(5001, MEDIUM).problem, list[float]()
    default, attempt = place(problem), driver.attempt
    higher = replace(default.bound, seconds=(default.bound.seconds + default.evaluation.seconds) / 2)

    def once(problem: Problem, limits: Limits, warm_start: Any) -> Any:
        efforts.append(limits.effort)
        assert (warm_start is None) == (len(efforts) == 1)
        return attempt(problem, limits, warm_start) if warm_start is None else replace(default, bound=higher)

    monkeypatch.setattr(driver, "attempt", once)
    found = place(problem, Limits.within(600))
    assert efforts == [1.0, math.inf]
    assert found.evaluation == default.evaluation
    assert found.bound == higher


@pytest.mark.parametrize("seconds", [0.3, 2.0])
def test_a_search_ends_in_time(seconds: float) -> None:
    graph = waiting_layers(12)
    topology = read_max_memory(dict.fromkeys(range(5), int(graph.weight_bytes * 0.3) + (8 << 20)))
    problem = Problem(graph, topology, 0, offload=False)
    begun = time.monotonic()
    solution = place(problem, Limits.within(seconds))
    assert time.monotonic() - begun < 2 * seconds + 2.0  # of a machine that others use too
    assert solution.evaluation.feasible
    assert 0 < solution.bound.seconds <= solution.evaluation.seconds


def test_a_search_without_a_choice_ends() -> None:
    graph = layers(20)
    fixed = {name: frozenset([i % 2]) for i, name in enumerate(graph.operations)}
    problem = Problem(graph, mixed(graph, 3.0).topology, "cpu", allowed=fixed)
    placed = place(problem).evaluation.schedule.assignment.operations
    assert placed == {name: i % 2 for i, name in enumerate(graph.operations)}


@pytest.mark.slow
def test_streaming_devices_compute_in_round_robin() -> None:
    """Each accelerator computes while the other streams, which no contiguous placement lets them do."""
    graph = layers(24, 8 << 20, kinds=1)
    topology = read_max_memory({0: 60 << 20, 1: 60 << 20, "cpu": 1 << 34})
    problem = Problem(graph, with_speeds(topology, {"cpu": Speed(1e9, 1e9)}), "cpu")
    found = place(problem).evaluation
    half = {name: int(i >= 12) for i, name in enumerate(graph.operations)}
    contiguous = evaluate(problem, assign_weights(problem, half, frozenset(graph.weights)))
    streamed = {s.device for s in found.schedule.prefetch_buffers}
    assert streamed == {0, 1}
    assert found.seconds < contiguous.seconds


@pytest.mark.parametrize("limit", [0, -1.0, "soon"])
def test_a_time_limit_is_a_positive_number(limit: object) -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    with pytest.raises(graphplan.InputError, match="time_limit must be a positive number"):
        graphplan.plan(model, {0: "1MiB", "cpu": "1MiB"}, (x,), time_limit=limit)  # type: ignore[arg-type]


def test_a_limited_plan_keeps_its_budgets() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(30)))
    x, budgets = torch.randn(4, 64), {0: "200KiB", 1: "150KiB", "cpu": "1GiB"}
    hasty = graphplan.plan(model, budgets, (x,), time_limit=0.05)
    assert all(hasty.peak_bytes[i] <= hasty.topology[i].memory for i in (0, 1))
    assert 0 <= hasty.gap < 1
