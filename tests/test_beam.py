"""Placements with streamed weights: a beam search on the evaluator's clocks, and planes below the rest."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from graphplan import Graph, Link, Operation, Value, Weight
from graphplan.device import CPU, read_max_memory
from graphplan.passes import streaming
from graphplan.passes.beam import Beam
from graphplan.passes.chain import Chain
from graphplan.passes.evaluate import Problem, evaluate
from graphplan.passes.fluid import Fluid, Work
from graphplan.passes.interleave import interleavings, quick_interleavings
from graphplan.passes.limits import Limits
from graphplan.passes.place import place
from graphplan.passes.proposals import with_offload
from graphplan.passes.residence import reside
from graphplan.passes.settings import make_settings, movable_weights
from graphplan.passes.streaming import stream
from graphplan.speeds import Speed, with_speeds

MIB = 1 << 20
SLOW_CPU = {"cpu": Speed(5e10, 5e9)}


def tower(count: int, nbytes: int, *, large: int = 0, seed: int = 0) -> Graph:
    """A chain of matrices of about ``nbytes``, the last but one of ``large`` bytes."""
    draw = np.random.default_rng(seed)
    operations, values, weights = [], [Value("v0", 4096, 4096)], []
    for i in range(count):
        size = large if large and i == count - 2 else int(nbytes * draw.choice([0.5, 1.0])) // 4096 * 4096
        weights.append(Weight(f"w{i}", size))
        values.append(Value(f"v{i + 1}", 4096, 4096))
        flops = 2_000_000 * int(draw.integers(10, 200))
        inputs = (f"v{i}", f"w{i}")
        operations.append(Operation(f"op{i}", "f", inputs, (f"v{i + 1}",), (), flops, size + 8192))
    return Graph(operations, values, weights, ["v0"], [f"v{count}"])


def problem_of(graph: Graph, *shares: float) -> Problem:
    budgets = {i: int(share * graph.weight_bytes) for i, share in enumerate(shares)}
    links = {("cpu", i): Link(10e9, 1e-5) for i in range(len(shares))}
    return Problem(graph, with_speeds(read_max_memory({**budgets, CPU: "64GiB"}, links), SLOW_CPU), CPU)


@pytest.mark.parametrize("shares", [(0.5,), (0.3, 0.3)])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_beam_counts_is_what_the_evaluator_counts(shares: tuple[float, ...], seed: int) -> None:
    problem = problem_of(tower(40, 8 * MIB, seed=seed), *shares)
    settings = make_settings(problem, Limits())
    assert settings
    for setting in settings:
        frontier = setting.frontier
        beam = Beam(
            frontier, setting.rings, setting.movable, setting.settled, setting.needs, np.array(setting.levels)
        )
        way = beam.search(below=np.inf, width=50)
        assert way is not None
        items = frontier.shares.items
        placed = {name: key for item, key in way.devices.items() for name in items[item].members}
        brought = [n for item in way.brought for n in movable_weights(problem, frontier.shares, item)]
        slots = {k: r.slots for k, r in zip(frontier.devices, setting.rings, strict=True) if r is not None}
        found = evaluate(problem, replace(reside(setting.problem, placed, brought), slots=slots))
        # but for the order in which a move and a copy that both wait are done
        assert found.seconds == pytest.approx(way.seconds, rel=5e-3)
        assert beam.bound * (1 - 1e-9) <= way.seconds
        for d, key in enumerate(frontier.devices[: len(shares)]):
            # but for the rounding of allocations
            assert problem.topology[key].room - found.peak(key).nbytes >= way.left[d] - 2.5 * MIB


@pytest.mark.parametrize("seed", range(8))
def test_planes_lie_below_every_moment(seed: int) -> None:
    draw = np.random.default_rng(seed)
    devices, steps = int(draw.integers(1, 4)), int(draw.integers(3, 12))
    seconds = draw.random((devices, steps))
    seconds[draw.random((devices, steps)) < 0.2] = np.inf
    seconds[0] = draw.random(steps)
    copying = np.where(draw.random((devices, steps)) < 0.6, draw.random((devices, steps)), np.inf)
    nbytes = draw.integers(0, 5, steps).astype(float)
    room = draw.integers(1, 15, devices).astype(float)
    room[0] = 100.0
    held = np.tile(nbytes, (devices, 1))
    fluid = Fluid(Work(seconds, copying, np.zeros((devices, steps)), held, nbytes, room))
    planes = fluid.planes()
    assert len(planes.clock)
    for _ in range(20):
        step, now = int(draw.integers(0, steps + 1)), float(draw.random() * 3)
        queues, left = draw.random(devices) * 3, draw.random(devices) * room
        exact = fluid.seconds(step, now, queues, left)
        if exact is None:
            continue
        below = planes.clock * now + planes.queue @ queues - planes.room @ left + planes.rest[:, step]
        assert below.max() <= exact + 1e-6


def test_streaming_beats_pieces_and_turns() -> None:
    problem = problem_of(tower(60, 8 * MIB), 0.35, 0.25)
    chain = Chain(problem.graph, problem.topology.devices[0])
    others = [*with_offload(problem, chain), *interleavings(problem, chain, Limits())]
    known = [found.seconds for found in others if found is not None and found.feasible]
    best = min(stream(problem, None, Limits()), key=lambda found: found.seconds)
    assert best.feasible
    assert best.seconds < min(known)


def test_quick_turns_give_the_largest_weight_a_home() -> None:
    problem = problem_of(tower(60, 8 * MIB, large=100 * MIB), 0.35, 0.25)
    chain = Chain(problem.graph, problem.topology.devices[0])
    found = list(quick_interleavings(problem, chain, Limits()))
    assert found
    assert all(each.feasible for each in found)
    assert len({each.schedule.assignment.weights["w58"] for each in found}) > 1


def test_accelerators_that_cannot_hold_the_weights_are_not_tried_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Problem] = []
    monkeypatch.setattr("graphplan.passes.place.fill", lambda problem: asked.append(problem) or [])
    large, small = problem_of(tower(20, 4 * MIB), 0.5, 0.4), problem_of(tower(20, 4 * MIB), 0.8, 0.7)
    place(large)
    assert not asked
    place(small)
    assert len(asked) == 1
    # what is pinned to the CPU takes no room
    pinned = {f"op{i}": frozenset({CPU}) for i in range(8)}
    place(replace(large, allowed=pinned))
    assert len(asked) == 2


def test_weights_that_have_homes_are_streamed_or_computed_with_there() -> None:
    """As in a call of another structure: what the CPU keeps is settled, and where operations run is not."""
    problem = problem_of(tower(40, 8 * MIB), 0.7)
    homes = {f"w{i}": CPU if i % 3 == 1 else 0 for i in range(40)}
    settled = replace(problem, fixed_weights=homes)
    found = list(stream(settled, None, Limits()))
    assert found
    assert set(found[-1].schedule.assignment.operations.values()) <= {0, CPU}
    assert dict(found[-1].schedule.assignment.weights) == homes
    natural = evaluate(settled, reside(settled, {f"op{i}": homes[f"w{i}"] for i in range(40)}))
    streamed = evaluate(settled, reside(settled, dict.fromkeys(problem.graph.operations, 0)))
    others = [one.seconds for one in (natural, streamed) if one.feasible]
    assert found[-1].seconds <= min(others) * (1 + 1e-9)


def test_only_what_is_faster_is_proposed() -> None:
    problem = problem_of(tower(30, 4 * MIB), 0.5)
    found = list(stream(problem, None, Limits()))
    assert found
    seconds = [each.seconds for each in found]
    assert all(later < earlier for earlier, later in itertools.pairwise(seconds))
    assert all(again.seconds < seconds[-1] for again in stream(problem, found[-1], Limits()))


def test_what_is_proven_best_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy is hidden behind what is computed: no placement takes less than its operations."""
    graph = tower(30, 4 * MIB)
    slow = [replace(operation, flops=1000 * operation.flops) for operation in graph.operations.values()]
    busy = Graph(slow, graph.values.values(), graph.weights.values(), ["v0"], ["v30"])
    monkeypatch.setattr("graphplan.passes.place.stream", lambda *_: pytest.fail("searched"))
    monkeypatch.setattr("graphplan.passes.place.refine", lambda *_: pytest.fail("refined"))
    solution = place(problem_of(busy, 0.6))
    assert solution.evaluation.schedule.rings
    assert solution.lower_bound >= 0.998 * solution.evaluation.seconds


def test_of_accelerators_that_are_alike_the_first_is_the_first_home() -> None:
    problem = problem_of(tower(40, 4 * MIB, large=64 * MIB), 0.6, 0.6)
    homes = {setting.problem.fixed_weights.get("w38") for setting in make_settings(problem, Limits())}
    assert 0 in homes
    assert 1 not in homes
    faster = with_speeds(problem.topology, {1: Speed(1e15, 5e12)})
    unlike = replace(problem, topology=faster)
    assert 1 in {s.problem.fixed_weights.get("w38") for s in make_settings(unlike, Limits())}


def test_without_a_time_limit_no_search_is_wider_than_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(tower(30, 4 * MIB), 0.5)
    widths: list[int] = []
    search = Beam.search

    def watched(self: Beam, *, width: int, **others: object) -> object:
        widths.append(width)
        return search(self, width=width, **others)

    monkeypatch.setattr(Beam, "search", watched)
    assert list(stream(problem, None, Limits()))
    assert max(widths) > streaming._WIDTH
    for searches in (5, 6, 7):
        widths.clear()
        monkeypatch.setattr(streaming, "_WORK", 30 * streaming._WIDTH * searches)
        list(stream(problem, None, Limits()))
        assert sum(widths) < streaming._WIDTH * (searches + 1)


def test_room_is_kept_for_a_weight_that_no_ring_takes() -> None:
    """The last but one operation needs a third of the accelerator, and is very slow on the CPU."""
    graph = tower(40, 4 * MIB, large=64 * MIB)
    problem = problem_of(graph, 0.6)
    solution = place(problem)
    homes = solution.evaluation.schedule.assignment
    assert homes.weights["w38"] == 0
    assert homes.operations["op38"] == 0
    assert solution.evaluation.feasible


def test_nothing_is_proposed_without_an_accelerator_or_a_cpu() -> None:
    graph = tower(8, MIB)
    assert not list(stream(Problem(graph, read_max_memory({CPU: "1GiB"}), CPU), None, Limits()))
    assert not list(stream(Problem(graph, read_max_memory({0: "1MiB"}), 0), None, Limits()))
