"""Stacks of equal layers: what is found to repeat itself, and knapsacks that solve it once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphplan.passes.knapsack import Chosen, Knapsack
from graphplan.passes.repeats import Block, Repeat, find_repeats


def flat(blocks: Sequence[Block], after: int = 0) -> list[int]:
    """Indices into the sequence, in order."""
    indices: list[int] = []
    for block in blocks:
        if isinstance(block, Repeat):
            for time in range(block.times):
                indices += flat(block.body, after + time * block.period)
        else:
            indices.append(after + block)
    return indices


def leaves(blocks: Sequence[Block]) -> list[int]:
    """Where each element of the sequence is read: in the first time of a repeat."""
    found: list[int] = []
    for block in blocks:
        found += leaves(block.body) * block.times if isinstance(block, Repeat) else [block]
    return found


def test_layers_are_found() -> None:
    layer = [1, 2, 2, 2, 3]
    assert find_repeats([7, *layer * 9, 8]) == (
        0,
        Repeat((1, Repeat((2,), 1, 3), 5), 5, 9),
        46,
    )


def test_layers_of_two_kinds_in_turn_are_one_period() -> None:
    (block,) = find_repeats([1, 2, 3, 1, 2, 4] * 5)
    assert isinstance(block, Repeat)
    assert (block.period, block.times) == (6, 5)


def test_what_comes_twice_is_no_repeat() -> None:
    assert find_repeats([1, 2, 3] * 2) == tuple(range(6))
    assert find_repeats([]) == ()


@given(
    st.lists(st.integers(0, 2), max_size=5),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.integers(0, 6),
    st.lists(st.integers(0, 2), max_size=5),
)
def test_repeats_spell_the_sequence(head: list[int], body: list[int], times: int, tail: list[int]) -> None:
    sequence = head + body * times + tail
    blocks = find_repeats(sequence)
    assert flat(blocks) == list(range(len(sequence)))
    assert [sequence[index] for index in leaves(blocks)] == sequence


def stack(seed: int, layers: int, *, apart: bool) -> tuple[Chosen, Chosen, float]:
    """A knapsack over equal layers, solved twice: what repeats itself is seen only where ``apart`` is false.

    The third is the most that the cheapest set could cost, by magnitude.
    """
    rng = np.random.default_rng(seed)
    width, rows = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    sizes = np.tile(rng.integers(0, 6, width), layers)
    cost = np.tile(rng.normal(size=(rows, width)), layers)
    beside = np.where(rng.random((rows, width)) < 0.3, rng.random((rows, width)), np.inf)
    aside = np.tile(beside, layers)
    within = [(i, i + 1) for i in range(width - 1)]
    kinds = [rng.normal(size=(1 if rng.random() < 0.5 else rows, 2, 2)) for _ in range(width)]
    for table in kinds:
        table[:, 0, 0] = 0  # who takes nothing pays nothing
    scopes, tables = [], []
    for layer in range(layers):
        for number, (first, second) in enumerate(within):
            scopes.append((layer * width + first, layer * width + second))
            tables.append(kinds[number])
        if layer:
            scopes.append((layer * width - 1, layer * width))
            tables.append(kinds[-1])
    capacities = rng.integers(0, 40, rows)
    knapsack = Knapsack(sizes.astype(np.int64), scopes, capacities)
    shared = knapsack.solve(cost, aside, tables)
    # an object of its own for each table, and costs that differ in the last digit, are nobody's like
    single = [table.copy() for table in tables] if apart else tables
    other = cost * (1 + 1e-15 * np.arange(cost.shape[1])) if apart else cost
    largest = float(np.abs(cost).sum() + sum(np.abs(table).max() for table in tables))
    for row, price in enumerate(shared.cost):
        chosen = shared.taken[row].astype(int)
        value = cost[row] @ chosen + aside[row][shared.aside[row]].sum()
        value += sum(
            table[(min(row, len(table) - 1), *chosen[list(scope)])]
            for scope, table in zip(scopes, tables, strict=True)
        )
        assert value == pytest.approx(price, abs=1e-7 * largest)
        assert sizes[shared.taken[row] & ~shared.aside[row]].sum() <= capacities[row]
    return shared, knapsack.solve(other, aside, single), largest


@pytest.mark.parametrize("layers", [3, 7, 60, 200])
@pytest.mark.parametrize("seed", range(20))
def test_equal_layers_cost_what_they_cost_one_by_one(seed: int, layers: int) -> None:
    found, reference, largest = stack(seed, layers, apart=True)
    assert (found.cost <= reference.cost + 1e-9 * largest).all()
    assert found.cost == pytest.approx(reference.cost, abs=1e-7 * largest)


def test_what_no_capacity_is_for_is_work_too() -> None:
    """Who counts work and never gets on would never end."""
    knapsack = Knapsack(np.zeros(4, dtype=np.int64), [(0, 1), (2, 3)], np.array([3]))
    tables = [np.zeros((1, 2, 2))] * 2
    found = knapsack.solve(np.full((1, 4), -1.0), np.full((1, 4), np.inf), tables)
    assert found.cost[0] == pytest.approx(-4)
    assert 0 < found.work <= knapsack.work


def test_layers_that_change_nothing_are_not_walked() -> None:
    few, many = stack(1, 200, apart=False)[0], stack(1, 4000, apart=False)[0]
    assert many.work <= few.work
    assert many.taken.shape[1] == 20 * few.taken.shape[1]
