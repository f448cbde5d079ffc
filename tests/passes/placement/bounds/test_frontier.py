"""The frontier: exact without budgets, exchangeable devices in order, relaxed states below all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from placements import HOST, ample, best_of_all, equal_cards, resident_problems, stack, steered
from random_problems import TINY

from graphplan.devices.topology import CPU, DeviceKey, Link
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds import frontier as frontiers
from graphplan.passes.placement.bounds.frontier import DpStage, Frontier, make_stages
from graphplan.passes.placement.problem import Problem

MIB = 1 << 20


def shortest(frontier: Frontier, stages: list[DpStage]) -> float:
    """Seconds of the shortest path through all steps, whatever the bytes."""
    rest = np.zeros(len(stages[-1].states))
    for stage in reversed(stages):
        rest = (stage.seconds + rest[stage.next_state]).min(axis=0)
    return float(rest[0]) + frontier.constant


def without_budgets(arrays: Arrays, states: int = 10**6) -> float:
    """Seconds of the fastest placement, by the frontier."""
    frontier = Frontier(arrays)
    with steered(frontiers, relaxed_states=states):
        return shortest(frontier, make_stages(frontier, ample()))


@pytest.mark.parametrize(("seeds", "minimum"), [(40, 20), pytest.param(120, 60, marks=pytest.mark.slow)])
def test_the_shortest_path_is_the_best_placement_without_budgets(seeds: int, minimum: int) -> None:
    compared = 0
    for arrays in resident_problems(TINY, seeds):
        found, best = without_budgets(arrays), best_of_all(arrays, budgets=False)
        if returns_weights(arrays):  # whose way back is not counted
            assert found <= best * (1 + 1e-9)
            continue
        assert found == pytest.approx(best, rel=1e-9)
        compared += 1
    assert compared >= minimum


def returns_weights(arrays: Arrays) -> bool:
    """Whether weights that have no fixed home are returned."""
    returned = arrays.item[arrays.reader == arrays.count]
    return bool(((returned >= arrays.values) & (arrays.fixed[returned] < 0)).any())


def test_relaxed_states_only_lower_the_bound() -> None:
    lower = 0
    for arrays in resident_problems(TINY, 120, max_placements=10**5):
        exact = without_budgets(arrays)
        for states in (1, 4, 12):
            relaxed = without_budgets(arrays, states)
            assert relaxed <= exact * (1 + 1e-12)
            lower += relaxed < exact * (1 - 1e-9)
    assert lower >= 10


def able(frontier: Frontier, states: np.ndarray, step: int) -> list[int]:
    """Devices that a step may be placed on after one state."""
    _, seconds = frontier.extend(frontier.steps[step], states)
    return np.flatnonzero(np.isfinite(seconds[:, 0])).tolist()


def test_exchangeable_devices_come_into_use_in_order() -> None:
    frontier = Frontier(Arrays(Problem(stack([MIB] * 4), equal_cards(3), CPU)))
    assert frontier.use_order == [(1, 0), (2, 1)]
    states = frontier.start()
    assert able(frontier, states, 0) == [0]
    states, _ = frontier.extend(frontier.steps[0], states)
    assert able(frontier, states[0], 1) == [0, 1]
    states, _ = frontier.extend(frontier.steps[1], states[0])
    assert able(frontier, states[0], 2) == [0, 1]
    assert able(frontier, states[1], 2) == [0, 1, 2]


def test_different_devices_are_used_in_any_order() -> None:
    topology = equal_cards(2, HOST)
    topology = replace(topology, links={(0, CPU): Link(1e9, 0.0)})
    frontier = Frontier(Arrays(Problem(stack([MIB] * 4), topology, CPU)))
    assert not frontier.use_order
    assert able(frontier, frontier.start(), 0) == [0, 1, 2]


def joined(links: dict[tuple[DeviceKey, DeviceKey], Link], *, pinned: bool = False) -> Arrays:
    """A value that is made first and read again at the end, on three cards."""
    operations = [
        Operation("a", "f", ("x",), ("a",)),
        Operation("b", "f", ("a",), ("b",)),
        Operation("c", "f", ("a", "b"), ("c",)),
    ]
    values = [Value(name, MIB, MIB) for name in "xabc"]
    graph = Graph(operations, values, [], ["x"], ["c"])
    topology = replace(equal_cards(3), links=links)
    allowed = {name: frozenset[DeviceKey]({key}) for key, name in enumerate("abc")} if pinned else {}
    return Arrays(Problem(graph, topology, CPU, allowed=allowed))


def test_unequal_links_need_the_maker_in_the_state() -> None:
    near: dict[tuple[DeviceKey, DeviceKey], Link] = {(0, 2): Link(1e12, 0.0)}
    assert not Frontier(joined({})).needs_home
    assert Frontier(joined(near)).needs_home
    assert Frontier(joined(near)).width == 2 * Frontier(joined({})).width
    for links in ({}, near, {(1, 2): Link(1e8, 0.0)}, {(0, 1): Link(1e8, 0.0)}):
        for pinned in (False, True):
            arrays = joined(links, pinned=pinned)
            assert without_budgets(arrays) == pytest.approx(best_of_all(arrays, budgets=False), rel=1e-12)
    assert without_budgets(joined(near, pinned=True)) < without_budgets(joined({}, pinned=True))


def test_shared_weight_variable_precedes_its_first_reader() -> None:
    arrays = Arrays(Problem(stack([MIB] * 5 + [0], head="w2"), equal_cards(2), CPU))
    frontier = Frontier(arrays)
    assert [step.variable for step in frontier.steps] == [0, 1, 6, 2, 3, 4, 5]
    assert [step.nbytes for step in frontier.steps] == [MIB, MIB, MIB, 0, MIB, MIB, 0]
    first = Frontier(arrays, first=0)
    assert [step.variable for step in first.steps] == [6, 0, 1, 2, 3, 4, 5]
    fixed = first.with_first_home(0)  # as good as the other card
    found = shortest(fixed, make_stages(fixed, ample()))
    assert found == pytest.approx(without_budgets(arrays), rel=1e-12)


def test_frontier_with_first_home_keeps_the_home() -> None:
    mixed = equal_cards(2)
    mixed = replace(mixed, devices=(mixed.devices[0], replace(mixed.devices[1], flops=5e11)))
    arrays = Arrays(Problem(stack([MIB] * 5 + [0], 10**8, head="w0"), mixed, CPU))
    frontier = Frontier(arrays, first=0)
    found = []
    for home in (0, 1):
        fixed = frontier.with_first_home(home)
        found.append(shortest(fixed, make_stages(fixed, ample())))
        assert able(fixed, fixed.start(), 0) == [home]
    item = arrays.shared[0]
    chosen = np.full(len(arrays.names), -1)
    chosen[item] = 0
    assert found[0] == pytest.approx(arrays.seconds(np.zeros(6, dtype=np.int64), chosen), rel=1e-12)
    assert found[1] > found[0]
    assert min(found) == pytest.approx(best_of_all(arrays, budgets=False), rel=1e-12)


def test_equal_layers_share_their_stages() -> None:
    frontier = Frontier(Arrays(Problem(stack([MIB] * 100), equal_cards(4), CPU)))
    stages = make_stages(frontier, ample())
    assert len(stages) == 100
    assert len({id(stage) for stage in stages}) < 20
