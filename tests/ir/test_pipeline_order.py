"""The orders of pipeline schedules, compared with those of torch, and the seconds of a batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from graphplan.ir.cluster.pipeline_order import (
    PipelineSchedule,
    StageAction,
    StageSeconds,
    batch_seconds,
    most_in_flight,
    pipeline_order,
    play,
    rounds_divide,
)

SIZES = [(2, 2, 2), (2, 2, 8), (2, 3, 6), (3, 2, 3), (3, 2, 2), (4, 2, 8), (4, 3, 10), (4, 4, 16), (2, 2, 1)]


def torch_order(machines: int, each: int, microbatches: int) -> dict[int, list[StageAction]]:
    """The actions of torch's own schedule, without a process group."""
    schedule = object.__new__(schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = machines, each, microbatches
    schedule.number_of_rounds = max(1, microbatches // machines)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    return {
        rank: [
            StageAction(one.stage_index, one.microbatch_index, one.computation_type.name == "FULL_BACKWARD")
            for one in schedule._calculate_single_rank_operations(rank)
            if one is not None
        ]
        for rank in range(machines)
    }


@pytest.mark.parametrize(("machines", "each", "microbatches"), SIZES)
def test_order_equals_torch(machines: int, each: int, microbatches: int) -> None:
    expected = torch_order(machines, each, microbatches)
    order = pipeline_order("interleaved", machines, each, microbatches)
    assert {rank: list(actions) for rank, actions in enumerate(order)} == expected
    most = Counter[int]()
    for actions in expected.values():
        now = Counter[int]()
        for one in actions:
            now[one.stage] += -1 if one.backward else 1
            most[one.stage] = max(most[one.stage], now[one.stage])
    assert dict(enumerate(most_in_flight("interleaved", machines, each, microbatches))) == dict(most)


def test_first_stage_has_most_microbatches_in_flight() -> None:
    assert most_in_flight("interleaved", 2, 2, 8) == (4, 3, 2, 1)
    assert most_in_flight("interleaved", 4, 2, 8)[0] == 8


def test_rounds() -> None:
    assert [m for m in range(1, 13) if rounds_divide(4, m)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]


@pytest.mark.parametrize(("machines", "each", "microbatches"), [(2, 2, 8), (4, 2, 8), (4, 3, 16), (3, 2, 3)])
def test_bubble_of_equal_stages_matches_the_paper(machines: int, each: int, microbatches: int) -> None:
    """(p - 1)(t_f + t_b) / v, where t_f and t_b are those of all stages of a machine."""
    forward, backward = 1.0, 2.0
    stages = [StageSeconds(forward, backward, 0.0)] * (machines * each)
    order = pipeline_order("interleaved", machines, each, microbatches)
    end = batch_seconds(order, stages)
    own = (forward + backward) * each
    assert end == pytest.approx(microbatches * own + (machines - 1) * own / each)
    alone = [StageSeconds(forward, None, 0.0)] * (machines * each)
    end = batch_seconds(order, alone)
    assert end == pytest.approx(microbatches * forward * each + (machines - 1) * forward)


def test_actions_do_not_overlap_or_precede_their_inputs() -> None:
    stages = [StageSeconds(1.0 + 0.3 * s, 2.0 - 0.1 * s, 0.5 if s < 5 else 0.0) for s in range(6)]
    found = play(pipeline_order("interleaved", 3, 2, 6), stages)
    ended = {one.action: one.end for one in found}
    assert len(ended) == len(found) == 2 * 6 * 6
    for machine in range(3):
        mine = [one for one in found if one.action.stage % 3 == machine]
        assert all(a.end <= b.free <= b.received <= b.start <= b.end for a, b in pairwise(mine))
    for one in found:
        stage = one.action.stage + (1 if one.action.backward else -1)
        if 0 <= stage < 6:
            before = ended[StageAction(stage, one.action.microbatch, one.action.backward)]
            assert one.start >= before + 0.5


SECONDS = st.floats(0.0, 4.0)
STAGES = st.lists(
    st.builds(StageSeconds, SECONDS, SECONDS, st.sampled_from([0.0, 0.1, 1.0])), min_size=1, max_size=5
)


def textbook_order(schedule: str, stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Forward and backward passes of a stage by the definition of GPipe or 1F1B."""
    forward, backward = ([(kind, m) for m in range(microbatches)] for kind in "FB")
    if schedule == "gpipe":
        return forward + backward
    warmup = min(stages - stage, microbatches)
    pairs = [action for pair in zip(backward, forward[warmup:], strict=False) for action in pair]
    return forward[:warmup] + pairs + backward[microbatches - warmup :]


def longest_path(schedule: str, stages: list[StageSeconds], microbatches: int) -> float:
    """The seconds of a batch as the longest path through its actions."""
    graph, last = nx.DiGraph(), len(stages) - 1
    for s, stage in enumerate(stages):
        before = stages[s - 1].transfer if s else 0.0
        arriving = {"F": before, "B": stage.transfer}
        leaving = {"F": stage.transfer, "B": before}
        busy = {"F": stage.forward, "B": stage.backward or 0.0}
        order = textbook_order(schedule, s, len(stages), microbatches)
        for kind, m in order:
            graph.add_edge(("start", kind, m, s), ("end", kind, m, s), seconds=arriving[kind] + busy[kind])
            source = s - 1 if kind == "F" else s + 1
            if 0 <= source <= last:
                graph.add_edge(("end", kind, m, source), ("start", kind, m, s), seconds=0.0)
        for (kind, m), (after, n) in pairwise(order):
            graph.add_edge(("end", kind, m, s), ("start", after, n, s), seconds=leaving[kind])
    return float(nx.dag_longest_path_length(graph, weight="seconds"))


def without_last_transfer(stages: list[StageSeconds]) -> list[StageSeconds]:
    return [*stages[:-1], replace(stages[-1], transfer=0.0)]


def slowest(stages: list[StageSeconds], seconds: list[float]) -> float:
    sent = [0.0, *(stage.transfer for stage in stages)]
    return max(a + s + b for a, s, b in zip(sent, seconds, sent[1:], strict=False))


@settings(deadline=None)
@given(STAGES, st.integers(1, 8), st.sampled_from(["gpipe", "1f1b"]))
def test_batch_seconds_random_stages_equal_longest_path(
    stages: list[StageSeconds], microbatches: int, schedule: PipelineSchedule
) -> None:
    stages = without_last_transfer(stages)
    order = pipeline_order(schedule, len(stages), 1, microbatches)
    assert batch_seconds(order, stages) == pytest.approx(longest_path(schedule, stages, microbatches))


@settings(deadline=None)
@given(STAGES, st.integers(1, 8))
def test_batch_seconds_gpipe_equal_two_flow_shops(stages: list[StageSeconds], microbatches: int) -> None:
    """Each direction is a flow shop of equal jobs: sum of stages + (m - 1) * slowest stage."""
    stages = without_last_transfer(stages)
    order = pipeline_order("gpipe", len(stages), 1, microbatches)
    forward, backward = [s.forward for s in stages], [s.backward or 0.0 for s in stages]
    total = sum(forward) + sum(backward) + 2 * sum(stage.transfer for stage in stages)
    slow = slowest(stages, forward) + slowest(stages, backward)
    assert batch_seconds(order, stages) == pytest.approx(total + (microbatches - 1) * slow)


@settings(deadline=None)
@given(STAGES, st.integers(0, 6))
def test_batch_seconds_1f1b_is_no_longer_than_gpipe(stages: list[StageSeconds], further: int) -> None:
    stages = without_last_transfer(stages)
    microbatches = len(stages) + further
    gpipe, one_forward = (
        batch_seconds(pipeline_order(schedule, len(stages), 1, microbatches), stages)
        for schedule in ("gpipe", "1f1b")
    )
    loads = [stage.forward + (stage.backward or 0.0) for stage in stages]
    assert microbatches * max(loads) <= one_forward * (1 + 1e-9)
    both = [StageSeconds(load, None, 2 * stage.transfer) for load, stage in zip(loads, stages, strict=True)]
    formula = sum(loads) + 2 * sum(stage.transfer for stage in stages)
    formula += (microbatches - 1) * slowest(both, loads)
    assert formula <= gpipe * (1 + 1e-9)
    assert one_forward <= gpipe * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("machines", "microbatches"), [(1, 3), (2, 8), (4, 4), (4, 16)])
def test_batch_seconds_equal_stages_match_paper(
    schedule: PipelineSchedule, machines: int, microbatches: int
) -> None:
    """(m + p - 1)(t_f + t_b), as in Narayanan et al."""
    order = pipeline_order(schedule, machines, 1, microbatches)
    stages = [StageSeconds(1.0, 2.0, 0.0)] * machines
    assert batch_seconds(order, stages) == pytest.approx((microbatches + machines - 1) * 3.0)


def test_batch_seconds_slow_stages_differ_gpipe_takes_longer() -> None:
    stages = [StageSeconds(3.0, 0.0, 0.0), StageSeconds(1.0, 2.0, 0.0)]
    gpipe, one_forward = (pipeline_order(schedule, 2, 1, 8) for schedule in ("gpipe", "1f1b"))
    assert batch_seconds(gpipe, stages) == pytest.approx(41.0)
    assert batch_seconds(one_forward, stages) == pytest.approx(27.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_forward_order_any_schedule_is_plain_pipeline(schedule: PipelineSchedule) -> None:
    stages = [StageSeconds(seconds, None, 0.5) for seconds in (1.0, 3.0, 2.0)]
    stages = without_last_transfer(stages)
    order = pipeline_order(schedule, 3, 1, 4)
    assert batch_seconds(order, stages) == pytest.approx(6.0 + 2 * 0.5 + 3 * 4.0)
