"""Planning prints nothing to stdout, whatever HiGHS does."""

from __future__ import annotations

import ctypes

import pytest
from builders import chain
from instances import random_chain

from graphplan.devices.max_memory import read_max_memory
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.problem import Problem


def test_planning_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for problem in (
        random_chain(30, 2, 396329).problem,
        _spread(),
    ):  # one for which HiGHS 1.12 prints as ``milp``
        place(problem)
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""


def _spread() -> Problem:
    """Streamed, so that the programs of the bound have integers of all kinds."""
    graph = chain(12, weight=1 << 20)
    return Problem(graph, read_max_memory({0: 6 << 20, "cpu": 1 << 30}), "cpu")
