"""Random modules, graphs and budgets: equal results, kept budgets, the same plan each time."""

from __future__ import annotations

from typing import Any

import torch
from builders import bytes_of, largest_difference, run_placed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_modules import STEPS, WIDTH, RandomModule

import graphplan
from graphplan import Graph, Operation, Value, Weight
from graphplan.devices.max_memory import read_max_memory
from graphplan.ir.schedule_checks import check_schedule
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.params import Limits
from graphplan.passes.placement.problem import Problem

SLOW = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
QUICK = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

steps = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 20)), min_size=1, max_size=10)
shares = st.sampled_from(
    [{0: 0.5, 1: 0.7}, {0: 0.4, 1: 0.4, 2: 0.4}, {0: 0.3, "cpu": 9.0}, {3: 0.2, 1: 0.3, "cpu": 9.0}, {0: 2.0}]
)


@SLOW
@given(steps, shares, st.integers(0, 12_000))
def test_random_modules(steps: list[tuple[str, int]], shares: dict[Any, float], slack: int) -> None:
    torch.manual_seed(0)
    model = RandomModule(steps).eval()
    x = torch.randn(4, WIDTH)
    size = bytes_of(model)
    budgets = {key: int(share * size) + slack for key, share in shares.items()}
    with torch.no_grad(), graphplan.simulate(budgets) as machine:
        try:
            placed = graphplan.partition(model, budgets, args=(x,))
        except graphplan.InfeasibleError as error:
            caught = error
        else:
            caught = None
        if caught is not None:
            assert "cpu" not in budgets
            assert any(caught.needed[k] > budgets[k] for k in budgets)
            return
        again = graphplan.plan(model, budgets, args=(x,))
        assert again.to_json() == placed.plan.to_json()
        placed.plan.verify()
        for _ in range(2):
            assert largest_difference(run_placed(machine, placed, (x,)), model(x)) < 1e-5


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(1, 9))
    weights = [Weight(f"w{i}", draw(st.integers(0, 8)) * 512) for i in range(draw(st.integers(1, count)))]
    operations, values = [], [Value("x", 512, 512)]
    for i in range(count):
        made = [v.name for v in values]
        reads = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
        if draw(st.booleans()) or i < len(weights):
            reads.append(weights[i % len(weights)].name)
        view = draw(st.integers(0, 5)) == 0
        nbytes = 0 if view else draw(st.integers(0, 4)) * 512
        values.append(Value(f"v{i}", nbytes, max(nbytes, 512), reads[0] if view else None))
        flops = 0 if view else draw(st.integers(0, 10)) * 10**7
        workspace = {"cpu": draw(st.sampled_from([0, 512]))}
        operations.append(
            Operation(
                f"v{i}", "view" if view else "f", tuple(reads), (f"v{i}",), (), flops, flops // 100, workspace
            )
        )
    graph = Graph(operations, values, weights, ["x"], [f"v{count - 1}"])
    graph.verify()
    return graph


budgets = st.dictionaries(
    st.sampled_from([0, 1, 2, "cpu"]), st.integers(2, 40).map(lambda n: n * 512), min_size=1
)


@QUICK
@given(graphs(), budgets)
def test_random_graphs_keep_their_budgets(graph: Graph, budgets: dict[Any, int]) -> None:
    topology = read_max_memory(budgets)
    try:
        solution = place(Problem(graph, topology, "cpu"))
    except graphplan.InfeasibleError as error:
        needed = error.needed
        solution = None
    if solution is None:
        assert not needed or any(needed[key] > budgets[key] for key in budgets)
        return
    check_schedule(graph, topology, solution.evaluation.schedule)
    assert 0 <= solution.bound.seconds <= solution.evaluation.seconds


@settings(QUICK, max_examples=8)
@given(graphs(), st.integers(2, 12))
def test_budgets_in_infeasible_error_suffice(graph: Graph, share: int) -> None:
    budgets = {0: share * 512, 1: share * 512}
    try:
        place(Problem(graph, read_max_memory(budgets), "cpu"), Limits(effort=0.2, proves=False))
    except graphplan.InfeasibleError as error:
        needed = read_max_memory(error.needed)
        solution = place(Problem(graph, needed, "cpu"), Limits(effort=0.2, proves=False))
        check_schedule(graph, needed, solution.evaluation.schedule)
