"""What the planner proves: knapsacks are exact, and no bound exceeds the best placement there is."""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_optimal import KINDS, budgets_of, random_graph
from torch import nn

import graphplan
from graphplan import Graph, Link, Operation, Value, Weight
from graphplan.device import DeviceKey, read_max_memory
from graphplan.passes import branch, close_by_columns, close_by_labels, pricing, states
from graphplan.passes.branch import Tree
from graphplan.passes.chain import Chain
from graphplan.passes.close import close_gap
from graphplan.passes.columns import ColumnGeneration
from graphplan.passes.counts import count_units
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.problem import Problem
from graphplan.passes.exhaustive import search_all
from graphplan.passes.intervals import intervals
from graphplan.passes.knapsack import Knapsack
from graphplan.passes.least import Least
from graphplan.passes.placement.limits import Limits
from graphplan.passes.master import Limit, mix_fractions
from graphplan.passes.parts import part_by_home
from graphplan.passes.placement.driver import place
from graphplan.passes.pricing import Effort, Pricing
from graphplan.passes.program import Program
from graphplan.passes.placement.residence import reside
from graphplan.passes.shares import Shares
from graphplan.speeds import Speed, with_speeds

TIGHT = 1 + 1e-9
SPEEDS = {0: Speed(1e12, 5e11), 1: Speed(4e11, 2e11), "cpu": Speed(5e10, 2e10)}


def best_of(problem: Problem, *, fetch: bool) -> Evaluation | None:
    """The best placement, all having been tried (as ``test_optimal`` holds against brute force)."""
    found, complete = search_all(problem, None, fetch=fetch, nodes=10**7)
    assert complete or found is None
    return found


def problem_of(seed: int, kind: str, most: int) -> tuple[Problem, Evaluation]:
    """A small problem with its best placement: the first from this seed on that has any."""
    return next(made for number in itertools.count(seed, 1000) if (made := draw_problem(number, kind, most)))


def draw_problem(seed: int, kind: str, most: int) -> tuple[Problem, Evaluation] | None:
    """On unlike devices every second time; None where nothing fits."""
    drawn = random_graph(seed, most)
    read = [weight for name, weight in drawn.weights.items() if drawn.consumers.get(name)]
    graph = Graph(drawn.operations.values(), drawn.values.values(), read, drawn.inputs, drawn.outputs)
    links = {(0, 1): Link(2e9, 1e-5), (1, 0): Link(2e9, 1e-5)} if "two" in kind and seed % 3 == 0 else None
    topology = read_max_memory(budgets_of(graph, kind, seed), links)
    if seed % 2:
        topology = with_speeds(topology, {key: SPEEDS[key] for key in topology.keys})
    problem = Problem(graph, topology, "cpu")
    best = best_of(problem, fetch="cpu" in KINDS[kind])
    return None if best is None else (problem, best)


# -- knapsacks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_a_knapsack_finds_the_cheapest_set(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, rows = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    sizes = rng.integers(0, 5, count) * (rng.random(count) < 0.6)
    scopes, tables = [], []
    for _ in range(rng.integers(0, 9)):
        width = min(count, int(rng.integers(1, 4)))
        scopes.append(tuple(int(i) for i in rng.choice(count, width, replace=False)))
        table = rng.normal(size=(rows if rng.random() < 0.5 else 1, *(2,) * width))
        table[rng.random(table.shape) < 0.1] = np.inf
        tables.append(table)
    capacities = rng.integers(0, 12, rows)
    cost = rng.normal(size=(rows, count))
    aside = np.where(rng.random((rows, count)) < 0.5, rng.random((rows, count)), np.inf)
    found = Knapsack(sizes.astype(np.int64), scopes, capacities).solve(cost, aside, tables)
    for row in range(rows):
        best = np.inf
        for taken in itertools.product([0, 1], repeat=count):
            best = min(best, price(row, taken, sizes, capacities[row], cost, aside, scopes, tables))
        assert found.cost[row] == pytest.approx(best, abs=1e-9)
        if np.isfinite(best):
            chosen, beside = found.taken[row], found.aside[row]
            value = cost[row][chosen].sum() + aside[row][beside].sum()
            value += shared(row, chosen.astype(int), scopes, tables)
            assert value == pytest.approx(best, abs=1e-9)
            assert sizes[chosen & ~beside].sum() <= capacities[row]


def shared(row: int, taken: object, scopes: list, tables: list) -> float:
    return sum(
        table[(row if len(table) > 1 else 0, *(taken[i] for i in scope))]
        for scope, table in zip(scopes, tables, strict=True)
    )


def price(row: int, taken: tuple, sizes, capacity, cost, aside, scopes, tables) -> float:
    """Of a set, with the cheapest of it aside so that the rest fits."""
    value = sum(cost[row, i] for i in range(len(taken)) if taken[i]) + shared(row, taken, scopes, tables)
    heavy = [i for i in range(len(taken)) if taken[i] and sizes[i]]
    least = np.inf
    for beside in itertools.product([0, 1], repeat=len(heavy)):
        kept = sum(sizes[i] for i, out in zip(heavy, beside, strict=True) if not out)
        if kept <= capacity:
            least = min(least, sum(aside[row, i] for i, out in zip(heavy, beside, strict=True) if out))
    return value + least


# -- bounds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(100, 130))
def test_no_bound_exceeds_the_best_placement(seed: int, kind: str) -> None:
    problem, best = problem_of(seed, kind, 7 if kind == "two and the CPU" else 9)
    shares = Shares(problem)
    fractions = mix_fractions(shares)
    assert fractions is None or fractions.seconds * (1 - 1e-6) <= best.seconds * TIGHT
    generation = ColumnGeneration(Pricing(shares), [best])
    assert generation.run(enough=np.inf, work=1e8) <= best.seconds * TIGHT
    tree = Tree(generation)
    assert tree.grow(enough=np.inf, work=1e8) <= best.seconds * TIGHT
    # twice the best, so that a bound beyond it would show
    bounded = Program(shares).bound(upper=2 * best.seconds, gap=1e-6, programs=1000)
    assert bounded.seconds <= best.seconds * TIGHT
    counted, _ = count_units(shares, upper=2 * best.seconds, gap=1e-6, programs=1000)
    assert counted * (1 - 1e-6) <= best.seconds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(200, 210))
def test_closing_the_gap_keeps_what_is_good_and_says_the_truth(seed: int, kind: str) -> None:
    problem, best = problem_of(seed, kind, 7 if kind == "two and the CPU" else 9)
    spec = problem.topology.devices[0]
    start = place(problem, Limits(exhaustive=False)).evaluation
    found, bound = close_gap(problem, Chain(problem.graph, spec), start, Least.of(problem), Limits())
    assert found.feasible
    assert best.seconds <= found.seconds * TIGHT <= start.seconds * TIGHT**2
    assert bound.seconds <= best.seconds * TIGHT


@pytest.mark.parametrize("accelerators", [2, 3])
@pytest.mark.parametrize("seed", range(300, 330))
def test_labels_find_the_best_placement_and_prove_it(seed: int, accelerators: int) -> None:
    problem, best = accelerated(seed, accelerators)
    parts = list(part_by_home(problem, Shares(problem)))
    found = []
    for part in parts:
        assert part.suits_labels
        part.prepare_labels(2 * best.seconds, None)
        search = part.search(below=2 * best.seconds, width=10**6, deadline=None)
        if search is not None and search.placements:
            found.append(search.seconds)
    bound = min(part.bound for part in parts)
    assert bound <= best.seconds * TIGHT
    # what is left open are activations that wait, of which labels know some
    assert min(found) == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize("seed", range(300, 306))
def test_what_one_part_has_learnt_changes_no_bound_of_another(seed: int) -> None:
    problem, best = accelerated(seed, 2)
    known = None
    for part, alone in zip(*(part_by_home(problem, Shares(problem)) for _ in range(2)), strict=True):
        part.prepare_labels(2 * best.seconds, None, known)
        alone.prepare_labels(2 * best.seconds, None)
        assert part.bound == pytest.approx(alone.bound, rel=1e-3)
        bounds = []
        for one in (part, alone):
            generation = one.begin_columns(best, None)
            if one is part and known is not None:
                assert known.is_like(part)
                generation.borrow(known.generation)
            generation.run(enough=np.inf, work=1e9)
            assert generation.converged
            bounds.append(generation.bound)
        assert bounds[0] == pytest.approx(bounds[1], rel=1e-3)
        known = part


def test_knapsacks_that_share_memory_may_be_solved_at_once() -> None:
    def solve(seed: int) -> list[float]:
        rng = np.random.default_rng(seed)
        sizes, capacities = rng.integers(0, 50, 60), np.array([400, 700])
        scopes = [(i, i + 1) for i in range(59)]
        tables = [rng.normal(size=(1, 2, 2)) for _ in scopes]
        knapsack = Knapsack(sizes.astype(np.int64), scopes, capacities)
        cost, aside = rng.normal(size=(2, 60)), np.full((2, 60), np.inf)
        found = [knapsack.solve(cost, aside, tables, None, dtype) for dtype in (np.float64, np.float32) * 3]
        assert len({tuple(one.taken.ravel().tolist()) for one in found}) == 1
        return [float(one.cost.sum()) for one in found]

    alone = [solve(seed) for seed in range(6)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(solve, range(6))) == alone


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", range(330, 350))
def test_narrow_searches_prove_less_and_nothing_false(seed: int, width: int) -> None:
    problem, best = accelerated(seed, 3)
    bounds = []
    for part in part_by_home(problem, Shares(problem)):
        part.prepare_labels(2 * best.seconds, None)
        root = part.bound
        found = part.search(below=2 * best.seconds, width=width, deadline=None)
        assert root <= part.bound
        assert found is None or not found.placements or found.seconds >= part.bound / TIGHT
        bounds.append(part.bound)
    assert min(bounds) <= best.seconds * TIGHT


def test_labels_may_forget_values_and_still_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_STATES", 12)
    for seed in range(350, 365):
        problem, best = accelerated(seed, 3)
        parts = list(part_by_home(problem, Shares(problem)))
        for part in parts:
            part.prepare_labels(2 * best.seconds, None)
            part.search(below=2 * best.seconds, width=50, deadline=None)
        assert min(part.bound for part in parts) <= best.seconds * TIGHT


def accelerated(seed: int, accelerators: int) -> tuple[Problem, Evaluation]:
    """A small problem on accelerators alone, unlike ones every second time, and its best placement."""
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
        best = best_of(problem, fetch=False)
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


def unlike(graph: Graph, share: float) -> Problem:
    """Two accelerators, of which the second is half as fast, with so much of the weights between them."""
    size = int(graph.weight_bytes * share / 2) + 65536
    topology = read_max_memory({0: size, 1: size, "cpu": 1 << 34})
    speeds = {0: Speed(1e12, 5e11), 1: Speed(5e11, 25e10)}
    return Problem(graph, with_speeds(topology, speeds), "cpu")


def test_a_stack_is_proven_nearly_optimal() -> None:
    solution = place(unlike(layers(60), 1.3))
    assert "labels" in solution.proof
    assert solution.lower_bound <= solution.evaluation.seconds <= 1.002 * solution.lower_bound


def test_column_generation_proves_a_stack_nearly_optimal() -> None:
    problem = replace(unlike(layers(60), 1.3), allowed=on_accelerators(layers(60)), offload=False)
    best = place(problem).evaluation
    generation = ColumnGeneration(Pricing(Shares(problem)), [best])
    bound = generation.run(enough=best.seconds, work=3e9)
    assert bound <= best.seconds * TIGHT <= 1.02 * bound


def test_what_cannot_pass_a_known_bound_gives_up() -> None:
    problem = replace(unlike(layers(60), 1.3), allowed=on_accelerators(layers(60)), offload=False)
    best = place(problem).evaluation
    generation = ColumnGeneration(Pricing(Shares(problem)), [best])
    assert generation.run(enough=2 * best.seconds, work=3e9, proven=best.seconds) == 0
    assert generation.futile
    assert not generation.rounds
    assert generation.run(enough=best.seconds, work=3e9) > 0.98 * best.seconds
    assert not generation.futile


def test_prices_found_with_less_effort_are_nearly_the_best() -> None:
    problem = replace(unlike(layers(60), 1.3), allowed=on_accelerators(layers(60)), offload=False)
    best = place(problem).evaluation
    found = []
    for effort in Effort:
        generation = ColumnGeneration(Pricing(Shares(problem)), [best])
        assert generation.foresee(10) > 0
        generation.approach(enough=best.seconds, work=1e9, effort=effort)
        assert generation.bound == 0  # nothing is proven yet
        bound, _ = generation._price(generation.center, Effort.WHOLE, exact=True)
        assert bound <= best.seconds * TIGHT
        found.append(bound)
    rough, quick, whole = found
    assert quick >= 0.995 * whole
    assert rough >= 0.97 * whole


def test_what_repeats_itself_in_one_knapsack_does_so_in_the_others() -> None:
    problem = replace(unlike(layers(600), 1.3), allowed=on_accelerators(layers(600)), offload=False)
    knapsacks = Pricing(Shares(problem))
    before = knapsacks.work(Effort.WHOLE)
    generation = ColumnGeneration(knapsacks)
    generation.approach(enough=np.inf, work=1, effort=Effort.QUICK)
    assert knapsacks.work(Effort.WHOLE) < before
    generation.run(enough=np.inf, work=1e9)
    assert knapsacks.work(Effort.WHOLE) < before  # which is what it took


def test_deep_stacks_are_narrowed_as_quickly_as_flat_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens too many variables in one layer does so in all."""
    monkeypatch.setattr(pricing, "_STATES", 256)
    assert attempts(16, monkeypatch) <= attempts(8, monkeypatch)


def attempts(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Knapsacks that are prepared for so many layers whose values wait for each other."""
    made = []

    class Counted(Knapsack):
        def __init__(self, *structure: object) -> None:
            made.append(structure)
            super().__init__(*structure)

    monkeypatch.setattr(pricing, "Knapsack", Counted)
    graph = waiting_layers(count)
    size = int(graph.weight_bytes * 1.1 / 4) + (8 << 20)
    problem = Problem(graph, read_max_memory(dict.fromkeys(range(4), size)), 0, offload=False)
    found = pricing.Pricing(Shares(problem))
    assert len(found.bands) > 1
    return len(made)


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


def on_accelerators(graph: Graph) -> dict[str, frozenset[DeviceKey]]:
    return dict.fromkeys(graph.operations, frozenset([0, 1]))


def test_the_same_input_gives_the_same_plan() -> None:
    first, second = (place(unlike(layers(60), 1.3)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("share", [1.3, 0.7])
def test_a_time_limit_cuts_the_search_and_not_the_truth(share: float) -> None:
    problem = unlike(layers(40), share)
    whole = place(problem)
    for seconds in (0.01, 0.5):
        hasty = place(problem, Limits.within(seconds))
        assert hasty.evaluation.feasible
        assert hasty.lower_bound <= min(whole.evaluation.seconds, hasty.evaluation.seconds) * TIGHT
        assert whole.lower_bound <= hasty.evaluation.seconds * TIGHT


def test_trying_every_placement_ends_in_time() -> None:
    problem, best = problem_of(3, "two and the CPU", 9)
    assert search_all(problem, best, fetch=True, nodes=10**7, deadline=time.monotonic()) == (best, False)
    assert search_all(problem, best, fetch=True, nodes=10**7)[1]


@pytest.mark.parametrize("time_limit", [None, 60])
def test_a_time_limit_is_one_of_trying_every_placement(
    time_limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float | None] = []

    def watched(*problem: object, deadline: float | None, **others: object) -> object:
        deadlines.append(deadline)
        return search_all(*problem, deadline=deadline, **others)

    monkeypatch.setattr("graphplan.passes.placement.driver.search_all", watched)
    assert place(unlike(layers(8), 1.3), Limits.within(time_limit)).evaluation.feasible
    assert deadlines
    assert all((deadline is None) == (time_limit is None) for deadline in deadlines)


def test_knapsacks_that_there_is_no_time_to_prepare_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = waiting_layers(12)
    topology = read_max_memory(dict.fromkeys(range(5), int(graph.weight_bytes * 0.3) + (8 << 20)))
    problem = Problem(graph, topology, 0, offload=False)
    monkeypatch.setattr(close_by_columns, "_PREPARING", 1e3)
    monkeypatch.setattr(pricing.Pricing, "__init__", lambda *_: pytest.fail("prepared"))
    monkeypatch.setattr(close_by_labels, "_PREPARED", 0)
    solution = place(problem, Limits.within(2))
    assert solution.evaluation.feasible
    assert 0 < solution.lower_bound <= solution.evaluation.seconds


def test_a_search_without_a_choice_ends() -> None:
    graph = layers(20)
    fixed = {name: frozenset([i % 2]) for i, name in enumerate(graph.operations)}
    problem = Problem(graph, unlike(graph, 3.0).topology, "cpu", allowed=fixed)
    placed = place(problem).evaluation.schedule.assignment.operations
    assert placed == {name: i % 2 for i, name in enumerate(graph.operations)}


def test_intervals_fit_their_devices() -> None:
    shares = Shares(unlike(layers(40), 1.1))
    pricing = Pricing(shares)
    found = list(intervals(shares))
    assert found
    fitting = 0
    for kind, units in found:
        taken, nbytes = shares.complete(units)
        inside = np.nonzero(units)[0]
        assert (np.diff(inside) == 1).all()
        fitting += nbytes + pricing.activation_bytes(kind, taken) <= shares.room[kind]
    assert fitting > len(found) / 2


def test_devices_take_turns_where_fetches_are_what_takes_time() -> None:
    """Each accelerator computes while the other fetches, which no contiguous placement lets them do."""
    graph = layers(24, 8 << 20, kinds=1)
    topology = read_max_memory({0: 60 << 20, 1: 60 << 20, "cpu": 1 << 34})
    problem = Problem(graph, with_speeds(topology, {"cpu": Speed(1e9, 1e9)}), "cpu")
    found = place(problem).evaluation
    half = {name: int(i >= 12) for i, name in enumerate(graph.operations)}
    contiguous = evaluate(problem, reside(problem, half, frozenset(graph.weights)))
    streamed = {s.device for s in found.schedule.rings}
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


def test_branches_are_left_alone_where_there_is_no_time_for_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other would be made until the deadline, and not one of them looked into."""
    problem, best = problem_of(100, next(iter(KINDS)), 9)
    generation = ColumnGeneration(Pricing(Shares(problem)), [best])
    generation.run(enough=np.inf, work=1e8)
    generation._took = dict.fromkeys(Effort, 1e6)  # seconds that a round takes, as far as it knows
    parted = [Limit(0, 0, 0, least=False), Limit(0, 0, 1, least=True)]
    monkeypatch.setattr(branch, "_limits", lambda part: parted)
    tree = Tree(generation)
    work = 20.0 * generation.pricing.work(Effort.WHOLE)
    tree.grow(enough=np.inf, work=work, deadline=time.monotonic() + 60.0)
    assert tree.looked == 2
    assert tree.bound >= generation.bound
