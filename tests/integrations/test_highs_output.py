"""Planning prints nothing to stdout, whatever HiGHS does."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
from builders import chain
from instances import random_chain

from graphplan.devices.max_memory import read_max_memory
from graphplan.integrations.accelerate import highs_output as quiet
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.problem import Problem

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
    assert quiet.without_prints(solve) == 5
    library.puts(b"after")
    assert printed(capfd) == "before\nHighs of another thread\nafter\n"


def test_stdout_comes_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        quiet.without_prints(fail)
    os.write(1, b"there\n")
    assert printed(capfd) == "there\n"


def test_several_threads_leave_stdout_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.fstat(1).st_ino
    threads = [
        threading.Thread(target=lambda: quiet.without_prints(lambda: ctypes.CDLL(None).puts(MESSAGE)))
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
        assert quiet.without_prints(lambda: 3) == 3
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_planning_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for problem in (
        random_chain(30, 2, 396329).problem,
        _spread(),
    ):  # one for which HiGHS 1.12 prints as ``milp``
        place(problem)
    assert printed(capfd) == ""


def _spread() -> Problem:
    """Streamed, so that the programs of the bound have integers of all kinds."""
    graph = chain(12, weight=1 << 20)
    return Problem(graph, read_max_memory({0: 6 << 20, "cpu": 1 << 30}), "cpu")
