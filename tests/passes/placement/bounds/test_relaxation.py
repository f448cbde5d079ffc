"""The Lagrangian relaxation: its bound holds at any prices, which are equal within a device class."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from placements import HOST, ample, best_of_all, cards, equal_cards, resident_problems, stack
from random_problems import TINY

from graphplan.devices.topology import CPU, Topology
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds.frontier import Frontier, make_stages
from graphplan.passes.placement.bounds.relaxation import Buffers, Prices, Relaxation
from graphplan.passes.placement.problem import Problem

MIB = 1 << 20
TIGHT = 1 + 1e-9


def relax(arrays: Arrays, buffers: Buffers | None = None, *, streaming: bool = False) -> Relaxation:
    frontier = Frontier(arrays, streaming=streaming)
    if buffers is None and not streaming:
        buffers = Buffers.none(frontier.devices)
    return Relaxation(frontier, make_stages(frontier, ample()), buffers)


def improved(arrays: Arrays, target_bound: float = math.inf) -> Relaxation:
    found = relax(arrays)
    found.improve(target_bound, ample())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [80, pytest.param(200, marks=pytest.mark.slow)])
def test_the_bound_is_not_above_the_best_placement(count: int) -> None:
    compared, tight = 0, 0
    for arrays in resident_problems(TINY, count, max_placements=1000):
        best, found = best_of_all(arrays), improved(arrays)
        assert found.bound <= best * TIGHT
        assert found.possible or best == math.inf
        compared += best < math.inf
        tight += best < math.inf and found.bound >= 0.9 * best
    assert compared >= count / 4
    assert tight >= compared / 2


def test_every_price_gives_a_bound() -> None:
    draw = np.random.default_rng(1)
    for arrays in resident_problems(TINY, 60, max_placements=1000):
        best, found = best_of_all(arrays), relax(arrays)
        if not found.possible:
            assert best == math.inf
            continue
        for size in (0.0, 1e-12, 1e-10, 1e-8):
            prices = Prices(draw.exponential(size, len(found.room)), np.zeros(len(found.room)))
            bound, _, _ = found._dual(prices)
            assert bound <= best * TIGHT


def test_slope_is_a_supergradient_of_the_bound() -> None:
    """The bound is concave in the prices, so that a cutting plane is never below it."""
    draw = np.random.default_rng(2)
    for arrays in resident_problems(TINY, 40, max_placements=1000):
        found = relax(arrays)
        if not found.possible:
            continue
        points = [found._as_prices(draw.exponential(1e-4, 2 * len(found.room))) for _ in range(4)]
        values = [found._dual(prices) for prices in points]
        for here, (bound, _, slope) in zip(points, values, strict=True):
            for there, (other, _, _) in zip(points, values, strict=True):
                step = found._as_point(there) - found._as_point(here)
                assert other <= bound + slope @ step + 1e-12


def test_short_memory_raises_the_bound() -> None:
    fast, slow = equal_cards(2, memory=5 * MIB + 4096, kind="sim").devices
    slow = replace(slow, flops=1e11)
    arrays = Arrays(Problem(stack([MIB] * 10, 10**9), Topology((fast, slow)), CPU))
    found = relax(arrays)
    free, _, _ = found._dual(found.prices)
    found.improve(math.inf, ample())
    best = best_of_all(arrays)
    assert free < 0.5 * best < 0.9 * best < found.bound <= best * TIGHT
    assert found.prices.per_byte[0] > 0
    assert found.prices.per_byte[1] == 0


def test_price_of_a_byte_may_exceed_a_forward_pass() -> None:
    """A pinned operation takes nearly all of the fast GPU; two operations compete for the remaining bytes."""
    graph = stack([60 * MIB, MIB, MIB], [1, 10**9, 10**9])
    fast, slow = equal_cards(2, memory=61 * MIB + 4096, kind="sim").devices
    topology = Topology((fast, replace(slow, flops=1e11)))
    arrays = Arrays(Problem(graph, topology, CPU, allowed={"v0": frozenset({0})}))
    found, best = improved(arrays), best_of_all(arrays)
    assert 0.9 * best <= found.bound <= best * TIGHT
    assert found.prices.per_byte[0] * 61 * MIB > best


def test_cost_to_go_of_start_equals_the_bound() -> None:
    for arrays in resident_problems(TINY, 40, max_placements=1000):
        found = improved(arrays)
        if not found.possible or not found.bound:
            continue
        priced = found.prices.per_byte @ found.room
        assert found.bound == pytest.approx(
            found.cost_to_go[0][0] - priced + found.frontier.constant, rel=1e-12
        )
        assert [len(seconds) for seconds in found.cost_to_go[1:]] == [
            len(stage.states) for stage in found.stages
        ]


def test_devices_of_a_class_have_equal_prices() -> None:
    graph = stack([MIB * (1 + i % 3) for i in range(12)], [10**8 * (1 + i % 4) for i in range(12)])
    for others in ((), (HOST,)):
        topology = equal_cards(3, *others, memory=9 * MIB, kind="sim")
        found = improved(Arrays(Problem(graph, topology, CPU)))
        count = sum(spec.is_accelerator for spec in topology.devices)
        assert len({*found.prices.per_byte[:count].tolist()}) == 1
    found = improved(Arrays(Problem(graph, cards(3, memory=9 * MIB), CPU)))
    assert found.frontier.classes == [[0], [1], [2]]


def test_weights_that_cannot_fit_leave_no_placement_possible() -> None:
    nothing = {"v1": frozenset({1})}
    topology = equal_cards(2, memory=3 * MIB, kind="sim")
    arrays = Arrays(Problem(stack([MIB] * 4), topology, CPU, allowed=nothing))
    assert improved(arrays).bound < math.inf
    crowded = relax(arrays, Buffers(np.array([2, 2]), np.array([4.0 * MIB, 4.0 * MIB]), np.zeros(2)))
    assert not crowded.possible
    crowded.improve(math.inf, ample())
    assert crowded.bound == math.inf


def test_streaming_bound_includes_copied_bytes() -> None:
    graph = stack([4 * MIB] * 12, 10**6)
    topology = equal_cards(1, HOST, memory=20 * MIB, kind="sim")
    topology = replace(topology, devices=(topology.devices[0], replace(HOST, flops=1e6)))
    arrays = Arrays(Problem(graph, topology, CPU))
    found = relax(arrays, streaming=True)
    assert np.isfinite(found.stream_seconds).any()
    found.improve(math.inf, ample())
    least = (48 - 20) * MIB / 5e9  # what the card does not hold
    assert found.bound >= 0.9 * least
    two = Buffers(np.array([2, 0]), np.array([4.0 * MIB, 0.0]), np.zeros(2))
    narrow = relax(arrays, two, streaming=True)
    assert narrow.streams
    narrow.improve(math.inf, ample())
    assert narrow.bound >= found.bound * (1 - 1e-3)
    assert narrow.bound >= 0.9 * (48 - 20 + 8) * MIB / 5e9 - 8 * MIB / 5e9
