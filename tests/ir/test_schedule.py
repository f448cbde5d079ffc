"""Moves, bytes and proofs of hand-built graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from builders import KIB, chain

from graphplan import Graph, Operation, Value, VerificationError, Weight
from graphplan.devices.max_memory import read_max_memory
from graphplan.devices.topology import Topology
from graphplan.ir.liveness import measure_memory
from graphplan.ir.schedule import Assignment, Move, Run, Schedule
from graphplan.ir.schedule_checks import check_schedule
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import assign_weights
from graphplan.passes.schedule.transfers import build_schedule


def topology(**memory: int) -> Topology:
    return read_max_memory({int(k[1:]) if k[0] == "d" else k: v for k, v in memory.items()})


BIG = topology(d0=1 << 20, d1=1 << 20, cpu=1 << 20)


def scheduled(graph: Graph, **devices: object) -> Schedule:
    problem = Problem(graph, BIG, "cpu")
    assignment = assign_weights(problem, {name: devices[name] for name in graph.operations})  # type: ignore[misc]  # keys
    return build_schedule(graph, BIG, assignment, "cpu")


def test_moves_come_right_before_the_first_reader() -> None:
    schedule = scheduled(chain(3), v0=0, v1=1, v2=0)
    assert str(schedule) == (
        "move x: cpu -> 0, 1024 bytes (input)\n"
        "run v0 on 0\n"
        "move v0: 0 -> 1, 1024 bytes (activation)\n"
        "run v1 on 1\n"
        "move v1: 1 -> 0, 1024 bytes (activation)\n"
        "run v2 on 0\n"
        "move v2: 0 -> cpu, 1024 bytes (output)"
    )


def test_a_value_moves_once_to_each_device() -> None:
    values = [Value(n, KIB, KIB) for n in ("x", "a", "b", "c")]
    operations = [
        Operation("a", "f", ("x",), ("a",)),
        Operation("b", "f", ("x", "a"), ("b",)),
        Operation("c", "f", ("x", "a", "b"), ("c",)),
    ]
    graph = Graph(operations, values, [], ["x"], ["c"])
    moved = [(m.value, m.destination) for m in scheduled(graph, a=0, b=1, c=1).moves()]
    assert moved == [("x", 0), ("x", 1), ("a", 1), ("c", "cpu")]


def test_weight_on_another_device_is_streamed() -> None:
    graph = chain(1)
    schedule = build_schedule(graph, BIG, Assignment({"v0": 0}, {"w0": "cpu"}), "cpu")
    assert str(schedule) == (
        "move x: cpu -> 0, 1024 bytes (input)\n"
        "load 0: w0 -> slot 0 of 0, 4096 bytes\n"
        "wait 0 on 0\n"
        "run v0 on 0\n"
        "release 0 on 0\n"
        "move v0: 0 -> cpu, 1024 bytes (output)"
    )
    memory = measure_memory(graph, BIG, schedule)
    assert memory.peaks[0].nbytes == 4096 + 2 * 1024  # the prefetch buffer, the input and the result
    assert memory.peaks[0].weights == 4096
    assert memory.peaks["cpu"].weights == 4096


def test_without_slots_weights_are_copied_before_their_reader() -> None:
    graph = chain(1)
    schedule = build_schedule(graph, BIG, Assignment({"v0": 0}, {"w0": "cpu"}, {0: 0}), "cpu")
    assert [m.nbytes for m in schedule.moves("weight")] == [4096]
    memory = measure_memory(graph, BIG, schedule)
    assert memory.peaks[0].nbytes == 4096 + 2 * 1024  # the copy, the input and the result
    assert memory.peaks[0].weights == 0


def test_peaks_count_weights_activations_and_copies() -> None:
    memory = measure_memory(chain(3), BIG, scheduled(chain(3), v0=0, v1=1, v2=0))
    assert memory.peaks[0].nbytes == 2 * 4096 + 2 * 1024
    assert memory.peaks[1].nbytes == 4096 + 2 * 1024
    assert memory.peaks[1].operation == "v1"


def test_view_keeps_its_base_alive_without_bytes() -> None:
    values = [Value("x", 0, 0), Value("a", 8 * KIB, 8 * KIB), Value("b", 0, KIB, "a"), Value("c", KIB, KIB)]
    operations = [
        Operation("a", "f", ("x",), ("a",)),
        Operation("b", "view", ("a",), ("b",)),
        Operation("c", "f", ("b",), ("c",)),
    ]
    graph = Graph(operations, values, [], ["x"], ["c"])
    stay = measure_memory(graph, BIG, scheduled(graph, a=0, b=0, c=0))
    assert stay.peaks[0].nbytes == 9 * KIB  # the base lives as long as its view
    part = measure_memory(graph, BIG, scheduled(graph, a=0, b=0, c=1))
    assert part.peaks[1].nbytes == 2 * KIB  # only the view's own elements travel


def test_workspace_is_taken_while_the_operation_runs() -> None:
    operation = Operation("a", "f", (), ("a",), workspace={"cuda": 5 * KIB, "cpu": KIB})
    graph = Graph([operation], [Value("a", KIB, KIB)], [], [], ["a"])
    kind = BIG.devices[0].type
    expected = operation.workspace_on(kind) + KIB
    assert measure_memory(graph, BIG, scheduled(graph, a=0)).peaks[0].nbytes == expected


def test_sizes_are_rounded_up() -> None:
    graph = Graph([Operation("a", "f", (), ("a",))], [Value("a", 1, 1)], [Weight("w", 1)], [], ["a"])
    assert measure_memory(graph, BIG, scheduled(graph, a="cpu")).peaks["cpu"].nbytes == 1024


def test_profile_has_one_figure_per_step() -> None:
    schedule = scheduled(chain(2), v0=0, v1=0)
    memory = measure_memory(chain(2), BIG, schedule, with_profile=True)
    assert len(memory.profile[0]) == len(schedule.steps)
    assert max(memory.profile[0]) == memory.peaks[0].nbytes


def test_evaluation_adds_compute_and_moves() -> None:
    problem = Problem(chain(2), BIG, "cpu")
    one = evaluate(problem, assign_weights(problem, {"v0": 0, "v1": 0}))
    two = evaluate(problem, assign_weights(problem, {"v0": 0, "v1": 1}))
    assert two.seconds - one.seconds == pytest.approx(BIG.link(0, 1).seconds(1024))
    assert one.feasible


def test_evaluation_reports_the_excess() -> None:
    problem = Problem(chain(2), topology(d0=9 * KIB, cpu=1 << 20), "cpu")
    found = evaluate(problem, assign_weights(problem, {"v0": 0, "v1": 0}))
    assert found.excess == {0: KIB}


def break_order(s: Schedule) -> Schedule:
    runs = [step for step in s.steps if isinstance(step, Run)]
    return replace(s, steps=(s.steps[0], *reversed(runs), *s.steps[-1:]))


def drop_move(s: Schedule) -> Schedule:
    return replace(
        s, steps=tuple(step for step in s.steps if not (isinstance(step, Move) and step.value == "v0"))
    )


def repeat_move(s: Schedule) -> Schedule:
    return replace(s, steps=(s.steps[0], *s.steps))


def forget_run(s: Schedule) -> Schedule:
    return replace(s, steps=s.steps[:3])


def wrong_bytes(s: Schedule) -> Schedule:
    return replace(s, steps=(replace(s.steps[0], nbytes=7), *s.steps[1:]))  # type: ignore[type-var]  # a Move


def wrong_device(s: Schedule) -> Schedule:
    return replace(s, steps=tuple(replace(x, device="cpu") if isinstance(x, Run) else x for x in s.steps))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_order, "out of the graph's order"),
        (drop_move, "where 'v0' is not"),
        (repeat_move, "where it is already"),
        (forget_run, "never runs"),
        (wrong_bytes, "has 1024 bytes, but its move says 7"),
        (wrong_device, "not where it was placed"),
    ],
)
def test_invalid_schedule_raises(damage: Callable[[Schedule], Schedule], message: str) -> None:
    graph = chain(2)
    sound = scheduled(graph, v0=0, v1=1)
    check_schedule(graph, BIG, sound)
    with pytest.raises(VerificationError, match=message):
        check_schedule(graph, BIG, damage(sound))


def test_exceeded_budget_raises() -> None:
    graph = chain(2)
    with pytest.raises(VerificationError, match=r"device 0 needs .*10240 bytes\) at 'v0'.* 9.0 KiB"):
        check_schedule(graph, topology(d0=9 * KIB, d1=KIB, cpu=KIB), scheduled(graph, v0=0, v1=0))


def test_split_colocation_group_raises() -> None:
    graph = chain(2)
    tied = Graph(
        graph.operations.values(), graph.values.values(), graph.weights.values(), ["x"], ["v1"],
        [frozenset({"v0", "v1"})],
    )  # fmt: skip
    with pytest.raises(VerificationError, match="share written memory"):
        check_schedule(tied, BIG, scheduled(tied, v0=0, v1=1))


def test_streaming_a_written_weight_raises() -> None:
    weight = Weight("w", KIB, ("w",), "buffer", mutated=True)
    graph = Graph(
        [Operation("a", "add_", ("w",), ("a",), ("w",))], [Value("a", 0, KIB, "w")], [weight], [], []
    )
    schedule = build_schedule(graph, BIG, Assignment({"a": 0}, {"w": "cpu"}), "cpu")
    with pytest.raises(VerificationError, match="cannot be streamed"):
        check_schedule(graph, BIG, schedule)
