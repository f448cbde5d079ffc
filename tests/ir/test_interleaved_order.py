"""The order of Interleaved 1F1B, compared with torch's, and the seconds of a batch."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from torch.distributed.pipelining import schedules

from graphplan.ir.cluster.interleaved_order import (
    StageAction,
    StageSeconds,
    interleaved_order,
    most_in_flight,
    play,
    rounds_divide,
)

SIZES = [(2, 2, 2), (2, 2, 8), (2, 3, 6), (3, 2, 3), (3, 2, 2), (4, 2, 8), (4, 3, 10), (4, 4, 16), (2, 2, 1)]


def torch_order(machines: int, each: int, microbatches: int) -> dict[int, list[StageAction]]:
    """What torch's own schedule does, of a process group that is not there."""
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
    order = interleaved_order(machines, each, microbatches)
    assert {rank: list(actions) for rank, actions in enumerate(order)} == expected
    most = Counter[int]()
    for actions in expected.values():
        now = Counter[int]()
        for one in actions:
            now[one.stage] += -1 if one.backward else 1
            most[one.stage] = max(most[one.stage], now[one.stage])
    assert dict(enumerate(most_in_flight(machines, each, microbatches))) == dict(most)


def test_first_stage_has_most_microbatches_in_flight() -> None:
    assert most_in_flight(2, 2, 8) == (4, 3, 2, 1)
    assert most_in_flight(4, 2, 8)[0] == 8


def test_rounds() -> None:
    assert [m for m in range(1, 13) if rounds_divide(4, m)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]


@pytest.mark.parametrize(("machines", "each", "microbatches"), [(2, 2, 8), (4, 2, 8), (4, 3, 16), (3, 2, 3)])
def test_bubble_of_equal_stages_matches_the_paper(machines: int, each: int, microbatches: int) -> None:
    """(p - 1)(t_f + t_b) / v, where t_f and t_b are those of all stages of a machine."""
    forward, backward = 1.0, 2.0
    stages = [StageSeconds(forward, backward, 0.0)] * (machines * each)
    end = max(one.end for one in play(machines, microbatches, stages))
    own = (forward + backward) * each
    assert end == pytest.approx(microbatches * own + (machines - 1) * own / each)
    alone = [StageSeconds(forward, None, 0.0)] * (machines * each)
    end = max(one.end for one in play(machines, microbatches, alone))
    assert end == pytest.approx(microbatches * forward * each + (machines - 1) * forward)


def test_actions_do_not_overlap_or_precede_their_inputs() -> None:
    stages = [StageSeconds(1.0 + 0.3 * s, 2.0 - 0.1 * s, 0.5 if s < 5 else 0.0) for s in range(6)]
    found = play(3, 6, stages)
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
