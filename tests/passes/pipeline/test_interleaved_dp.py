"""Cuts into interleaved stages, and the bound on their batch, compared with all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from graphplan.ir.cluster.pipeline_order import StageSeconds, batch_seconds, pipeline_order
from graphplan.passes.pipeline.interleaved_dp import InterleavedDP
from graphplan.passes.pipeline.stage_bound import bound_interleaved_batch

SIZE, MACHINES, STAGES = 11, 2, 4


def table(amounts: np.ndarray, transfer: np.ndarray | float = 0.0) -> np.ndarray:
    before = np.concatenate([[0.0], amounts.cumsum()])
    found = before[None, :] - before[:, None] + np.asarray(transfer)
    return np.where(np.tri(len(before), dtype=bool), np.inf, found)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_near_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work, nbytes = rng.random(SIZE - 1), rng.random(SIZE - 1)
    loads = [table(work * (1 + machine)) for _ in range(2) for machine in range(MACHINES)]
    needs = [table(nbytes)] * STAGES
    dp = InterleavedDP(loads, needs, [nbytes.sum() * 0.7] * MACHINES, 8)
    found = dp.solve()
    every = np.array([(0, *inner, SIZE - 1) for inner in combinations(range(1, SIZE - 1), STAGES - 1)])
    assert found is not None
    assert found.excess <= 1e-9
    best, own = dp.best_of(every)[0], dp.best_of(np.array([found.cuts]))[0]
    assert own[1] <= best[1] * 1.1


def test_impossible_stretches_are_not_chosen() -> None:
    loads = [table(np.ones(SIZE - 1))] * STAGES
    barred = [load.copy() for load in loads]
    barred[1][:, 5] = np.inf
    found = InterleavedDP(barred, [np.zeros((SIZE, SIZE))] * STAGES, [1.0] * MACHINES, 8).solve()
    assert found is not None
    assert found.cuts[2] != 5
    nowhere = [np.full((SIZE, SIZE), np.inf)] * STAGES
    assert InterleavedDP(nowhere, loads, [1.0] * MACHINES, 8).solve() is None


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("trains", [False, True])
def test_the_bound_is_below_every_batch(seed: int, trains: bool) -> None:
    rng = np.random.default_rng(seed)
    machines, each = int(rng.integers(2, 4)), int(rng.integers(2, 4))
    count = machines * int(rng.integers(1, 4))
    work = rng.random(14) * np.where(rng.random(14) < 0.1, 20, 1)
    crossing = rng.random(15) * 0.2
    bound = bound_interleaved_batch(work, crossing[1:-1], machines, each, count)
    for _ in range(20):
        inner = np.sort(rng.choice(np.arange(1, 14), machines * each - 1, replace=False))
        cuts = [0, *inner.tolist(), 14]
        slower = 1 + rng.random(machines)
        stages = [
            StageSeconds(
                float(work[a:b].sum() * slower[index % machines]),
                float(work[a:b].sum()) if trains else None,
                0.0 if b == 14 else float(crossing[b]),
            )
            for index, (a, b) in enumerate(pairwise(cuts))
        ]
        order = pipeline_order("interleaved", machines, each, count)
        assert batch_seconds(order, stages) >= bound * (1 - 1e-9)
