"""Local search: never slower, within the budgets, and its prices of moves are exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from networks import unet
from placements import CARD, ample, equal_cards, random_homes, random_units, stack
from random_problems import MEDIUM, TINY, random_instance

from graphplan.devices.topology import CPU, Link, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight
from graphplan.passes.placement.arrays import Arrays, Ints
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.local_search import LocalSearch
from graphplan.passes.placement.params import Effort
from graphplan.passes.placement.problem import Problem

MIB = 1 << 20


def starts(seeds: int, *, fits: bool | None = None) -> Iterator[tuple[Arrays, Ints, Ints]]:
    """Random placements of random problems: within the budgets, above them, or either."""
    for seed in range(seeds):
        draw = random.Random(seed)
        arrays = Arrays(random_instance(seed, MEDIUM if seed % 5 == 0 else TINY).problem)
        for _ in range(1 if fits is None else 8):
            units = random_units(arrays, draw)
            if units is None or not len(units):
                break
            devices = arrays.expand(units)
            chosen = random_homes(arrays, devices, draw)
            if fits is None or arrays.fits(devices, chosen) == fits:
                yield arrays, devices, chosen
                break


def assert_consistent(search: LocalSearch) -> None:
    """Check the seconds and peaks of a search, and that colocated operations share a device."""
    arrays = search.arrays
    assert search.seconds == pytest.approx(arrays.seconds(search.devices, search.chosen), rel=1e-12)
    assert (search.peaks == arrays.peaks(search.devices, search.chosen)).all()
    for members in arrays.units:
        assert len({*search.devices[members].tolist()}) == 1


def shares_of(problems: int, minimum: int) -> pytest.MarkDecorator:
    """So many problems, of which at least so many show something; a third of both in the quick suite."""
    whole = pytest.param(problems, minimum, marks=pytest.mark.slow)
    return pytest.mark.parametrize(("problems", "minimum"), [(-(-problems // 3), minimum // 3), whole])


@shares_of(120, 200)
def test_move_seconds_are_exact(problems: int, minimum: int) -> None:
    compared = 0
    for arrays, devices, chosen in starts(problems):
        search, draw = LocalSearch(arrays, devices, ample(), chosen), random.Random(compared)
        moves = list(search._moves(sources=np.ones(arrays.computing, dtype=bool)))
        for move in draw.sample(moves, min(6, len(moves))):
            operations = search._operations_to_move(move)
            if not operations or not np.isfinite(arrays.compute[move.device, operations]).all():
                continue
            trial = devices.copy()
            trial[operations] = move.device
            change = arrays.seconds(trial, chosen) - arrays.seconds(devices, chosen)
            assert search._added_seconds(operations, move.device) == pytest.approx(
                change, abs=1e-9 * search.seconds
            )
            compared += 1
    assert compared >= minimum


@shares_of(120, 200)
def test_moves_without_room_for_their_weights_are_not_priced(problems: int, minimum: int) -> None:
    """Each move that is left out for that exceeds a budget."""
    unplaced = 0
    for arrays, devices, chosen in starts(problems, fits=True):
        search = LocalSearch(arrays, devices, ample(), chosen)
        priced = set(search._moves())
        search.own_bytes = np.zeros(arrays.count)
        for move in set(search._moves()) - priced:
            trial = devices.copy()
            trial[search._operations_to_move(move)] = move.device
            assert not arrays.fits(trial, chosen)
            unplaced += 1
    assert unplaced >= minimum


@shares_of(100, 40)
@pytest.mark.parametrize(("exchanges", "share"), [(False, 0.25), (True, 0.1)])
def test_climbs_and_exchanges_keep_budgets_and_never_slow_down(
    exchanges: bool, share: float, problems: int, minimum: int
) -> None:
    count, faster = 0, 0
    for arrays, devices, chosen in starts(problems, fits=True):
        search = LocalSearch(arrays, devices, ample(), chosen)
        if exchanges:
            search.climb()
        before = search.seconds
        if exchanges:
            search.exchange()
        else:
            search.climb()
        assert search.seconds <= before * (1 + 1e-12)
        assert arrays.fits(search.devices, search.chosen)
        assert_consistent(search)
        count += 1
        faster += search.seconds < before * (1 - 1e-6)
    assert count >= minimum
    assert faster >= share * count


@pytest.mark.parametrize("problems", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_climb_ends_in_a_local_optimum(problems: int) -> None:
    for arrays, devices, chosen in starts(problems, fits=True):
        search = LocalSearch(arrays, devices, ample(), chosen)
        search.climb()
        for members in arrays.units:
            for device in range(arrays.computing):
                trial = search.devices.copy()
                trial[members] = device
                if arrays.fits(trial, search.chosen):
                    seconds = arrays.seconds(trial, search.chosen)
                    assert seconds >= search.seconds * (1 - 1e-6)


def test_operations_exchange_full_cards() -> None:
    """Two full cards hold halves of two chains each: no move by itself keeps the budgets."""
    weights = [Weight(f"w{i}", MIB) for i in range(4)]
    sources = ["x", "v0", "x", "v2"]
    operations = [
        Operation(f"v{i}", "f", (sources[i], f"w{i}"), (f"v{i}",), (), 10**6, MIB) for i in range(4)
    ]
    values = [Value(name, 64 * 1024, 64 * 1024) for name in ("x", "v0", "v1", "v2", "v3")]
    graph = Graph(operations, values, weights, ["x"], ["v1", "v3"])
    arrays = Arrays(Problem(graph, equal_cards(2, memory=2 * MIB + MIB // 2, kind="sim"), CPU))
    search = LocalSearch(arrays, np.array([0, 1, 1, 0]), ample())
    before = search.seconds
    search.climb()
    assert search.seconds == before
    search.exchange()
    assert search.devices.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert search.seconds < before
    assert_consistent(search)


def test_shared_weights_are_exchanged_with_their_readers() -> None:
    """Two full cards hold a table in eight parts, whose embeddings come first and whose heads come last."""
    names = [*(f"t{i}" for i in range(8)), *(f"w{i}" for i in range(18)), *(f"t{i}" for i in range(8))]
    weights = [Weight(name, 40 * MIB if name[0] == "t" else 192 * MIB // 18) for name in names[:26]]
    operations = [
        Operation(f"v{i}", "f", (f"v{min(i, 26) - 1}", name), (f"v{i}",), (), 10**6, MIB)
        for i, name in enumerate(names)
    ]
    heads = tuple(f"v{i}" for i in range(26, 34))
    operations.append(Operation("v34", "cat", heads, ("v34",), (), 10**6, MIB))
    values = [Value(f"v{i}", 1024, 1024) for i in range(-1, 26)]
    values += [Value(name, 8 * MIB, 8 * MIB) for name in heads] + [Value("v34", 64 * MIB, 64 * MIB)]
    graph = Graph(operations, values, weights, ["v-1"], ["v34"])
    arrays = Arrays(Problem(graph, equal_cards(2, memory=349 * MIB, kind="sim"), CPU))
    # seven parts on the first card, three of which the second one copies for their heads
    search = LocalSearch(arrays, np.array([0] * 7 + [1] * 16 + [0] * 3 + [0] * 4 + [1] * 5), ample())
    search.climb()
    search.exchange()
    assert_consistent(search)
    homes = [search.home[arrays.item_of[f"t{i}"]] for i in range(8)]
    assert search.devices[:8].tolist() == search.devices[26:34].tolist() == homes


def test_unet_ends_share_a_device() -> None:
    """Its skips are longest between the ends; no segment holds both, and short exchanges do not join them."""
    graph = unet(4, 128, 128, 4, 2)
    cards = [replace(CARD, key=i, device=f"sim:{i}", memory=166_405_709) for i in range(4)]
    cards = [replace(card, flops=300e12, bandwidth=2000e9) for card in cards]
    found = place(Problem(graph, Topology(tuple(cards), {}, Link(12e9, 15e-6)), CPU))
    assert found.gap < 0.4


@shares_of(170, 40)
def test_repair_reports_whether_budgets_are_kept(problems: int, minimum: int) -> None:
    repaired, tried = 0, 0
    for arrays, devices, chosen in starts(problems, fits=False):
        search = LocalSearch(arrays, devices, ample(), chosen)
        before = search.excess
        done = search.repair()
        assert done == bool((search.peaks <= arrays.room).all())
        assert done == (not search.excess)
        assert search.excess <= before
        assert_consistent(search)
        tried += bool(before)
        repaired += done and bool(before)
    assert tried >= minimum
    assert repaired >= tried / 4


def test_repair_finds_a_feasible_placement() -> None:
    graph = stack([MIB] * 20, 10**8)
    arrays = Arrays(Problem(graph, equal_cards(3, memory=8 * MIB, kind="sim"), CPU))
    search = LocalSearch(arrays, np.zeros(20, dtype=np.int64), ample())
    assert search.excess > 11 * MIB
    assert search.repair()
    found = evaluate(arrays.problem, arrays.assignment(search.devices, search.chosen))
    assert found.feasible


def test_repair_places_weight_on_device_without_readers() -> None:
    """Two cards hold a weight each; the third has room for its operations and a copy of one at a time."""
    weights = [Weight("a", 4 * MIB), Weight("b", 4 * MIB)]
    operations = [
        Operation(f"op{i}", "f", (f"v{i}", "ab"[i // 2]), (f"v{i + 1}",), (), 10**6, MIB) for i in range(4)
    ]
    values = [Value(f"v{i}", MIB, MIB) for i in range(5)]
    topology = equal_cards(3, memory=0, kind="sim").with_memory({0: 4 * MIB, 1: 7 * MIB, 2: 4 * MIB})
    arrays = Arrays(Problem(Graph(operations, values, weights, ["v0"], ["v4"]), topology, CPU))
    search = LocalSearch(arrays, np.ones(4, dtype=np.int64), ample())
    assert search.repair()
    assert evaluate(arrays.problem, arrays.assignment(search.devices, search.chosen)).feasible


@shares_of(100, 40)
def test_balancing_keeps_the_limit_and_leaves_more_room(problems: int, minimum: int) -> None:
    count, roomier = 0, 0
    for arrays, devices, chosen in starts(problems, fits=True):
        search = LocalSearch(arrays, devices, ample(), chosen)
        before, max_seconds = search.fullness, search.seconds * 1.05
        search.balance(max_seconds)
        assert search.seconds <= max_seconds * (1 + 1e-12)
        assert search.fullness <= before
        assert arrays.fits(search.devices, search.chosen)
        assert_consistent(search)
        count += 1
        roomier += search.fullness < before
    assert count >= minimum
    assert roomier >= minimum // 6


def test_balancing_moves_layers_to_the_emptier_card() -> None:
    graph = stack([MIB] * 20, 10**8)
    arrays = Arrays(Problem(graph, equal_cards(2, memory=18 * MIB, kind="sim"), CPU))
    search = LocalSearch(arrays, np.array([0] * 16 + [1] * 4), ample())
    search.balance(search.seconds * (1 + 1e-3))
    assert search.fullness <= 0.65
    assert (np.diff(search.devices) >= 0).all()  # still two segments


def test_room_of_unread_weights_is_kept() -> None:
    """The unread weights fit the faster GPU alone; the other one has room for the other weights."""
    plain = stack([MIB] * 8, 10**9)
    weights = [*plain.weights.values(), Weight("idle", 9 * MIB)]
    graph = Graph(plain.operations.values(), plain.values.values(), weights, ["x"], plain.outputs)
    topology = equal_cards(2, memory=9 * MIB + MIB // 2, kind="sim")
    slow, fast = topology.devices
    slow = replace(slow, flops=2e11, memory=8 * MIB + MIB // 2)
    arrays = Arrays(Problem(graph, replace(topology, devices=(slow, fast)), CPU))
    search = LocalSearch(arrays, np.zeros(8, dtype=np.int64), ample())
    assert arrays.fits(search.devices)
    search.climb()
    assert arrays.fits(search.devices, search.chosen)
    search.balance(search.seconds * 1.5)
    assert arrays.fits(search.devices, search.chosen)


def test_search_ends_without_effort() -> None:
    arrays = Arrays(Problem(stack([MIB] * 20), equal_cards(2, memory=12 * MIB, kind="sim"), CPU))
    begin = np.array([0, 1] * 10)
    whole, none = LocalSearch(arrays, begin, ample()), LocalSearch(arrays, begin, ample(1.0))
    for search in (whole, none):
        search.climb()
        assert_consistent(search)
    assert whole.seconds < none.seconds
    assert none.effort.over


def test_repair_moves_weight_that_fits_elsewhere() -> None:
    """Two of three devices are full; the third lacks the bytes of the head, which the first has."""
    graph = stack([*range(512 * 700, 512 * 1000, 512), 4 * MIB], activation=512)
    devices = np.repeat([0, 1, 2], [120, 100, 81])
    arrays = Arrays(Problem(graph, equal_cards(3), CPU))
    goal = devices.copy()
    goal[-1] = 0
    room = arrays.peaks(goal)
    specs = [replace(spec, memory=int(nbytes)) for spec, nbytes in zip(arrays.specs, room, strict=True)]
    arrays = Arrays(Problem(graph, replace(arrays.problem.topology, devices=tuple(specs)), CPU))
    search = LocalSearch(arrays, devices, Effort(3e4))
    assert search.excess
    assert search.repair()
