"""The integer program over operation classes: its bound exceeds no placement, and classes are pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from placements import (
    HOST,
    ample,
    best_of_all,
    cards,
    equal_cards,
    random_units,
    resident_problems,
    stack,
    steered,
)
from random_problems import MEDIUM, TINY, random_instance

from graphplan.devices.topology import CPU, DeviceKey, Link, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds import linear_program, milp
from graphplan.passes.placement.bounds.milp import _PlacementProgram, bound_by_classes
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import assign_weights

KIB, MIB = 1 << 10, 1 << 20
TIGHT = 1 + 1e-9


def bound_of(arrays: Arrays, known: float, *, streaming: bool) -> float:
    return bound_by_classes(arrays, known, ample(3e7), streaming=streaming)


@pytest.mark.parametrize("count", [60, pytest.param(120, marks=pytest.mark.slow)])
def test_the_bound_is_not_above_the_best_placement(count: int) -> None:
    compared, tight = 0, 0
    for arrays in resident_problems(TINY, count, max_placements=1000):
        best = best_of_all(arrays)
        if best == math.inf:
            continue
        for known in (best, 3 * best):
            found = bound_of(arrays, known, streaming=False)
            assert found <= best * TIGHT
        compared += 1
        tight += found >= 0.8 * best
    assert compared >= count / 3
    assert tight >= compared / 2


def test_streaming_bound_holds_for_resident_placements() -> None:
    """A placement without the CPU is one with it."""
    for arrays in resident_problems(TINY, 60, max_placements=500):
        best = best_of_all(arrays)
        if best < math.inf:
            assert bound_of(arrays, best, streaming=True) <= best * TIGHT


def streamed_placements(arrays: Arrays, draw: random.Random, tries: int) -> Iterator[Evaluation]:
    """Some within the budgets, most of which stream."""
    problem = arrays.problem
    streamable = [name for name in problem.graph.streamable if name not in problem.fixed_weights]
    for _ in range(tries):
        units = random_units(arrays, draw)
        if units is None or not len(units):
            return
        keys = [arrays.keys[d] for d in arrays.expand(units).tolist()]
        operations = dict(zip(problem.graph.operations, keys, strict=True))
        share = draw.random()
        away = [name for name in streamable if draw.random() < share]
        slots = dict.fromkeys(arrays.keys, draw.randint(1, 3))
        found = evaluate(problem, replace(assign_weights(problem, operations, away), slots=slots))
        if found.feasible:
            yield found


WITH_CPU = {"one card and the CPU": 2.0, "equal cards and the CPU": 1.0, "mixed cards and the CPU": 1.0}


SIZES = {"tiny": (TINY, 60, 150), "medium": (MEDIUM, 6, 40)}


@pytest.mark.parametrize("size", [pytest.param("tiny", marks=pytest.mark.slow), "medium"])
def test_streaming_bound_holds_for_random_placements(size: str) -> None:
    parameters, seeds, tries = SIZES[size]
    compared = 0
    for seed in range(seeds):
        problem = random_instance(seed, replace(parameters, devices=WITH_CPU)).problem
        if not problem.offload:
            continue
        arrays = Arrays(problem)
        placements = list(streamed_placements(arrays, random.Random(seed), tries))
        if not placements:
            continue
        best = min(found.seconds for found in placements)
        for known in (best, 0.3 * best):
            assert bound_of(arrays, known, streaming=True) <= best * TIGHT
        compared += 1
    assert compared >= seeds / 3


def classes_of(problem: Problem, *, streaming: bool = False) -> list[tuple[int, ...]]:
    return [c.units for c in _PlacementProgram(Arrays(problem), 1.0, streaming=streaming).classes]


def two_weights(*sizes: tuple[int, int]) -> Graph:
    """Operations in a row that read two weights each."""
    weights = [Weight(f"w{i}.{k}", nbytes) for i, pair in enumerate(sizes) for k, nbytes in enumerate(pair)]
    values, operations, last = [Value("x", 512, 512)], [], "x"
    for i in range(len(sizes)):
        values.append(Value(f"v{i}", 512, 512))
        reads = (last, f"w{i}.0", f"w{i}.1")
        operations.append(Operation(f"v{i}", "f", reads, (f"v{i}",), (), 10**7, 1))
        last = f"v{i}"
    return Graph(operations, values, weights, ["x"], [last])


@pytest.mark.parametrize("streaming", [False, True])
def test_operations_with_different_own_weights_get_two_classes(streaming: bool) -> None:
    topology = equal_cards(2, HOST)

    def count(*sizes: tuple[int, int]) -> int:
        """Classes, the ends left out: their inputs and outputs cost what others' do not."""
        graph = two_weights((512, 512), *(sizes * 20), (512, 512))
        inner = {*range(1, 1 + 20 * len(sizes))}
        found = classes_of(Problem(graph, topology, 1), streaming=streaming)
        return sum(bool(inner & {*units}) for units in found)

    assert count((4 * KIB, 4 * KIB)) == 1
    assert count((4 * KIB, 8 * KIB), (8 * KIB, 4 * KIB)) == 1
    assert count((4 * KIB, 4 * KIB), (4 * KIB, 8 * KIB)) == 2
    assert count((6 * KIB, 6 * KIB), (4 * KIB, 8 * KIB)) == 2  # as many bytes


def test_operations_with_different_properties_get_different_classes() -> None:
    sizes = [MIB] * 8
    plain = stack(sizes)
    problem = Problem(plain, equal_cards(2, HOST), CPU)

    def parted(other: Problem) -> bool:
        return not any({3, 4} <= {*units} for units in classes_of(other))

    assert not parted(problem)
    assert parted(replace(problem, graph=stack(sizes, [10**7] * 4 + [10**8] * 4)))
    assert parted(replace(problem, allowed={"v3": frozenset({0, 1})}))
    assert parted(replace(problem, fixed_weights={"w3": CPU}))
    operations = list(plain.operations.values())
    needy = [replace(op, workspace={"cuda": MIB}) if op.name == "v3" else op for op in operations]
    parts = plain.values.values(), plain.weights.values(), plain.inputs, plain.outputs
    assert parted(replace(problem, graph=Graph(needy, *parts)))
    tied = [
        replace(op, inputs=(*op.inputs, "w0")) if name == "v3" else op
        for name, op in plain.operations.items()
    ]
    assert parted(replace(problem, graph=Graph(tied, *parts)))


def test_a_stack_that_fits_exactly_is_bounded_exactly() -> None:
    """Half of the layers on a card at a tenth of the other's speed."""
    fast, slow = equal_cards(2, memory=6 * MIB + 4096, kind="sim").devices
    graph = stack([MIB] * 12, 10**9)
    topology = replace(equal_cards(2), devices=(fast, replace(slow, flops=1e11)))
    arrays = Arrays(Problem(graph, topology, CPU))
    best = best_of_all(arrays)
    found = bound_of(arrays, best, streaming=False)
    # it does not count the copy between the two halves
    copies = arrays.latency[0, 1] + 512 * arrays.per_byte[0, 1]
    assert best - 2 * copies <= found <= best * TIGHT


def test_bound_includes_the_copies_of_streamed_weights() -> None:
    graph = stack([4 * MIB] * 24, 10**7)
    card = equal_cards(1, kind="sim").devices[0]
    for held in (4, 8, 16):
        memory = held * 4 * MIB + 8192
        topology = replace(
            equal_cards(1), devices=(replace(card, memory=memory), replace(HOST, flops=1e6, bandwidth=1e6))
        )
        arrays = Arrays(Problem(graph, topology, CPU))
        found = bound_of(arrays, 1.0, streaming=True)
        assert found >= 0.95 * (24 - held) * 4 * MIB / 5e9


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 20), marks=pytest.mark.slow)])
def test_more_devices_or_memory_never_raise_the_bound(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        sizes = [draw.randint(1, 8) * MIB // 2 for _ in range(8)]
        graph = stack(sizes, [draw.randint(1, 9) * 10**8 for _ in sizes])
        bounds = []
        for share in (0.5, 0.6, 0.8, 1.2):
            topology = equal_cards(2, memory=int(graph.weight_bytes * share) + 64 * KIB, kind="sim")
            slower = replace(topology.devices[1], flops=2e11)
            topology = replace(topology, devices=(topology.devices[0], slower))
            arrays = Arrays(Problem(graph, topology, CPU))
            best = best_of_all(arrays)
            if best < math.inf:
                with steered(linear_program, milp_nodes=10**5):
                    bounds.append(bound_by_classes(arrays, best, ample(1e9), streaming=False))
        # each is proven up to the gap that is enough
        assert all(later <= before * 1.001 for before, later in itertools.pairwise(bounds))


def test_identical_gpus_are_grouped_unless_links_differ() -> None:
    """Where the program would be large otherwise."""
    graph = stack([MIB] * 30, 10**8)

    def groups(topology: Topology) -> list[list[int]]:
        with steered(milp, milp_variables=1):
            program = _PlacementProgram(Arrays(Problem(graph, topology, CPU)), 1.0, streaming=False)
            return [group.devices for group in program.groups]

    assert groups(equal_cards(8)) == [list(range(8))]
    assert groups(cards(8)) == [[d] for d in range(8)]
    near: dict[tuple[DeviceKey, DeviceKey], Link] = {(0, 1): Link(1e12, 0.0)}
    assert groups(replace(equal_cards(8), links=near)) == [[0, 1], list(range(2, 8))]


def test_bound_over_device_groups_holds() -> None:
    for arrays in resident_problems(TINY, 80, max_placements=1000):
        best = best_of_all(arrays)
        if best < math.inf:
            with steered(milp, milp_variables=1):
                assert bound_of(arrays, best, streaming=False) <= best * TIGHT


@pytest.mark.parametrize("nbytes", [MIB, 0])
@pytest.mark.parametrize("readers", [1, 2])
def test_streamed_weight_excludes_gradient_and_optimizer_state(readers: int, nbytes: int) -> None:
    """A slot and a copy are of the weight alone: with its gradient and state, it would not fit the card."""
    weight = Weight("w", nbytes, beside=(MIB, 2 * MIB))
    names = ["x", *(f"v{i}" for i in range(readers))]
    operations = [
        Operation(made, "f", (read, "w"), (made,), (), 10**9) for read, made in itertools.pairwise(names)
    ]
    graph = Graph(operations, [Value(name, 512, 512) for name in names], [weight], ["x"], names[-1:])
    problem = Problem(graph, equal_cards(1, HOST, memory=2 * MIB, kind="sim"), CPU)
    on_card = assign_weights(problem, dict.fromkeys(graph.operations, 0), ["w"])
    known = evaluate(problem, on_card)
    assert known.feasible
    assert bound_of(Arrays(problem), known.seconds, streaming=True) <= known.seconds * TIGHT
