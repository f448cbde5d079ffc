"""A sample of the campaigns of ``tests/campaigns/reliability.py``; those of plans are in ``tests/ir``."""

from __future__ import annotations

import campaigns
import faults
import pytest


@pytest.mark.parametrize("seed", [53, 175, *range(4)])
def test_random_modules_equal_eager_mode(seed: int) -> None:
    assert campaigns.random_modules(range(seed, seed + 1)).violations == []


@pytest.mark.parametrize("seed", [1, 2, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_trained_random_modules_equal_eager_mode(seed: int) -> None:
    assert campaigns.trained_modules(range(seed, seed + 1)).violations == []


@pytest.mark.parametrize("kind", faults.DAMAGES)
def test_damaged_checkpoint_raises(kind: str) -> None:
    assert faults.check_checkpoint(kind, 0) is None


@pytest.mark.parametrize("kind", ["truncated", "overwritten", "replaced"])
def test_changing_a_mapped_file_raises(kind: str) -> None:
    assert faults.check_mapped(kind) is None


@pytest.mark.parametrize("at", [1, 2])
def test_failed_read_raises(at: int) -> None:
    assert faults.check_read_error(at) == (True, None)


@pytest.mark.parametrize("at", [1, 4, 9])
@pytest.mark.parametrize("wide", [False, True])
def test_failed_allocation_in_a_call_raises(at: int, wide: bool) -> None:
    assert faults.check_refused_call(at, wide=wide, warm=not wide) == (True, None)


def test_failed_allocation_while_placing_raises() -> None:
    assert faults.check_refused_loading(1, None) == (True, None)


def test_interrupted_calls_leave_a_usable_module() -> None:
    found = campaigns.interrupted_calls(range(1), step=37)
    assert found.violations == []
    assert found.counts["lines"] > 6


def test_threads_call_a_module_and_its_copies() -> None:
    assert campaigns.many_threads(range(5)).violations == []
