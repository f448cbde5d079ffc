"""The dynamic program over cuts, and its bound, compared with all cuts."""

from __future__ import annotations

import math
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

from graphplan.passes.pipeline.cut_params import PARAMS
from graphplan.passes.pipeline.stage_bound import bound_prefix
from graphplan.passes.pipeline.stage_dp import StageCosts, StageDP, states_of


def random_costs(rng: np.random.Generator, size: int, classes: int) -> StageCosts:
    """Costs that are sums of operations and transfers, with stretches that do not fit."""
    transfer = rng.random(size) * 0.5
    transfer[[0, -1]] = 0.0
    seconds, load = [], []
    for _ in range(classes):
        before = np.concatenate([[0.0], rng.random(size - 1).cumsum()])
        here = before[None, :] - before[:, None]
        here[rng.random(here.shape) < 0.15] = np.inf
        here[np.tri(size, dtype=bool)] = np.inf
        seconds.append(here + transfer[None, :])
        load.append(transfer[:, None] + here + transfer[None, :])
    return StageCosts(seconds, load)


def brute(costs: StageCosts, counts: list[int], microbatches: int) -> float:
    """The least seconds over all cuts and all orders of machines."""
    size, best = len(costs.load[0]), math.inf
    machines = [c for c, count in enumerate(counts) for _ in range(count)]
    for stages in range(1, len(machines) + 1):
        for order in set(permutations(machines, stages)):
            for inner in combinations(range(1, size - 1), stages - 1):
                cuts = (0, *inner, size - 1)
                pairs = list(zip(order, cuts, cuts[1:], strict=False))
                total = sum(costs.seconds[c][a, b] for c, a, b in pairs)
                slowest = max(costs.load[c][a, b] for c, a, b in pairs)
                if math.isfinite(slowest):
                    best = min(best, total + (microbatches - 1) * slowest)
    return best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("counts", [[3], [2, 1], [1, 1, 1]])
@pytest.mark.parametrize("microbatches", [1, 4, 1000])
def test_the_best_of_all_cuts_is_found(seed: int, counts: list[int], microbatches: int) -> None:
    rng = np.random.default_rng(seed)
    costs = random_costs(rng, 7, len(counts))
    found = StageDP(costs, counts).solve(microbatches)
    best = brute(costs, counts, microbatches)
    if found is None:
        assert best == math.inf
        return
    assert found.seconds(microbatches) == pytest.approx(best, rel=PARAMS.worth if microbatches == 1 else 2e-4)
    assert found.cuts[0] == 0
    assert found.cuts[-1] == 6


def test_limits_between_pipelines_are_tried() -> None:
    """Regression: halfway to the quickest, the most even was found again, and no higher limit was tried."""
    before, transfer = np.cumsum([0.0, 2, 8, 3, 7, 8]), np.array([0.0, 3, 1, 1, 4, 0])
    here = before[None, :] - before[:, None]
    here[np.tri(6, dtype=bool)] = np.inf
    costs = StageCosts([here + transfer[None, :]], [transfer[:, None] + here + transfer[None, :]])
    found = StageDP(costs, [4]).solve(2)
    assert found is not None
    assert found.seconds(2) == brute(costs, [4], 2)


def test_latency_prefers_the_most_even_of_equal_cuts() -> None:
    size = 13
    seconds = np.maximum(np.arange(size)[None, :] - np.arange(size)[:, None], 0.0)
    seconds[seconds > 8] = np.inf  # what a machine holds
    seconds[np.tri(size, dtype=bool)] = np.inf
    seconds[:, 8] -= 0.01  # by which estimates like the fullest machine
    found = StageDP(StageCosts([seconds], [seconds]), [4]).solve(1)
    assert found is not None
    assert found.cuts == (0, 6, 12)


def test_stretch_without_room_for_later_stages_is_not_chosen() -> None:
    size = 4
    flat = np.where(np.tri(size, dtype=bool), np.inf, 1.0)
    costs = StageCosts([flat], [flat])

    def fits(_c: int, after: int) -> np.ndarray:
        return np.full((size, size), after != 1)  # so that two stages are one too few or too many

    alone = StageDP(costs, [3], fits).solve(1)
    assert alone is not None
    assert len(alone.classes) == 1
    costs.load[0][0, 3] = costs.seconds[0][0, 3] = np.inf
    assert StageDP(costs, [2], fits).solve(1) is None


@pytest.mark.parametrize("seed", range(25))
def test_the_bound_is_below_every_pipeline(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, machines = 7, 3
    seconds, weights = rng.random(count), rng.random(count)
    transfer = np.concatenate([[0.0], rng.random(count - 1) * 0.4, [0.0]])
    rooms = [float(weights.sum() * share) for share in rng.uniform(0.4, 1.1, machines)]
    bound = bound_prefix(seconds, transfer, weights, rooms, np.arange(count + 1))
    before, held = (np.concatenate([[0.0], each.cumsum()]) for each in (seconds, weights))
    least = {1: math.inf, 8: math.inf}
    for stages in range(1, machines + 1):
        for order in permutations(range(machines), stages):
            for inner in combinations(range(1, count), stages - 1):
                cuts = (0, *inner, count)
                pairs = list(pairwise(cuts))
                fits = (held[b] - held[a] <= rooms[k] for k, (a, b) in zip(order, pairs, strict=True))
                if not all(fits):
                    continue
                total = sum(before[b] - before[a] + transfer[b] for a, b in pairs)
                slowest = max(transfer[a] + before[b] - before[a] + transfer[b] for a, b in pairs)
                for microbatches in least:
                    here = total + (microbatches - 1) * slowest
                    least[microbatches] = min(least[microbatches], here)
    for microbatches, best in least.items():
        assert bound.seconds(microbatches) <= best * (1 + 1e-9)
    if math.isfinite(least[8]):
        assert bound.seconds(8) >= 0.5 * least[8]  # it says something


def test_many_machine_classes_are_used_in_order() -> None:
    counts = [1] * 30
    states = states_of(counts)
    assert len(states) == 31
    assert states[1] == (*[0] * 29, 1)
    flat = np.where(np.tri(40, dtype=bool), np.inf, np.arange(40)[None, :] - np.arange(40)[:, None] + 0.0)
    found = StageDP(StageCosts([flat] * 30, [flat] * 30), counts).solve(100)
    assert found is not None
    assert list(found.classes) == sorted(found.classes)
    assert found.slowest == 2.0
