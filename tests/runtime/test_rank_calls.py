"""Calls of a model on two ranks of a gloo group on loopback: results, schedules and memory."""

from __future__ import annotations

import re

import pytest
from ranks import Ranks, said, said_by_case

from graphplan._compat.torch import stages_go_backward

TRAINS = stages_go_backward()
CASES = "kept_results -- forward_by_1f1b -- results_memory -- sizes_memory -- dropout"
CASES += " -- token_loss -- scaled_loss" if TRAINS else ""
trains = pytest.mark.skipif(not TRAINS, reason="pipelining goes backward past integers since torch 2.12")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[str]]]:
    """By rank, the lines that two ranks say in each case: processes are started once for all."""
    with Ranks(2, *CASES.split()) as group:
        outputs = group.outputs()
    return [{case: said(text) for case, text in said_by_case(output).items()} for output in outputs]


def test_results_after_a_second_call_are_unchanged(ranks: list[dict[str, list[str]]]) -> None:
    for cases in ranks:
        (line,) = cases["kept_results"]
        assert line.startswith("2 stages")
        assert float(line.split()[-1]) < 1e-5, line


def test_forward_pass_by_1f1b_needs_no_more_microbatches(ranks: list[dict[str, list[str]]]) -> None:
    for cases in ranks:
        (line,) = cases["forward_by_1f1b"]
        assert line.startswith("2 stages")
        assert float(line.split()[-1]) < 1e-5, line


def test_large_results_on_each_rank_keep_budgets(ranks: list[dict[str, list[str]]]) -> None:
    for cases in ranks:
        for line in cases["results_memory"]:
            stages, peak, planned = map(int, re.findall(r"\d+", line))
            assert stages == 2
            assert peak <= planned <= 16 << 20, line


def test_calls_of_many_sizes_keep_no_buffers(ranks: list[dict[str, list[str]]]) -> None:
    for cases in ranks:
        (line,) = cases["sizes_memory"]
        assert line.startswith("2 stages")
        assert int(line.split()[-1]) < 8 * 107 * 64 * 4, line  # one batch


@trains
def test_loss_summed_over_microbatches_equals_token_mean(ranks: list[dict[str, list[str]]]) -> None:
    for cases in ranks:
        line, error = cases["token_loss"]
        assert line.startswith("2 stages")
        assert float(line.split()[-1]) < 1e-5, line
        assert error == "loss_reduction must be 'mean' or 'sum', not 'max'"


def test_dropout_masks_of_two_stages_differ(ranks: list[dict[str, list[str]]]) -> None:
    for cases in ranks:
        assert cases["dropout"] == ["2 stages, equal [], repeated True, states True"] * 2


@trains
def test_overflow_on_one_rank_skips_all_ranks_steps(ranks: list[dict[str, list[str]]]) -> None:
    for cases in ranks:
        skipped, taken = cases["scaled_loss"]
        assert skipped == "finite False, changed False, scale 4.0"
        assert taken == "finite True, changed True, scale 4.0"


@pytest.mark.slow
def test_planning_past_group_timeout_is_waited_for() -> None:
    with Ranks(2, "slow_setup") as group:
        first, second = (said(output) for output in group.outputs())
    assert first[0] == second[0] == "planned"
    assert second[1].startswith("ClusterError: rank 1 waited for the next token of rank 0")


def test_default_group_without_cpu_backend_works() -> None:
    with Ranks(2, "no_cpu_backend") as group:
        outputs = [said(output) for output in group.outputs()]
    for line, *norms in outputs:
        assert line.startswith("2 stages")
        assert float(line.split()[-1]) < 1e-5, line
        assert norms == ["norm True"] * TRAINS
