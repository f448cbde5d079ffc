"""Segments: the best cuts of all, each link at its own cost, A, B, .., A for a tied weight."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from baselines import baselines
from placements import HOST, ample, equal_cards, stack
from second_set import second_set

from graphplan.devices.topology import CPU, DeviceKey, DeviceSpec, Link, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Value
from graphplan.passes.placement.arrays import Arrays, Ints
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.params import Effort, Limits
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.segment_dp import SegmentDP

KIB, MIB = 1 << 10, 1 << 20


def sim_cards(count: int, *others: DeviceSpec, memory: int = 1 << 30) -> Topology:
    """GPUs whose allocator rounds nothing."""
    return equal_cards(count, *others, memory=memory, kind="sim")


def all_segments(arrays: Arrays) -> Iterator[Ints]:
    """Every way to cut the order, and to put the segments on accelerators, each once."""
    accelerators = [d for d, spec in enumerate(arrays.specs) if spec.is_accelerator]
    for count in range(1, len(accelerators) + 1):
        for cuts in itertools.combinations(range(1, arrays.count), count - 1):
            lengths = np.diff([0, *cuts, arrays.count])
            for order in itertools.permutations(accelerators, count):
                yield np.repeat(np.array(order), lengths)


def best_segments(arrays: Arrays) -> float:
    """Seconds of the fastest within the budgets."""
    fitting = (devices for devices in all_segments(arrays) if arrays.fits(devices))
    return min((arrays.seconds(devices) for devices in fitting), default=math.inf)


def found_segments(arrays: Arrays, effort: Effort | None = None) -> tuple[float, Ints | None]:
    """Seconds and devices of the fastest that the search proposes within the budgets."""
    search, best, placed = SegmentDP(arrays, effort or ample()), math.inf, None
    for homes in search.homes():
        for _, devices in search.placements(homes):
            if arrays.fits(devices) and arrays.seconds(devices) < best:
                best, placed = arrays.seconds(devices), devices
    return best, placed


def random_links(draw: random.Random, keys: range) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    pairs = itertools.permutations([*keys, CPU], 2)
    return {pair: Link(draw.uniform(1e9, 2e10), draw.uniform(0, 2e-5)) for pair in pairs}


def drawn(seed: int) -> Arrays:
    """A stack on two or three cards of different speeds and budgets, half of them with links of their own."""
    draw = random.Random(seed)
    count = draw.randint(3, 9)
    sizes = [draw.randint(1, 12) * 64 * KIB for _ in range(count)]
    graph = stack(
        sizes, [draw.randint(1, 20) * 10**7 for _ in range(count)], activation=draw.choice((512, 2048))
    )
    cards = draw.randint(2, 3)
    specs = [
        replace(
            spec,
            flops=draw.choice((1e12, draw.uniform(3e11, 3e12))),
            memory=int(sum(sizes) * draw.uniform(0.35, 0.9)) + 64 * KIB,
        )
        for spec in sim_cards(cards).devices
    ]
    links = random_links(draw, range(cards)) if seed % 2 else {}
    return Arrays(Problem(graph, Topology(tuple(specs), links, Link(5e9, 1e-5)), CPU))


@pytest.mark.parametrize("seed", range(60))
def test_no_cuts_of_a_chain_are_better(seed: int) -> None:
    arrays = drawn(seed)
    found, _ = found_segments(arrays)
    assert found == pytest.approx(best_segments(arrays), rel=1e-9)


def unequal_links(*fast: tuple[int, int]) -> Topology:
    """Three equal cards, of which some pairs are close to each other."""
    near, far = Link(100e9, 2e-6), Link(1e9, 1e-3)
    links: dict[tuple[DeviceKey, DeviceKey], Link] = {
        (a, b): near if (a, b) in fast or (b, a) in fast else far
        for a, b in itertools.combinations(range(3), 2)
    }
    return Topology(sim_cards(3, memory=6 * MIB + 512 * KIB).devices, links, Link(5e9, 1e-5))


@pytest.mark.parametrize("fast", list(itertools.combinations(range(3), 2)))
def test_the_pair_with_the_fast_link_is_used(fast: tuple[int, int]) -> None:
    graph = stack([MIB] * 12, 10**8, activation=64 * KIB)
    arrays = Arrays(Problem(graph, unequal_links(fast), CPU))
    seconds, devices = found_segments(arrays)
    assert devices is not None
    assert {*devices.tolist()} == {*fast}
    assert seconds == pytest.approx(best_segments(arrays), rel=1e-9)


def test_segments_go_along_the_fast_links() -> None:
    graph = stack([MIB] * 17, 10**8, activation=64 * KIB)
    for middle in range(3):
        one, other = [d for d in range(3) if d != middle]
        arrays = Arrays(Problem(graph, unequal_links((one, middle), (middle, other)), CPU))
        _, devices = found_segments(arrays)
        assert devices is not None
        assert list(dict.fromkeys(devices.tolist()))[1] == middle


def test_links_may_differ_by_direction() -> None:
    graph = stack([MIB] * 12, 10**8, activation=MIB // 4)
    links: dict[tuple[DeviceKey, DeviceKey], Link] = {(0, 1): Link(1e8, 0.0), (1, 0): Link(1e11, 0.0)}
    topology = replace(sim_cards(2, memory=8 * MIB), links=links)
    _, devices = found_segments(Arrays(Problem(graph, topology, CPU)))
    assert devices is not None
    assert (devices[0], devices[-1]) == (1, 0)


def test_first_and_last_segments_are_close_to_the_host() -> None:
    graph = stack([MIB] * 12, 10**8, activation=MIB // 4)
    links: dict[tuple[DeviceKey, DeviceKey], Link] = {(CPU, 0): Link(1e8, 0.0), (1, CPU): Link(1e8, 0.0)}
    links |= {(CPU, 1): Link(1e11, 0.0), (0, CPU): Link(1e11, 0.0)}
    topology = replace(sim_cards(2, memory=8 * MIB), links=links)
    _, devices = found_segments(Arrays(Problem(graph, topology, CPU)))
    assert devices is not None
    assert (devices[0], devices[-1]) == (1, 0)


@pytest.mark.parametrize("cards", [2, 3])
def test_readers_of_tied_weight_share_a_device(cards: int) -> None:
    sizes = [8 * MIB, *[MIB] * 16]
    graph = stack([*sizes, 0], 10**8, activation=16 * KIB, head="w0")
    topology = sim_cards(cards, memory=14 * MIB if cards == 2 else 11 * MIB)
    arrays = Arrays(Problem(graph, topology, CPU))
    assert len(arrays.shared) == 1
    _, devices = found_segments(arrays)
    assert devices is not None
    assert devices[0] == devices[-1]
    order = [int(devices[0]), *(int(b) for a, b in itertools.pairwise(devices) if a != b)]
    assert len(order) == cards + 1  # A, B, .., A
    assert len({*order}) == cards


def test_the_longest_segment_is_as_short_as_can_be() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        costs = [draw.randint(1, 30) * 10**8 for _ in range(draw.randint(4, 12))]
        cards = draw.randint(2, 3)
        graph = stack([MIB] * len(costs), costs)
        links = replace(sim_cards(cards), default_link=Link(1e15, 0.0))  # what is copied counts for nothing
        arrays = Arrays(Problem(graph, links, CPU, balance=True))
        each = arrays.compute[0]

        def longest(devices: Ints, each: np.ndarray = each, cards: int = cards) -> float:
            return max(float(each[devices == d].sum()) for d in range(cards))

        search = SegmentDP(arrays, ample(), slowest=True)
        found = [devices for homes in search.homes() for _, devices in search.placements(homes)]
        best = min(longest(devices) for devices in all_segments(arrays))
        assert min(longest(devices) for devices in found) == pytest.approx(best, rel=1e-6)


def test_colocated_operations_are_not_separated() -> None:
    graph = stack([MIB] * 12, 10**8).tied([("v4", "v7")])
    arrays = Arrays(Problem(graph, sim_cards(2, memory=8 * MIB), CPU))
    search = SegmentDP(arrays, ample())
    assert not {5, 6, 7} & {*search.cuts.tolist()}
    for homes in search.homes():
        for _, devices in search.placements(homes):
            assert devices[4] == devices[7]


def test_segments_respect_allowed_devices() -> None:
    graph = stack([MIB] * 12, 10**8)
    allowed = {"v0": frozenset({1}), "v11": frozenset({0})}
    arrays = Arrays(Problem(graph, sim_cards(2, memory=8 * MIB), CPU, allowed=allowed))
    seconds, devices = found_segments(arrays)
    assert devices is not None
    assert (devices[0], devices[-1]) == (1, 0)
    assert seconds < math.inf


def test_excess_of_segment_equals_streamed_bytes() -> None:
    graph = stack([MIB] * 12, 10**8)
    arrays = Arrays(Problem(graph, sim_cards(1, HOST, memory=8 * MIB), CPU))
    search = SegmentDP(arrays, ample(), streaming=True)
    ((segment,), _), *_ = search.placements({})
    assert (segment.start, segment.end, segment.device) == (0, 12, 0)
    assert 4 * MIB <= segment.excess <= 4 * MIB + 16 * KIB
    assert not list(SegmentDP(arrays, ample()).placements({}))
    (with_cpu, _), *_ = SegmentDP(arrays, ample(), use_cpu=True).placements({})
    assert {segment.device for segment in with_cpu} == {0, 1}
    assert all(not segment.excess for segment in with_cpu)


def test_less_effort_cuts_at_fewer_positions() -> None:
    graph = stack([MIB] * 500, 10**8)
    arrays = Arrays(Problem(graph, sim_cards(4, memory=150 * MIB), CPU))
    few, many = (SegmentDP(arrays, Effort(visits)).cuts for visits in (1e4, 1e8))
    assert len(few) < len(many) <= 401
    for cuts in (few, many):
        assert (cuts[0], cuts[-1]) == (0, 500)
    found, _ = found_segments(arrays, Effort(1e5))
    assert found < math.inf


def test_cuts_separate_operations_that_make_large_values() -> None:
    """A head, and the loss over its logits, which alone may not fit a card."""
    graph = stack([KIB] * 2000, 10**8)
    large = {f"v{i}" for i in range(1992, 1999)}
    values = [replace(v, nbytes=MIB) if v.name in large else v for v in graph.values.values()]
    arrays = Arrays(Problem(graph.changed(values=values), sim_cards(2, HOST, memory=8 * MIB), CPU))
    assert {*range(1993, 2000)} <= {*SegmentDP(arrays, ample()).cuts.tolist()}


@pytest.mark.parametrize("name", ["97.14-random-5", "97.15-stack-7"])
def test_never_slower_than_first_fit(name: str) -> None:
    """Of unequal links there are so many orders that few cuts are left; tight budgets ask for all of them."""
    problem = second_set(97)[name]().problem
    filled = [found for found in baselines(problem) if found.name == "sequential fill" and found.seconds]
    assert place(problem).evaluation.seconds <= min(found.seconds or math.inf for found in filled)


def test_in_order_search_uses_all_cuts() -> None:
    problem = second_set(97)["97.15-stack-7"]().problem
    arrays, effort = Arrays(problem), Limits().work(len(problem.graph.operations))
    any_order, in_order = SegmentDP(arrays, effort), SegmentDP(arrays, effort, in_order=True)
    assert not any_order.complete
    assert in_order.complete
    fitting = [
        devices
        for homes in in_order.homes()
        for _, devices in in_order.placements(homes)
        if arrays.fits(devices)
    ]
    assert fitting


def with_caches(graph: Graph, nbytes: int) -> Graph:
    """Each operation makes a tensor of a cache as well, which stays where it is made."""
    operations = [replace(o, outputs=(*o.outputs, f"{o.name}.cache")) for o in graph.operations.values()]
    caches = [Value(f"{o.name}.cache", nbytes, nbytes, stays=True) for o in operations]
    values, weights = [*graph.values.values(), *caches], [*graph.weights.values()]
    return Graph(operations, values, weights, [*graph.inputs], [*graph.outputs])


@pytest.mark.parametrize("kind", ["sim", "cuda"])
def test_segment_needs_equal_the_evaluators_bytes(kind: str) -> None:
    """Caches that stay to the end, and the bytes that an allocator adds to a storage of weights."""
    graph = with_caches(stack([300 * KIB] * 12, 10**8), 100 * KIB)
    for memory in range(2 * MIB, 6 * MIB, 256 * KIB):
        arrays = Arrays(Problem(graph, equal_cards(3, memory=memory, kind=kind), CPU))
        first = next(SegmentDP(arrays, ample()).placements({}), None)
        assert first is None or arrays.fits(first[1]), memory
        if first is None:
            assert best_segments(arrays) == math.inf, memory


def test_resident_alone_equals_resident_of_one_storage() -> None:
    sizes = np.array([0, 512, MIB, MIB + 512, 9 * MIB, 10 * MIB, 11 * MIB, 11 * MIB + 512, 64 * MIB])
    for kind in ("sim:0", "cuda:0"):
        spec = DeviceSpec(0, kind, 1 << 30, 1e12, 1e11, 4e-6)
        found = spec.resident_alone(sizes.astype(float)).tolist()
        assert found == [spec.resident([nbytes]) for nbytes in sizes.tolist()]


def test_small_effort_finds_fitting_placement() -> None:
    problem = second_set(97)["97.15-stack-7"]().problem
    assert place(problem, Limits(effort=1e-3, proves=False)).evaluation.feasible
