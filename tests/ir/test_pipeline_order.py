"""The orders of pipeline schedules, and the seconds of a batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphplan.ir.cluster.flight import Flight
from graphplan.ir.cluster.pipeline_order import (
    PipelineSchedule,
    StageAction,
    StageSeconds,
    batch_seconds,
    pipeline_order,
    play,
)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (3, 2), (4, 10)])
def test_order_equals_the_definition(schedule: PipelineSchedule, stages: int, microbatches: int) -> None:
    for stage, actions in enumerate(pipeline_order(schedule, stages, microbatches)):
        found = [("B" if one.backward else "F", one.microbatch) for one in actions]
        assert found == textbook_order(schedule, stage, stages, microbatches)
        in_flight = accumulate(-1 if one.backward else 1 for one in actions)
        most = Flight(microbatches, schedule).most_in_flight(stages - 1 - stage)
        assert max(in_flight) == most


def test_actions_do_not_overlap_or_precede_their_inputs() -> None:
    stages = [StageSeconds(1.0 + 0.3 * s, 2.0 - 0.1 * s, 0.5 if s < 5 else 0.0) for s in range(6)]
    found = play(pipeline_order("1f1b", 6, 6), stages)
    ended = {one.action: one.end for one in found}
    assert len(ended) == len(found) == 2 * 6 * 6
    for machine in range(6):
        mine = [one for one in found if one.action.stage == machine]
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
    order = pipeline_order(schedule, len(stages), microbatches)
    assert batch_seconds(order, stages) == pytest.approx(longest_path(schedule, stages, microbatches))


@settings(deadline=None)
@given(STAGES, st.integers(1, 8))
def test_batch_seconds_gpipe_equal_two_flow_shops(stages: list[StageSeconds], microbatches: int) -> None:
    """Each direction is a flow shop of equal jobs: sum of stages + (m - 1) * slowest stage."""
    stages = without_last_transfer(stages)
    order = pipeline_order("gpipe", len(stages), microbatches)
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
        batch_seconds(pipeline_order(schedule, len(stages), microbatches), stages)
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
    order = pipeline_order(schedule, machines, microbatches)
    stages = [StageSeconds(1.0, 2.0, 0.0)] * machines
    assert batch_seconds(order, stages) == pytest.approx((microbatches + machines - 1) * 3.0)


def test_batch_seconds_slow_stages_differ_gpipe_takes_longer() -> None:
    stages = [StageSeconds(3.0, 0.0, 0.0), StageSeconds(1.0, 2.0, 0.0)]
    gpipe, one_forward = (pipeline_order(schedule, 2, 8) for schedule in ("gpipe", "1f1b"))
    assert batch_seconds(gpipe, stages) == pytest.approx(41.0)
    assert batch_seconds(one_forward, stages) == pytest.approx(27.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_forward_order_any_schedule_is_plain_pipeline(schedule: PipelineSchedule) -> None:
    stages = [StageSeconds(seconds, None, 0.5) for seconds in (1.0, 3.0, 2.0)]
    stages = without_last_transfer(stages)
    order = pipeline_order(schedule, 3, 4)
    assert batch_seconds(order, stages) == pytest.approx(6.0 + 2 * 0.5 + 3 * 4.0)
