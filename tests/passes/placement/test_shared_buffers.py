"""Several calls over one prefetch buffer per device."""

from __future__ import annotations

from typing import Any

from builders import KIB, chain

from graphplan import Graph
from graphplan.devices.max_memory import read_max_memory
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.calls.shared_buffers import (
    evaluate_together,
    fit_together,
    with_limited_buffers,
)
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.problem import Problem

SLOT = 16 * KIB
SMALL, LARGE = chain(6, weight=SLOT), chain(6, weight=SLOT, activation=40 * KIB)


def problem(graph: Graph, budget: int, **options: Any) -> Problem:
    return Problem(graph, read_max_memory({0: budget, "cpu": 1 << 30}), "cpu", **options)


def streaming(graph: Graph, slots: int) -> Assignment:
    return Assignment(dict.fromkeys(graph.operations, 0), dict.fromkeys(graph.weights, "cpu"), {0: slots})


def prefetch_buffers(found: Any) -> list[tuple[int, int]]:
    return [(len(buffer.slots), buffer.nbytes) for one in found for buffer in one.schedule.prefetch_buffers]


def test_every_call_counts_the_largest_prefetch_buffer() -> None:
    problems = [problem(SMALL, 1 << 20), problem(LARGE, 1 << 20)]
    found = evaluate_together(problems, [streaming(SMALL, 4), streaming(LARGE, 1)])
    assert prefetch_buffers(found) == [(4, 4 * SLOT), (1, 4 * SLOT)]
    alone = evaluate(problems[1], streaming(LARGE, 1))
    assert found[1].peak(0).nbytes == alone.peak(0).nbytes + 3 * SLOT
    assert found[1].seconds == alone.seconds


def test_call_without_streaming_counts_shared_prefetch_buffer() -> None:
    resident = Assignment(dict.fromkeys(LARGE.operations, 0), dict.fromkeys(LARGE.weights, 0))
    problems = [problem(SMALL, 1 << 20), problem(LARGE, 1 << 20)]
    found = evaluate_together(problems, [streaming(SMALL, 2), resident])
    assert prefetch_buffers(found) == [(2, 2 * SLOT), (0, 2 * SLOT)]


def test_slots_are_removed_if_another_call_lacks_room() -> None:
    budget = 2 * 40 * KIB + 2 * SLOT  # two activations at once, and two slots
    problems = [problem(SMALL, budget), problem(LARGE, budget)]
    assert evaluate(problems[0], streaming(SMALL, 4)).feasible
    found = fit_together(problems, [streaming(SMALL, 4), streaming(LARGE, 1)])
    assert all(one.feasible for one in found)
    assert prefetch_buffers(found) == [(2, 2 * SLOT), (1, 2 * SLOT)]


def test_infeasible_joint_evaluation_has_excess() -> None:
    budget = 2 * 40 * KIB + SLOT - 512
    problems = [problem(SMALL, budget), problem(LARGE, budget)]
    found = fit_together(problems, [streaming(SMALL, 4), streaming(LARGE, 3)])
    assert prefetch_buffers(found) == [(1, SLOT), (1, SLOT)]
    assert [one.excess for one in found] == [{}, {0: 512}]


def test_prefetch_buffer_grows_into_free_bytes_of_other_calls() -> None:
    budget = 2 * 40 * KIB + 3 * SLOT
    other = evaluate(problem(LARGE, budget), streaming(LARGE, 1))
    limited = with_limited_buffers(problem(SMALL, budget), [other])
    assert (limited.prefetch_bytes, limited.prefetch_limits[0]) == ({0: SLOT}, 3 * SLOT)
    assert evaluate(limited, streaming(SMALL, 3)).feasible
    assert evaluate(limited, streaming(SMALL, 4)).excess == {0: SLOT}
