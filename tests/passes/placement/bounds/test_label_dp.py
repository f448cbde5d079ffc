"""Label setting: exact while no label is dropped, a bound where one is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from placements import HOST, ample, best_of_all, equal_cards, resident_problems, stack, steered
from random_problems import TINY

from graphplan.devices.topology import CPU, Topology
from graphplan.ir.graph import Graph
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds import frontier as frontiers
from graphplan.passes.placement.bounds.frontier import Frontier, make_stages
from graphplan.passes.placement.bounds.label_dp import Completion, LabelSearchResult, max_width, search_labels
from graphplan.passes.placement.bounds.relaxation import Buffers, Relaxation
from graphplan.passes.placement.problem import Problem

MIB = 1 << 20
TIGHT = 1 + 1e-9
WIDE = 10**6
# values of a few bytes, so that weights alone decide what fits
LIGHT = replace(TINY, nbytes=(64 << 10, 4 << 20), special=0.0)


def relax(arrays: Arrays, states: int = 10**6) -> Relaxation:
    frontier = Frontier(arrays)
    with steered(frontiers, relaxed_states=states):
        stages = make_stages(frontier, ample())
    found = Relaxation(frontier, stages, Buffers.none(frontier.devices))
    found.improve(math.inf, ample())
    return found


def search(relaxation: Relaxation, width: int, incumbent_seconds: float = 1e3) -> LabelSearchResult:
    return search_labels(relaxation, width, incumbent_seconds, ample())


def expanded(arrays: Arrays, completion: Completion) -> tuple[np.ndarray, np.ndarray]:
    """Devices of operations, and homes."""
    chosen = np.full(len(arrays.names), -1)
    chosen[arrays.shared] = completion.device[len(arrays.units) :]
    return arrays.expand(completion.device[: len(arrays.units)]), chosen


def light(graph: Graph) -> Graph:
    """The same with values that take next to nothing."""
    values = [replace(v, nbytes=min(v.nbytes, 4), copy_bytes=4) for v in graph.values.values()]
    operations = [replace(operation, workspace={}) for operation in graph.operations.values()]
    parts = operations, values, graph.weights.values(), graph.inputs, graph.outputs
    return Graph(*parts).tied(graph.together)


def light_problems(seeds: int) -> list[Arrays]:
    found = []
    for arrays in resident_problems(LIGHT, seeds, max_placements=1500):
        problem = replace(arrays.problem, graph=light(arrays.graph), host=CPU)
        specs = [replace(s, device=f"sim:{s.key}", memory=s.memory + 8192) for s in problem.topology.devices]
        topology = replace(problem.topology, devices=tuple(specs))
        found.append(Arrays(replace(problem, topology=topology)))
    return found


@pytest.mark.slow
def test_label_search_is_exact_without_dropped_labels() -> None:
    """But for values, that take up to a page each."""
    compared, equal = 0, 0
    for arrays in light_problems(120):
        best, relaxation = best_of_all(arrays), relax(arrays)
        if not relaxation.possible:
            assert best == math.inf
            continue
        found = search(relaxation, WIDE)
        assert found.exact
        if not found.completions:
            assert best == math.inf
            continue
        assert found.bound <= best * TIGHT
        first = found.completions[0]
        assert first.seconds == pytest.approx(found.bound, rel=1e-9)
        devices, chosen = expanded(arrays, first)
        assert first.seconds == pytest.approx(arrays.seconds(devices, chosen), rel=1e-9)
        compared += 1
        equal += first.seconds == pytest.approx(best, rel=1e-9)
    assert compared >= 40
    assert equal >= 0.9 * compared


def test_completion_seconds_are_exact() -> None:
    for arrays in light_problems(60):
        relaxation = relax(arrays)
        if not relaxation.possible:
            continue
        for completion in search(relaxation, 20).completions:
            seconds = arrays.seconds(*expanded(arrays, completion))
            assert completion.seconds == pytest.approx(seconds, rel=1e-9)
            assert not completion.streamed.any()
            assert (completion.spare >= 0).all()


@pytest.mark.parametrize("width", [1, *(pytest.param(width, marks=pytest.mark.slow) for width in (3, 10))])
def test_narrow_search_proves_no_more_than_wide(width: int) -> None:
    dropped = 0
    for arrays in light_problems(80):
        relaxation = relax(arrays)
        if not relaxation.possible:
            continue
        wide, narrow = search(relaxation, WIDE), search(relaxation, width)
        assert narrow.bound <= wide.bound * TIGHT
        assert not narrow.completions or narrow.completions[0].seconds >= wide.bound / TIGHT
        dropped += not narrow.exact
    assert dropped >= 5 or width == 10


@pytest.mark.parametrize("count", [50, pytest.param(100, marks=pytest.mark.slow)])
def test_the_bound_is_not_above_the_best_placement(count: int) -> None:
    for arrays in resident_problems(TINY, count, max_placements=500):
        best = best_of_all(arrays)
        for states in (4, 10**6):
            relaxation = relax(arrays, states)
            if relaxation.possible:
                for width in (2, 50):
                    assert min(search(relaxation, width).bound, 1e3) <= best * TIGHT


def test_labels_slower_than_the_incumbent_are_pruned() -> None:
    for arrays in light_problems(60):
        relaxation = relax(arrays)
        whole = search(relaxation, WIDE) if relaxation.possible else None
        if whole is None or not whole.completions:
            continue
        best = whole.completions[0].seconds
        none = search(relaxation, WIDE, best * (1 - 1e-6))
        assert none.exact
        assert none.bound == pytest.approx(best * (1 - 1e-6))
        assert all(completion.seconds >= best / TIGHT for completion in none.completions)
        some = search(relaxation, WIDE, best * (1 + 1e-6))
        assert some.completions[0].seconds == pytest.approx(best)


def test_a_margin_leaves_room() -> None:
    arrays = Arrays(Problem(stack([MIB] * 12), equal_cards(2, memory=9 * MIB, kind="sim"), CPU))
    relaxation = relax(arrays)
    for margin in (0.0, 1.0 * MIB, 2.0 * MIB):
        found = search_labels(relaxation, WIDE, 1e3, ample(), np.array([margin, margin]))
        assert found.completions
        for completion in found.completions:
            devices, chosen = expanded(arrays, completion)
            assert (arrays.resident(arrays.homes(devices, chosen)) <= arrays.room - margin).all()
            assert (completion.spare >= 0).all()
    assert not search_labels(relaxation, WIDE, 1e3, ample(), np.full(2, 4.0 * MIB)).completions


@pytest.mark.parametrize("visits", [2e5, 1e6])
def test_search_of_max_width_finishes(visits: float) -> None:
    tried = 0
    for arrays in resident_problems(TINY, 40):
        relaxation = relax(arrays)
        if relaxation.possible and (width := max_width(relaxation, visits)) > 0:
            tried += 1
            effort = ample(visits)
            found = search_labels(relaxation, width, 1e3, effort)
            assert not effort.over
            assert found.completions or found.bound > 0  # what ends too early has neither
    assert tried > 10


def test_search_ends_without_effort() -> None:
    arrays = Arrays(Problem(stack([MIB] * 12), equal_cards(2, memory=9 * MIB, kind="sim"), CPU))
    relaxation, effort = relax(arrays), ample(1.0)
    found = search_labels(relaxation, WIDE, 1e3, effort)
    assert (found.completions, found.bound, found.exact) == ((), 0.0, False)
    assert effort.over


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_more_slots_hide_more_of_the_copies(slots: int) -> None:
    """Of equal layers that are all streamed; the search's clock is exact where segments are its steps."""
    graph = stack([4 * MIB] * 12, [10**9, 2 * 10**8] * 6)
    card = replace(equal_cards(1, kind="sim").devices[0], memory=slots * 4 * MIB + 8192)
    topology = Topology((card, replace(HOST, flops=1e6)))
    arrays = Arrays(Problem(graph, topology, CPU))
    frontier = Frontier(arrays, streaming=True, guide=True)
    buffers = Buffers(np.array([slots, 0]), np.array([4.0 * MIB, 0.0]), np.zeros(2))
    relaxation = Relaxation(frontier, make_stages(frontier, ample()), buffers)
    relaxation.improve(math.inf, ample())
    found = search(relaxation, 500)
    assert found.completions
    first = found.completions[0]
    assert first.streamed.all()
    link = topology.default_link
    copies, runs = 12 * (link.latency + 4 * MIB / link.bandwidth), float(arrays.compute[0].sum())
    if slots == 1:  # a copy waits for the reader of the one before
        assert first.seconds >= copies + runs - 1e-9
    else:
        assert first.seconds < copies + runs
        assert first.seconds >= max(copies, runs)
