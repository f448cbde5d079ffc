"""Random problems: no false bound, no plan that breaks a rule, none refused that can be placed.

Seeds come in blocks so that several processes share them. ``random_placements.py`` runs more.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from brute import Brute, Space
from placement_api import Bound, Problem, Scope, Solution, evaluate, place, place_or_map
from placement_checks import Effort, least_excess, sound, violations
from random_problems import (
    BUDGETS,
    DEVICES,
    MEDIUM,
    TINY,
    WITH_DISK,
    Parameters,
    random_instance,
    restrict,
    with_disk,
)

from graphplan.devices.topology import CPU, DISK, DeviceSpec, Link, Topology
from graphplan.errors import InfeasibleError
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement import resident
from graphplan.passes.placement.bounds.disk_reads import least_disk_seconds
from graphplan.passes.placement.bounds.label_dp import LabelSearchResult, search_labels
from graphplan.passes.placement.bounds.relaxation import Relaxation
from graphplan.passes.placement.driver import attempt
from graphplan.passes.placement.infeasible import peaks_or_given
from graphplan.passes.placement.params import PARAMS, Limits

TINY_BLOCK, MEDIUM_BLOCK = 6, 2
KIB, MIB = 1 << 10, 1 << 20
CARD = DeviceSpec(0, "cuda:0", 0, 1e14, 1e12, 4e-6)


def found_wrong(parameters: Parameters, block: int, size: int, effort: Effort) -> list[str]:
    """The violations of a block of seeds; every eighth problem is placed twice."""
    wrong = []
    for seed in range(block * size, (block + 1) * size):
        instance = random_instance(seed, parameters)
        effort = replace(effort, place_twice=seed % 8 == 0)
        wrong += [f"{instance}: {text}" for text in violations(instance.problem, place, seed, effort)]
    return wrong


def blocks(count: int, *, quick: int | None = None) -> list[Any]:
    """Blocks of seeds, of which all but ``quick`` are slow tests."""
    return [pytest.param(n, marks=[pytest.mark.slow] * (n != quick)) for n in range(count)]


@pytest.mark.parametrize("seed", [102816, 103059, 120306])
def test_models_that_only_read_sizes_are_placed(seed: int) -> None:
    problem = random_instance(seed, TINY).problem
    assert all(operation.host_only for operation in problem.graph.operations.values())
    assert not violations(problem, place, seed, Effort(2_000))


def test_unread_weight_is_placed_where_its_allocation_fits() -> None:
    """Regression: the roomiest device lacked a growth step of CUDA's allocator; the bound was false."""
    problem = random_instance(604509, TINY).problem
    assert not violations(problem, place, 604509, Effort(2_000))


@pytest.mark.parametrize("block", blocks(24, quick=1))
def test_tiny_problems(block: int) -> None:
    wrong = found_wrong(TINY, block, TINY_BLOCK, Effort(placements=1000, restricted=1))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("seed", [112, pytest.param(148, marks=pytest.mark.slow)])
def test_activations_that_fill_the_gpus_are_spread(seed: int) -> None:
    """A random walk finds placements that fit."""
    instance = random_instance(seed, MEDIUM)
    assert place(instance.problem).evaluation.feasible, instance


def test_streamed_placements_over_the_budgets_are_repaired() -> None:
    """With all weights streamed there is no room for the slots: the largest but one has to reside."""
    instance = random_instance(50165, TINY)
    assert place(instance.problem).evaluation.feasible, instance


def test_exact_search_is_not_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operations that fit nowhere: a wider search would keep the same labels."""
    calls = Counter[int]()

    def counted(relaxation: Relaxation, width: int, *arguments: Any, **options: Any) -> LabelSearchResult:
        calls[width] += 1
        return search_labels(relaxation, width, *arguments, **options)

    monkeypatch.setattr(resident, "search_labels", counted)
    problem = random_instance(7012, TINY).problem
    assert attempt(problem, Limits(), None) is None
    assert sum(calls.values()) <= 1 + PARAMS.retries + len(problem.topology.devices)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_zero_relaxation_bound_is_accepted() -> None:
    """Streamed labels that cost alike are ordered by bytes; how alike is a share of the bound."""
    instance = random_instance(424, MEDIUM)
    assert place(instance.problem).evaluation.feasible, instance


@pytest.mark.parametrize("block", blocks(12))
def test_medium_problems(block: int) -> None:
    wrong = found_wrong(MEDIUM, block, MEDIUM_BLOCK, Effort(placements=200, restricted=1))
    assert not wrong, "\n".join(wrong)


# -- with a disk ------------------------------------------------------------------------------------------


def needs_disk(problem: Problem) -> bool:
    """Whether memory alone cannot hold the weights."""
    return problem.graph.weight_bytes > sum(spec.room for spec in problem.topology.computing)


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(20, quick=2))
def test_problems_with_a_disk(block: int) -> None:
    """Regression (block 21, where the disk's link is faster than the CPU's): the bound was false."""
    wrong, size = [], 10
    for seed in range(block * size, (block + 1) * size):
        instance = random_instance(seed, WITH_DISK)
        problem = with_disk(instance)
        if needs_disk(problem):
            found = violations(problem, place_or_map, seed, Effort(placements=2000, restricted=1))
            wrong += [f"{instance}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [29, 41])
def test_peaks_on_disk_as_budgets_are_placed_again(seed: int) -> None:
    problem = with_disk(random_instance(seed, WITH_DISK))
    peaks = peaks_or_given(
        problem.topology.with_memory(dict.fromkeys(problem.topology.keys, 0)),
        place_or_map(problem).evaluation,
    )
    assert place_or_map(replace(problem, topology=problem.topology.with_memory(peaks))).evaluation.feasible


@pytest.mark.full_search
@pytest.mark.parametrize("seed", [41, pytest.param(94, marks=pytest.mark.slow)])
def test_plans_with_disk_equal_exhaustive_optimum(seed: int) -> None:
    """Regression: without a climb after weights had moved to disk, plans took 2.2 and 1.7 times as long."""
    problem = with_disk(random_instance(seed, WITH_DISK))
    best = Space(problem, alone=False).best()
    assert best is not None
    assert place_or_map(problem).evaluation.seconds <= 1.001 * best.seconds


@pytest.mark.parametrize("block", blocks(4, quick=0))
def test_disk_read_bound_holds_for_all_placements(block: int) -> None:
    """Against every placement, also with weights that an earlier plan has left on disk."""
    compared, tight, size = 0, 0, 150
    for seed in range(block * size, (block + 1) * size):
        problem, draw = with_disk(random_instance(seed, WITH_DISK)), random.Random(seed)
        settled = sorted(name for name in Space(problem, alone=False).mappable if draw.random() < 0.2)
        homes = {**problem.fixed_weights, **dict.fromkeys(settled, DISK)}
        problem = replace(problem, fixed_weights=homes)
        space = Space(problem, alone=False)
        if space.count > 500 or not (settled or needs_disk(problem)):
            continue
        best = space.best()
        if best is not None:
            bound = least_disk_seconds(problem, settled, sorted(space.mappable))
            assert bound <= best.seconds * (1 + 1e-9), f"seed {seed}"
            compared, tight = compared + 1, tight + (bound > 0.9 * best.seconds)
    assert compared > 20
    assert tight > 5


# -- bounds that were false once --------------------------------------------------------------------------


def one_card_and_the_cpu() -> Problem:
    """Operations that differ only in their own weights; half of the large ones fit."""
    large = {1: 1, 3: 1, 5: 1, 8: 1, 13: 2, 16: 1, 17: 1, 18: 2, 23: 1, 30: 1}
    operations, values, weights, last = [], [Value("x", 512, 512)], [], "x"
    for i in range(33):
        sizes = [4 * KIB] * (2 - large.get(i, 0)) + [16 * MIB] * large.get(i, 0)
        own = [Weight(f"w{i}.{k}", nbytes) for k, nbytes in enumerate(sizes)]
        reads = (last, *(weight.name for weight in own))
        operations.append(Operation(f"v{i}", "f", reads, (f"v{i}",), (), 10**7, 4096))
        values.append(Value(f"v{i}", 512, 512))
        weights += own
        last = f"v{i}"
    cpu = DeviceSpec(CPU, CPU, 1 << 40, 1e12, 5e10, 20e-6)
    topology = Topology((replace(CARD, memory=(6 * 16 + 2) * MIB), cpu))
    return Problem(Graph(operations, values, weights, ["x"], [last]), topology, CPU)


def three_equal_cards() -> Problem:
    """A stack with a tied embedding that two cards hold: 1 and 2 are close to each other, 0 is far."""
    operations, values = [], [Value("x", 512, 512), Value("h", 64 * KIB, 64 * KIB)]
    weights = [Weight("embedding", 8 * MIB)]
    operations.append(Operation("h", "embedding", ("x", "embedding"), ("h",), (), 10**6, 64 * KIB))
    last = "h"
    for i in range(20):
        weights.append(Weight(f"w{i}", MIB))
        values.append(Value(f"v{i}", 64 * KIB, 64 * KIB))
        operations.append(Operation(f"v{i}", "linear", (last, f"w{i}"), (f"v{i}",), (), 10**8, MIB))
        last = f"v{i}"
    values.append(Value("y", 64 * KIB, 64 * KIB))
    operations.append(Operation("y", "linear", (last, "embedding"), ("y",), (), 10**8, 8 * MIB))
    graph = Graph(operations, values, weights, ["x"], ["y"])
    memory = graph.weight_bytes * 6 // 10
    cards = tuple(replace(CARD, key=key, device=f"cuda:{key}", memory=memory) for key in range(3))
    near, far = Link(100e9, 2e-6), Link(1e9, 1e-3)
    return Problem(graph, Topology(cards, {(1, 2): near, (0, 1): far, (0, 2): far}), CPU)


@pytest.mark.slow
def test_operations_with_different_own_weights_are_placed_within_bound() -> None:
    problem = one_card_and_the_cpu()
    solution = place(problem)
    on_cpu = ("v13", "v18", "v23", "v30")  # what they read takes half of the large weights' bytes
    rules = {name: frozenset({CPU if name in on_cpu else 0}) for name in problem.graph.operations}
    by_hand = restrict(problem, rules)
    assert by_hand is not None
    pinned = place(by_hand)
    assert pinned.evaluation.seconds < 390e-6
    assert solution.bound.seconds <= pinned.evaluation.seconds * (1 + 1e-9), solution.bound.text
    assert solution.evaluation.seconds <= pinned.evaluation.seconds * (1 + 1e-9)
    assert not violations(problem, place, effort=Effort(steps=1000))


def test_identical_gpus_with_unequal_links_are_placed_within_bound() -> None:
    problem = three_equal_cards()
    solution = place(problem)
    near = restrict(problem, dict.fromkeys(problem.graph.operations, frozenset({1, 2})))
    assert near is not None
    pinned = place(near)
    assert pinned.evaluation.seconds < 160e-6
    assert solution.bound.seconds <= pinned.evaluation.seconds * (1 + 1e-9), solution.bound.text
    assert solution.evaluation.seconds <= pinned.evaluation.seconds * (1 + 1e-9)
    assert not violations(problem, place)


# -- the checks and the problems themselves ---------------------------------------------------------------


def by_brute_force(problem: Problem) -> Solution:
    """A perfect planner for tiny problems."""
    plain, whole = (Space(problem, alone=alone) for alone in (True, False))
    best = plain.best() if plain.accelerators else None
    if best is not None:
        return Solution(best, Bound(best.seconds, "every placement", Scope.WITHOUT_OFFLOAD))
    best = whole.best()
    if best is None:
        raise InfeasibleError("no placement fits")
    return Solution(best, Bound(best.seconds, "every placement"))


@pytest.mark.parametrize(("seeds", "minimum"), [(12, 3), pytest.param(40, 10, marks=pytest.mark.slow)])
def test_checks_accept_exhaustive_optimum(seeds: int, minimum: int) -> None:
    placed, effort = 0, Effort(placements=300, restricted=3, place_twice=True)
    for seed in range(seeds):
        problem = random_instance(seed, TINY).problem
        if Space(problem, alone=False).count <= effort.placements:
            assert not violations(problem, by_brute_force, seed, effort)
            placed += 1
    assert placed > minimum


@pytest.mark.parametrize(("seeds", "minimum"), [(20, 3), pytest.param(40, 6, marks=pytest.mark.slow)])
def test_checks_detect_wrong_plans_and_bounds(seeds: int, minimum: int) -> None:
    """Arbitrary plans that claim to be optimal, bounds that are slightly too high, refusals."""

    def blind(problem: Problem) -> Solution:
        best = by_brute_force(problem)
        found = least_excess(
            Space(problem, alone=best.bound.scope is Scope.WITHOUT_OFFLOAD), random.Random(0), 300
        )
        assert found is not None
        return Solution(found, Bound(found.seconds, "hope", best.bound.scope))

    def high(problem: Problem) -> Solution:
        best = by_brute_force(problem)
        return replace(best, bound=replace(best.bound, seconds=best.evaluation.seconds * 1.001))

    def refusing(problem: Problem) -> Solution:
        raise InfeasibleError("no placement fits")

    effort, kinds = Effort(placements=300, steps=20, restricted=0), Counter[str]()
    for seed in range(seeds):
        problem = random_instance(seed, TINY).problem
        space = Space(problem, alone=False)
        if space.count > effort.placements or space.best() is None:
            continue
        kinds["placed"] += 1
        for planner in (blind, high, refusing):
            wrong = violations(problem, planner, seed, effort)
            kinds[planner.__name__] += bool(wrong)
    assert kinds["placed"] > minimum
    assert kinds["high"] == kinds["refusing"] == kinds["placed"]
    assert kinds["blind"] > minimum // 3


@pytest.mark.parametrize(("seeds", "minimum"), [(12, 3), pytest.param(40, 10, marks=pytest.mark.slow)])
def test_two_exhaustive_searches_agree(seeds: int, minimum: int) -> None:
    plain = Parameters((2, 6), cards=2, weights=1, special=0, grouped=0, pinned=0, kept=0)
    compared = 0
    for seed in range(seeds):
        problem = random_instance(seed, plain).problem
        graph = problem.graph
        if problem.allowed or not graph.weights.keys() <= graph.streamable & graph.consumers.keys():
            continue
        for alone in (True, False):
            space = Space(problem, alone=alone)
            keys = [key for key in problem.topology.keys if key != CPU or not alone]
            if not keys or not (problem.offload or alone):
                continue
            found, expected = space.best(), Brute(problem, keys, stream=not alone).best_below(math.inf)
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
                compared += 1
    assert compared > minimum


def test_problems_depend_only_on_their_seeds() -> None:
    for parameters in (TINY, MEDIUM):
        for seed in range(10):
            random.seed(seed + 1)
            assert random_instance(seed, parameters) == random_instance(seed, parameters)


def test_problems_are_of_all_kinds() -> None:
    instances = [random_instance(seed, MEDIUM) for seed in range(150)]
    problems = [instance.problem for instance in instances]
    graphs = [problem.graph for problem in problems]
    operations = [operation for graph in graphs for operation in graph.operations.values()]
    assert {instance.devices for instance in instances} == DEVICES.keys()
    assert {instance.budget for instance in instances} == BUDGETS.keys()
    assert {len(problem.topology.devices) for problem in problems} == {1, 2, 3, 4}
    assert {len(operation.outputs) for operation in operations} == {1, 2, 3}
    assert any(operation.host_only for operation in operations)
    assert any(value.alias_of for graph in graphs for value in graph.values.values())
    assert any(weight.mutated for graph in graphs for weight in graph.weights.values())
    assert any(graph.changed_inputs for graph in graphs)
    assert any(len(group) > 1 for graph in graphs for group in graph.together)
    assert any(len(readers) > 1 for graph in graphs for readers in graph.readers.values())
    for attribute in ("offload", "returns_to_host", "streaming"):
        assert {getattr(problem, attribute) for problem in problems} == {True, False}
    assert any(problem.allowed for problem in problems)
    assert any(problem.fixed_weights for problem in problems)
    assert any(spec.reserve for problem in problems for spec in problem.topology.devices)
    assert {problem.host for problem in problems} > {CPU, 0}
    assert any(problem.host not in problem.topology for problem in problems)


def test_checks_detect_rule_violations() -> None:
    problem = three_equal_cards()
    solution = by_hand_on_one_and_two(problem)
    space = Space(problem, alone=True)
    assert not sound(problem, space, solution)
    assert sound(problem, space, replace(solution, bound=replace(solution.bound, seconds=1.0)))
    assert sound(problem, space, replace(solution, bound=replace(solution.bound, seconds=math.nan)))
    assert sound(problem, space, replace(solution, evaluation=replace(solution.evaluation, seconds=0.0)))
    pinned = restrict(problem, {"v3": frozenset({0})})
    assert pinned is not None
    assert sound(pinned, Space(pinned, alone=True), solution)
    smaller = replace(problem, topology=problem.topology.scaled(0.5))
    assert sound(smaller, space, solution)


def by_hand_on_one_and_two(problem: Problem) -> Solution:
    """The embedding and what reads it on 1, twelve of the layers on 2."""
    graph, first = problem.graph, {f"v{i}" for i in range(12)}
    operations = {name: 2 if name in first else 1 for name in graph.operations}
    weights = {name: operations[graph.readers[name][0]] for name in graph.weights}
    found = evaluate(problem, Assignment(operations, weights))
    return Solution(found, Bound(0.0, "nothing", Scope.WITHOUT_OFFLOAD))
