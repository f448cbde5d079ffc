"""No slot is overwritten before its last reader, nor read before it is ready: by vector clocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import KIB, bytes_of, chain, largest_difference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from races import ClockedQueues, races_of
from random_modules import RandomModule
from test_properties import graphs, steps

import graphplan
from graphplan import Graph, VerificationError
from graphplan.devices.max_memory import read_max_memory
from graphplan.ir.schedule import Assignment, Load, Release, Schedule, Step, Wait
from graphplan.ir.schedule_checks import check_schedule
from graphplan.passes.schedule.transfers import build_schedule
from graphplan.runtime.weights.weight_streams import ModuleStreams

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
SLOW = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TOPOLOGY = read_max_memory({0: 1 << 30, 1: 1 << 30, "cpu": 1 << 30})


def streamed(graph: Graph, slots: int, seed: int) -> Schedule:
    """Random devices of operations, every weight on the CPU."""
    draw = random.Random(seed)
    devices = {name: draw.choice([0, 0, 0, 1, "cpu"]) for name in graph.operations}
    assignment = Assignment(devices, dict.fromkeys(graph.weights, "cpu"), {0: slots, 1: slots})
    return build_schedule(graph, TOPOLOGY, assignment, "cpu")


@QUICK
@given(graphs(), st.integers(1, 5), st.integers(0, 10**6))
def test_random_schedules_have_no_races(graph: Graph, slots: int, seed: int) -> None:
    schedule = streamed(graph, slots, seed)
    check_schedule(graph, TOPOLOGY, schedule)
    assert races_of(graph, schedule) == []


def load_too_early(schedule: Schedule) -> Schedule:
    """Move the last load, which reuses a slot, before the release that it must follow."""
    order = list(schedule.steps)
    at = max(i for i, step in enumerate(order) if isinstance(step, Load))
    moved = order.pop(at)
    before = next(i for i, step in enumerate(order) if isinstance(step, Wait))
    return replace(schedule, steps=(*order[:before], moved, *order[before:]))


def without(kind: type[Step], schedule: Schedule) -> Schedule:
    return replace(schedule, steps=tuple(step for step in schedule.steps if not isinstance(step, kind)))


def release_too_early(schedule: Schedule) -> Schedule:
    order: list[Step] = []
    for step in schedule.steps:
        if isinstance(step, Release):
            at = next(i for i in range(len(order) - 1, -1, -1) if isinstance(order[i], Wait))
            order.insert(at + 1, step)
        else:
            order.append(step)
    return replace(schedule, steps=tuple(order))


def wrong_predecessor(schedule: Schedule) -> Schedule:
    buffer = schedule.prefetch_buffers[0]
    segments = tuple(replace(s, previous=i) for i, s in enumerate(buffer.segments))
    return replace(schedule, prefetch_buffers=(replace(buffer, segments=segments),))


def slots_overlap(schedule: Schedule) -> Schedule:
    buffer = schedule.prefetch_buffers[0]
    return replace(
        schedule, prefetch_buffers=(replace(buffer, slots=(buffer.slots[0] // 2, *buffer.slots[1:])),)
    )


DAMAGES = {
    "load too early": load_too_early,
    "no waits": lambda s: without(Wait, s),
    "no releases": lambda s: without(Release, s),
    "release too early": release_too_early,
    "wrong predecessor": wrong_predecessor,
    "slots overlap": slots_overlap,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_broken_schedule_is_detected_by_clocks_and_checks(damage: str) -> None:
    graph = chain(5)
    assignment = Assignment(dict.fromkeys(graph.operations, 0), dict.fromkeys(graph.weights, "cpu"), {0: 2})
    sound = build_schedule(graph, TOPOLOGY, assignment, "cpu")
    check_schedule(graph, TOPOLOGY, sound)
    assert races_of(graph, sound) == []
    broken = DAMAGES[damage](sound)
    if damage != "no waits":  # without them nothing is known to be read from the slots
        assert races_of(graph, broken)
    with pytest.raises(VerificationError):
        check_schedule(graph, TOPOLOGY, broken)


def run_with_clocks(
    machine: Any, placed: Any, calls: list[tuple[Any, ...]], queues: type[ClockedQueues] = ClockedQueues
) -> tuple[list[str], int, list[Any]]:
    """Races, accesses and results of calls of a placed module, by the memory that its operations access."""
    return clocked(machine, placed, lambda: [placed(*args) for args in calls], queues)


def clocked(
    machine: Any, placed: Any, run: Callable[[], Any], queues: type[ClockedQueues] = ClockedQueues
) -> tuple[list[str], int, Any]:
    """As :func:`run_with_clocks`, of code that calls a placed module."""
    state = placed._graphplan
    state.streams = streams = ModuleStreams(lambda device: queues())
    state.codes.clear()

    def watch(read: Any, written: Any) -> None:
        for storage in streams.storages.values():
            if storage.bytes.numel():
                storage.queues.watch(storage.bytes, read, written)

    machine.watch = watch
    results = run()
    machine.watch = None
    logs = [storage.queues.log for storage in streams.storages.values()]
    return [race for log in logs for race in log.races], sum(len(log.accesses) for log in logs), results


@SLOW
@given(steps, st.integers(1, 4), st.integers(2, 3))
def test_random_modules_have_no_races(steps: list[tuple[str, int]], slots: int, calls: int) -> None:
    torch.manual_seed(0)
    model = RandomModule([("linear", 0), *steps, ("linear", 1)]).eval()
    x = torch.randn(4, 24)
    pin = {f"layers.{i}": "cpu" for i in range(len(model.layers))}
    parameters = {f"{name}.weight": "cpu" for name in pin}
    budgets = {0: bytes_of(model) + 65536, "cpu": 1 << 30}
    with torch.no_grad(), graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, budgets, args=(x,), pin=parameters)
        # the plan's own prefetch buffers have two slots at most: rebuild it with more or fewer
        rebuild_with_slots(placed, slots, x)
        races, accesses, results = run_with_clocks(machine, placed, [(x,)] * calls)
        assert races == []
        assert accesses >= 2 * calls
        for result in results:
            assert largest_difference(result, model(x)) < 1e-5


def rebuild_with_slots(placed: Any, slots: int, x: torch.Tensor) -> None:
    """Lower a placed module's first call again, with ``slots`` slots in each prefetch buffer."""
    state = placed._graphplan
    compiler = state.compile.__self__
    planned = state.programs[0].plan
    assignment = replace(planned.schedule.assignment, slots={0: slots})
    schedule = build_schedule(planned.graph, planned.topology, assignment, planned.schedule.host)
    check_schedule(planned.graph, planned.topology, schedule)
    made = replace(planned, schedule=schedule)
    captured = compiler.captures.captured[0].capture
    call = compiler.model_copy.bind((x,), {})
    state.programs[0] = compiler.lower(graphplan.compiler.pipeline.Planned(captured, made, call))


def test_backward_after_an_intermediate_forward_has_no_races() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    x, budgets = torch.ones(1, 32), {0: 64 * KIB, "cpu": 1 << 30}
    pin = {f"{i}.weight": "cpu" for i in range(4)}
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, budgets, args=(x,), pin=pin, train=True, cpu_compute=False)
        assert list(placed.plan.schedule.loads())

        def run() -> None:
            results = [placed(x), placed(x)]
            with torch.no_grad():
                placed(x)
            for result in reversed(results):
                result.sum().backward()
            placed(x).sum().backward()

        run()
        races, accesses, _ = clocked(machine, placed, run)
        assert races == []
        assert accesses


class LeakyQueues(ClockedQueues):
    """Copies that do not wait for the slot's last reader."""

    def copies_wait(self, event: Any) -> None:
        pass


class HastyQueues(ClockedQueues):
    """Work that does not wait for the copy."""

    def work_waits(self, event: Any) -> None:
        pass


@pytest.mark.parametrize("queues", [LeakyQueues, HastyQueues])
def test_broken_queues_are_detected(queues: type[ClockedQueues]) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).eval()
    x = torch.ones(1, 32)
    budgets = {0: 64 * KIB, "cpu": 1 << 30}
    pin = {f"{i}.weight": "cpu" for i in range(4)}
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, budgets, args=(x,), pin=pin)
        assert run_with_clocks(machine, placed, [(x,)] * 2)[0] == []
        assert run_with_clocks(machine, placed, [(x,)] * 2, queues)[0]
