"""Planning prints nothing to stdout, and proves nothing that is not so, whatever HiGHS does."""

from __future__ import annotations

import ctypes
import os
import threading

import numpy as np
import pytest
from instances import random_chain
from scipy.optimize import Bounds, LinearConstraint
from test_bounds import problem_of

from graphplan.passes import highs
from graphplan.passes.counts import count_units
from graphplan.passes.place import place
from graphplan.passes.program import Program
from graphplan.passes.shares import Shares

MESSAGE = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();"


def printed(capfd: pytest.CaptureFixture[str]) -> str:
    ctypes.CDLL(None).fflush(None)
    return capfd.readouterr().out


def test_what_highs_prints_is_dropped_and_what_others_print_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    library = ctypes.CDLL(None)

    def solve() -> int:
        library.puts(MESSAGE)
        other = threading.Thread(target=lambda: os.write(1, b"Highs of another thread\n"))
        other.start()
        other.join()
        return 5

    library.puts(b"before")
    assert highs.without_prints(solve) == 5
    library.puts(b"after")
    assert printed(capfd) == "before\nHighs of another thread\nafter\n"


def test_stdout_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        highs.without_prints(fail)
    os.write(1, b"there\n")
    assert printed(capfd) == "there\n"


def test_several_threads_leave_stdout_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.fstat(1).st_ino
    threads = [
        threading.Thread(target=lambda: highs.without_prints(lambda: ctypes.CDLL(None).puts(MESSAGE)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.fstat(1).st_ino == before
    assert printed(capfd) == ""


def test_a_closed_stdout_is_no_obstacle() -> None:
    kept = os.dup(1)
    os.close(1)
    try:
        assert highs.without_prints(lambda: 3) == 3
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_planning_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    problem = random_chain(30, 2, 396329).problem  # one for which HiGHS 1.12 prints
    found = place(problem)
    shares = Shares(problem)
    for factor in (0.99, 1.0, 1.05):
        upper = factor * found.evaluation.seconds
        Program(shares, np.zeros(len(shares.kinds)), []).solve(upper=upper, gap=1e-6, nodes=1000)
    assert printed(capfd) == ""


# -- presolve: programs that a release of HiGHS got wrong with it -------------------------------------------


def test_one_continuous_and_one_whole_number() -> None:
    """ERGO-Code/HiGHS issue 3043."""
    rows_of = LinearConstraint(np.array([[1.0, 1.0]]), 4.5, np.inf)
    found = highs.milp([2, 3], constraints=rows_of, bounds=Bounds(0, 10), integrality=[0, 1])
    assert found.fun == pytest.approx(9.0)


def test_three_numbers_and_an_absolute_value() -> None:
    """ERGO-Code/HiGHS issue 3073."""
    matrix = np.array([[1, 0, 1], [0, -1, 1], [0, -1, -1], [0, 0, 1], [0, 0, -1]])
    rows_of = LinearConstraint(matrix, [3] + [-np.inf] * 4, [3, 0, 0, 3, -0.45])
    bounds = Bounds([0, -np.inf, 0], np.inf)
    found = highs.milp([100, 0.01, 0], constraints=rows_of, bounds=bounds, integrality=[0, 0, 1])
    assert found.fun == pytest.approx(0.03)


def test_one_of_two_slots() -> None:
    """ERGO-Code/HiGHS issue 3094."""
    matrix = np.array(
        [
            [1, 0, 0, 0, -1000, 0],
            [0, 1, 0, 0, 0, -1000],
            [1, 0, 1, 0, 0, 0],
            [0, 1, 0, 1, 0, 0],
            [0, 0, 0, 0, 1, 1],
        ]
    )
    low = [-np.inf, -np.inf, 1000, 1000, -np.inf]
    found = highs.milp(
        [0, 0, 10, 8, 0, 0],
        constraints=LinearConstraint(matrix, low, [0, 0, 1000, 1000, 1]),
        bounds=Bounds(0, [1000] * 4 + [1] * 2),
        integrality=[0] * 4 + [1] * 2,
    )
    assert found.fun == pytest.approx(8000.0)


def test_a_bound_that_presolve_put_above_the_best_placement() -> None:
    """By 0.15 % in HiGHS 1.12."""
    problem, best = problem_of(4077, "two and the CPU", 6)
    counted, _ = count_units(Shares(problem), upper=2 * best.seconds, gap=1e-6, nodes=1000, seconds=None)
    assert counted * (1 - 1e-6) <= best.seconds
