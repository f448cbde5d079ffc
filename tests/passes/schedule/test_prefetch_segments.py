"""Segments, slots and clocks of hand-built graphs."""

from __future__ import annotations

from typing import Any

import pytest
from builders import KIB, chain

from graphplan import Graph, Operation, Plan, Value, Weight
from graphplan.devices.max_memory import read_max_memory
from graphplan.devices.topology import Link, Topology
from graphplan.ir.cost_model import operation_seconds
from graphplan.ir.schedule import Assignment, Schedule
from graphplan.ir.schedule_checks import check_schedule
from graphplan.ir.timeline import call_seconds, make_timeline
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import assign_weights
from graphplan.passes.schedule.transfers import build_schedule

LATENCY = 1e-6


LINK = Link(1e9, LATENCY)


def topology(link: Link = LINK, **memory: int) -> Topology:
    budgets: dict[Any, int] = {int(k[1:]) if k[0] == "d" else k: v for k, v in memory.items()}
    return read_max_memory(budgets, {("cpu", key): link for key in budgets if key != "cpu"})


BIG = topology(d0=1 << 30, d1=1 << 30, cpu=1 << 30)


def streamed(graph: Graph, slots: int | None = None, on: Topology = BIG, **devices: Any) -> Schedule:
    """All operations on 0 except the named ones; all weights on the CPU."""
    operations = {name: devices.get(name, 0) for name in graph.operations}
    counts = {} if slots is None else {0: slots, 1: slots}
    assignment = Assignment(operations, dict.fromkeys(graph.weights, "cpu"), counts)
    schedule = build_schedule(graph, on, assignment, "cpu")
    check_schedule(graph, on, schedule)
    return schedule


def steps_of(schedule: Schedule) -> list[str]:
    return [line for line in str(schedule).splitlines() if not line.startswith("move")]


def test_two_slots_let_one_copy_run_ahead() -> None:
    assert steps_of(streamed(chain(3), 2)) == [
        "load 0: w0 -> slot 0 of 0, 4096 bytes",
        "load 1: w1 -> slot 1 of 0, 4096 bytes",
        "wait 0 on 0",
        "run v0 on 0",
        "release 0 on 0",
        "load 2: w2 -> slot 0 of 0, 4096 bytes",
        "wait 1 on 0",
        "run v1 on 0",
        "release 1 on 0",
        "wait 2 on 0",
        "run v2 on 0",
        "release 2 on 0",
    ]


def test_first_segment_of_slot_follows_its_last_segment() -> None:
    (buffer,) = streamed(chain(5), 2).prefetch_buffers
    assert [s.slot for s in buffer.segments] == [0, 1, 0, 1, 0]
    assert [s.previous for s in buffer.segments] == [4, 3, 0, 1, 2]
    (single,) = streamed(chain(1)).prefetch_buffers
    assert (single.segments[0].previous, single.slots) == (0, (4096,))


def sized(*sizes: int) -> Graph:
    """Operations in a row, each with a weight of its own size."""
    plain = chain(len(sizes))
    weights = [Weight(f"w{i}", nbytes) for i, nbytes in enumerate(sizes)]
    return Graph(plain.operations.values(), plain.values.values(), weights, ["x"], plain.outputs)


def test_slots_are_as_large_as_their_largest_segment() -> None:
    large = 64 * KIB
    (buffer,) = streamed(sized(large, 20 * KIB, large, 20 * KIB), 2).prefetch_buffers
    assert buffer.slots == (large, 20 * KIB)
    assert buffer.nbytes == 84 * KIB


def test_small_neighbours_share_a_copy_without_larger_slots() -> None:
    slow = topology(Link(1e9, 1e-3), d0=1 << 30, cpu=1 << 30)  # a copy of up to 4 MB is small
    (buffer,) = streamed(sized(1 << 20, 512, 100, 512, 1 << 20), 2, slow).prefetch_buffers
    assert [s.weights for s in buffer.segments] == [("w0",), ("w1", "w2", "w3"), ("w4",)]
    assert buffer.segments[1].offsets == (0, 512, 1024)
    assert buffer.segments[1].nbytes == 1536
    (equal,) = streamed(sized(4096, 4096, 4096), 2, slow).prefetch_buffers
    assert len(equal.segments) == 3


def with_reads(reads: list[tuple[str, ...]], views: tuple[int, ...] = ()) -> Graph:
    """Operation ``i`` makes ``v<i>`` from ``reads[i]``; those of ``views`` make a view of the first."""
    names = sorted({name for read in reads for name in read if name[0] == "w"})
    values, operations = [Value("x", KIB, KIB)], []
    for i, read in enumerate(reads):
        base = read[0] if i in views else None
        values.append(Value(f"v{i}", 0 if base else KIB, KIB, base))
        operations.append(Operation(f"v{i}", "f", read, (f"v{i}",), (), 10**6, 4096))
    return Graph(operations, values, [Weight(n, 8 * KIB) for n in names], ["x"], [f"v{len(reads) - 1}"])


def test_weights_of_one_operation_are_one_segment() -> None:
    (buffer,) = streamed(with_reads([("x", "w0", "w1"), ("v0", "w2")])).prefetch_buffers
    assert [s.weights for s in buffer.segments] == [("w0", "w1"), ("w2",)]


def test_readers_far_apart_have_a_copy_each() -> None:
    (near,) = streamed(with_reads([("x", "w0"), ("v0", "w0"), ("v1", "w1")])).prefetch_buffers
    assert [s.weights for s in near.segments] == [("w0",), ("w1",)]
    (far,) = streamed(with_reads([("x", "w0"), ("v0", "w1"), ("v1", "w2"), ("v2", "w0")])).prefetch_buffers
    assert [s.weights for s in far.segments] == [("w0",), ("w1",), ("w2",), ("w0",)]


def test_adjacent_weights_share_a_copy() -> None:
    """A weight has one place in host memory: next to those of its first copy."""
    reads = [
        ("x", "w0", "w1"),
        ("v0", "w2", "w3"),
        ("v1", "w1", "w2"),
        ("v2", "w4", "w5"),
        ("v3", "w0", "w1"),
    ]
    first, second = streamed(with_reads(reads), v2=1, v3=1).prefetch_buffers
    assert [s.weights for s in first.segments] == [("w0", "w1"), ("w2", "w3"), ("w0", "w1")]
    assert [s.weights for s in second.segments] == [("w1", "w2"), ("w4", "w5")]
    reads[2] = ("v1", "w0", "w2")
    _, second = streamed(with_reads(reads), v2=1, v3=1).prefetch_buffers
    assert [s.weights for s in second.segments] == [("w0",), ("w2",), ("w4", "w5")]


def test_a_view_holds_the_slot() -> None:
    graph = with_reads([("w0",), ("x", "w1"), ("v1", "w2"), ("v2", "v0")], views=(0,))
    schedule = streamed(graph, 1)
    (buffer,) = schedule.prefetch_buffers
    assert len(buffer.slots) == 2  # one is taken from the first to the last operation
    lines = steps_of(schedule)
    assert lines.index("release 0 on 0") > lines.index("run v3 on 0")


def test_moved_view_holds_the_slot_until_the_move() -> None:
    graph = with_reads([("w0",), ("x", "w1"), ("v1", "v0")], views=(0,))
    lines = str(streamed(graph, 2, v2=1)).splitlines()
    moved = next(i for i, line in enumerate(lines) if line.startswith("move v0: 0 -> 1"))
    assert lines[moved + 1] == "release 0 on 0"


@pytest.mark.parametrize("keep", ["returned", "written"])
def test_written_or_returned_weight_view_is_not_streamed(keep: str) -> None:
    values = [Value("x", KIB, KIB), Value("v0", 0, KIB, "w0"), Value("v1", KIB, KIB)]
    mutates = ("v0",) if keep == "written" else ()
    operations = [
        Operation("v0", "view", ("w0",), ("v0",)),
        Operation("v1", "f", ("x", "v0"), ("v1",), mutates),
    ]
    graph = Graph(
        operations,
        values,
        [Weight("w0", KIB)],
        ["x"],
        ["v0", "v1"] if keep == "returned" else ["v1"],
        [frozenset({"v0", "v1"})] if mutates else [],
    )
    schedule = build_schedule(graph, BIG, Assignment({"v0": 0, "v1": 0}, {"w0": "cpu"}), "cpu")
    assert schedule.prefetch_buffers == ()
    assert [move.value for move in schedule.moves("weight")] == ["w0"]


def test_each_accelerator_has_its_prefetch_buffer() -> None:
    schedule = streamed(chain(4), 2, v2=1, v3=1)
    assert [(buffer.device, len(buffer.segments)) for buffer in schedule.prefetch_buffers] == [(0, 2), (1, 2)]


def test_a_copy_hides_behind_compute() -> None:
    graph = chain(4, flops=10**9)
    schedule = streamed(graph, 2)
    run = operation_seconds(graph.operations["v0"], BIG[0])
    copy = LATENCY + 4096e-9
    moves = sum(LATENCY + 1024e-9 for _ in schedule.moves())
    assert run > copy
    # the first is waited for, but for the input that comes meanwhile
    expected = max(copy, LATENCY + 1024e-9) + 4 * run + moves - (LATENCY + 1024e-9)
    assert call_seconds(graph, BIG, schedule) == pytest.approx(expected)


def test_compute_hides_behind_copies() -> None:
    graph = chain(6, weight=1 << 20)
    timeline = make_timeline(graph, BIG, streamed(graph, 3))
    copies = timeline.busy("load", 0)
    assert copies == pytest.approx(6 * (LATENCY + (1 << 20) * 1e-9))
    last = timeline.events[-2]
    assert (last.kind, last.name) == ("run", "v5")
    assert timeline.seconds == pytest.approx(copies + (last.end - last.start) + LATENCY + 1024e-9)


def test_single_slot_overlaps_only_earlier_reads() -> None:
    graph = chain(3, weight=1 << 20)
    timeline = make_timeline(graph, BIG, streamed(graph, 1))
    loads = [event for event in timeline.events if event.kind == "load"]
    runs = [event for event in timeline.events if event.kind == "run"]
    assert [load.start for load in loads[1:]] == [run.end for run in runs[:-1]]
    assert [run.start for run in runs] == [load.end for load in loads]


def test_more_slots_never_cost_time() -> None:
    sizes = [1 << 20, 3 << 20, 1 << 18, 2 << 20, 1 << 20, 1 << 19, 4 << 20]
    found = [streamed(sized(*sizes), slots) for slots in range(1, 8)]
    times = [call_seconds(sized(*sizes), BIG, schedule) for schedule in found]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_single_slot_is_used_if_two_do_not_fit() -> None:
    graph = chain(4)
    problem = Problem(graph, topology(d0=4096 + 2 * KIB, cpu=1 << 30), "cpu")
    found = evaluate(problem, assign_weights(problem, dict.fromkeys(graph.operations, 0), graph.weights))
    assert found.feasible
    assert len(found.schedule.prefetch_buffers[0].slots) == 1


def test_plan_is_not_slower_than_streaming_alternate_weights() -> None:
    weight = 1 << 20
    graph = chain(60, weight=weight, flops=5 * 10**10)  # a copy takes twice as long
    room = 30 * weight + 3 * weight + 4 * KIB  # thirty stay, two slots, and what the allocator may add
    problem = Problem(graph, topology(d0=room, cpu=1 << 30), "cpu")
    away = [f"w{i}" for i in range(1, 60, 2)]
    even = evaluate(problem, assign_weights(problem, dict.fromkeys(graph.operations, 0), away))
    assert even.feasible
    found = place(problem)
    assert found.bound.seconds <= found.evaluation.seconds <= even.seconds * (1 + 1e-9)


def test_table_with_few_read_rows_is_not_streamed() -> None:
    blocks = chain(4, weight=1 << 20)
    operations = [
        Operation("v", "embedding", ("x", "table"), ("v",), (), 0, 2 * KIB),
        Operation("v0", "linear", ("v", "w0"), ("v0",), (), 10**6, 1 << 20),
        *list(blocks.operations.values())[1:],
    ]
    values = [*blocks.values.values(), Value("v", KIB, KIB)]
    weights = [Weight("table", 1 << 20), *blocks.weights.values()]
    graph = Graph(operations, values, weights, ["x"], ["v3"])
    for kept in (4, 3):
        problem = Problem(graph, topology(d0=(kept << 20) + 4 * KIB, cpu=1 << 30), "cpu")
        found = place(problem).evaluation
        assert found.feasible
        copied = [
            name for buffer in found.schedule.prefetch_buffers for s in buffer.segments for name in s.weights
        ]
        assert "table" not in copied


def test_a_plan_with_streams_is_read_back() -> None:
    graph = chain(5)
    problem = Problem(graph, topology(d0=20 * KIB, cpu=1 << 30), "cpu")
    found = evaluate(problem, assign_weights(problem, dict.fromkeys(graph.operations, 0), graph.weights))
    assert found.feasible
    plan = Plan(graph, problem.topology, found.schedule, found.seconds, 0.0, "none")
    plan.verify()
    assert plan.timeline.seconds == plan.makespan
    again = Plan.from_json(plan.to_json())
    assert again == plan
    again.verify()
    assert again.timeline == plan.timeline
    assert plan.streamed_bytes == sum(prefetch_bytes(plan.schedule))
    larger = plan.with_prefetch_buffers({0: 1 << 20})
    assert larger.peak_bytes[0] - plan.peak_bytes[0] == (1 << 20) - plan.schedule.prefetch_buffers[0].nbytes
    assert larger.with_prefetch_buffers({0: 1 << 20}) is larger


def test_prefetch_buffers_keep_their_numbers() -> None:
    """Generated code contains them, whatever other calls allocate later on earlier devices."""
    graph = chain(5)
    problem = Problem(graph, topology(d0=20 * KIB, d1=20 * KIB, cpu=1 << 30), "cpu")
    found = evaluate(problem, assign_weights(problem, dict.fromkeys(graph.operations, 1), graph.weights))
    plan = Plan(graph, problem.topology, found.schedule, found.seconds, 0.0, "none")
    for one in (plan, plan.with_prefetch_buffers({0: 512})):
        assert one.schedule.prefetch_buffers[0].device == 1


def prefetch_bytes(schedule: Schedule) -> list[int]:
    return [segment.nbytes for buffer in schedule.prefetch_buffers for segment in buffer.segments]


def test_prefetch_buffer_of_other_calls_is_counted_and_kept() -> None:
    graph = chain(3)
    here = Problem(graph, BIG, "cpu", prefetch_bytes={0: 64 * KIB})
    found = evaluate(here, assign_weights(here, dict.fromkeys(graph.operations, 0)))
    assert found.schedule.prefetch_buffers[0].segments == ()
    assert found.peak(0).weights == 3 * 4096 + 64 * KIB
    limited = Problem(graph, BIG, "cpu", prefetch_limits={0: 6 * KIB})
    narrow = evaluate(limited, assign_weights(limited, dict.fromkeys(graph.operations, 0), graph.weights))
    assert narrow.feasible
    assert narrow.schedule.prefetch_buffers[0].nbytes == 4 * KIB
    none = Problem(graph, BIG, "cpu", prefetch_limits={0: 0})
    assert evaluate(none, assign_weights(none, dict.fromkeys(graph.operations, 0), graph.weights)).excess == {
        0: 4 * KIB
    }
