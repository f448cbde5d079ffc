"""Bounds by prices of bytes and copies: below every placement, and near the best where one streams."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from test_beam import MIB, problem_of, tower
from test_counts import chain_of, experts, with_cpu

from graphplan import Link, Weight
from graphplan.device import CPU
from graphplan.passes import leads
from graphplan.passes.close_by_leads import least_seconds
from graphplan.passes.evaluate import Problem, evaluate
from graphplan.passes.lead_labels import bound_by_labels
from graphplan.passes.leads import Case, Leads, Prices
from graphplan.passes.limits import Limits
from graphplan.passes.place import place
from graphplan.passes.residence import reside
from graphplan.passes.shares import Shares
from graphplan.passes.states import make_stages

ANYTHING = Case(((0.0, np.inf),), ((0.0, np.inf),))


def leads_of(problem: Problem) -> Leads:
    return Leads(Shares(replace(problem, offload=False)))


@pytest.mark.parametrize("accelerators", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_no_placement_is_faster_than_what_is_left_to_pay(seed: int, accelerators: int) -> None:
    """At any prices."""
    draw = random.Random(seed)
    problem = problem_of(tower(25, 4 * MIB, seed=seed), *[0.6 / accelerators] * accelerators)
    leads, names = leads_of(problem), list(problem.graph.operations)
    case = Case(ANYTHING.rings * accelerators, ANYTHING.needs * accelerators)
    copying = np.array([draw.uniform(0, 1 / accelerators) for _ in range(accelerators)])
    prices = Prices(np.array([draw.uniform(0, 2) for _ in range(accelerators)]) / 1e10, copying)
    bound = leads.price(case, prices).bound
    assert bound <= leads.highest(case).bound * (1 + 1e-3)
    keys = problem.topology.keys
    feasible = 0
    for _ in range(60):
        cut = sorted(draw.sample(range(len(names)), len(keys) - 1))
        devices = {n: keys[sum(i >= c for c in cut)] for i, n in enumerate(names)}
        brought = [w for w in problem.graph.weights if draw.random() < 0.6]
        found = evaluate(problem, reside(problem, devices, brought))
        feasible += found.feasible
        assert not found.feasible or bound <= found.seconds
    assert feasible


@pytest.mark.parametrize("seed", range(6))
def test_labels_bound_higher_and_width_costs_nothing_but_height(seed: int) -> None:
    problem = problem_of(tower(40, 8 * MIB, seed=seed), 0.5)
    leads = leads_of(problem)
    best = place(problem, Limits(exhaustive=False)).evaluation.seconds
    size = leads.held[-1]
    case = Case(((size, 1.5 * size),), ANYTHING.needs)
    rest = leads.highest(case)
    wide, narrow = (bound_by_labels(leads, case, rest, enough=2 * best, width=w) for w in (3000, 60))
    assert wide.seconds >= rest.bound * (1 - 1e-9)
    assert narrow.seconds <= wide.seconds * (1 + 1e-3)
    assert bound_by_labels(leads, case, rest, enough=0.5 * rest.bound, width=100).seconds <= rest.bound


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8])
def test_one_accelerator_is_proven_within_a_few_percent(share: float) -> None:
    """Where slots and weights are of one size."""
    read = [[Weight(f"w{i}", 8 * MIB)] for i in range(60)]
    graph = chain_of(read, [(1 + i % 5) * 10**10 for i in range(60)])
    problem = with_cpu(graph, [share * graph.weight_bytes], Link(10e9, 1e-5))
    best = place(problem).evaluation.seconds
    bound, parts = least_seconds(problem, best, Limits())
    assert 0.96 * best <= bound <= best
    assert parts > 1


def test_nothing_is_said_where_nothing_streams() -> None:
    problem = problem_of(tower(25, 4 * MIB), 0.5)
    assert least_seconds(replace(problem, offload=False), 1.0, Limits()) == (0.0, 0)
    assert least_seconds(replace(problem, streams=False), 1.0, Limits()) == (0.0, 0)
    assert least_seconds(problem, 1.0, Limits.within(0.0)) == (0.0, 0)


def test_a_ring_that_is_there_takes_memory() -> None:
    problem = problem_of(tower(40, 8 * MIB), 0.5)
    best = place(problem, Limits(exhaustive=False)).evaluation.seconds
    taken = int(0.25 * problem.graph.weight_bytes)
    small, large = (
        least_seconds(replace(problem, rings={0: ring}), 5 * best, Limits())[0] for ring in (0, taken)
    )
    assert small < large


def test_equal_experts_are_counted() -> None:
    """Which of them are on the CPU does not matter, so states are as many as experts, and no more."""
    frontier = leads_of(experts(3)).frontier
    counted, followed = (
        max(len(stage.states) for stage in make_stages(frontier, alike=alike)) for alike in (True, False)
    )
    assert counted < followed


def test_a_weight_of_the_cpu_is_copied_or_read_there() -> None:
    problem = problem_of(tower(25, 4 * MIB, large=40 * MIB), 0.5)
    largest = max(problem.graph.weights.values(), key=lambda weight: weight.nbytes)
    fixed = replace(problem, fixed_weights={largest.name: CPU})
    leads = leads_of(fixed)
    small = Case(((0.0, largest.nbytes / 2),), ANYTHING.needs)
    assert leads.highest(small).bound > leads.highest(ANYTHING).bound


@pytest.mark.parametrize("seed", range(12))
def test_values_that_are_forgotten_cost_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others are alike, which are counted."""
    problem = experts(seed)
    case = Case(*[((0.0, np.inf),) * (len(problem.topology.devices) - 1)] * 2)
    exact = leads_of(problem)
    prices = exact.highest(case).prices
    for most in (6, 12, 40):
        monkeypatch.setattr(leads, "_STATES", most)
        fewer = leads_of(problem)
        assert max(len(stage.states) for stage in fewer.stages) <= most
        assert fewer.price(case, prices).bound <= exact.price(case, prices).bound * (1 + 1e-9)


def test_a_model_without_weights_to_stream_is_bounded_too() -> None:
    """What a call writes to stays where it is, so there is no ring at all."""
    graph = chain_of([[Weight(f"w{i}", 4 * MIB, movable=False)] for i in range(25)], [10**10] * 25)
    problem = with_cpu(graph, [60 * MIB], Link(10e9, 1e-5))
    best = place(problem).evaluation.seconds
    assert 0 < least_seconds(problem, 2 * best, Limits())[0] <= best


def test_rings_of_earlier_calls_tell_equal_accelerators_apart() -> None:
    problem = problem_of(tower(25, 4 * MIB), 0.3, 0.3)
    assert least_seconds(problem, 1.0, Limits())[0] > 0
    assert least_seconds(replace(problem, rings={1: MIB}), 1.0, Limits()) == (0.0, 0)
