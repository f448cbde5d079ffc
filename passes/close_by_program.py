"""Close the gap by the mixed-integer program."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from graphplan.passes.evaluate import Evaluation
from graphplan.passes.incumbent import ENOUGH, Incumbent
from graphplan.passes.limits import Limits
from graphplan.passes.program import Program
from graphplan.passes.shares import Shares

__all__ = ["solve_program"]

Floats = npt.NDArray[np.float64]

_NODES = 60  # of a branch and bound that is not asked for time
_EFFORT = 48_000  # linear programs for the bound times the decisions of each
_MOST_PROGRAMS = 10_000  # all are remembered
_TRIES = 6  # programs, each with more of memory counted


def solve_program(incumbent: Incumbent, shares: Shares, limits: Limits) -> None:
    """Solve, and again with the moments watched at which the evaluator finds a device too full."""
    margin, watched = np.zeros(len(shares.kinds)), list[tuple[int, str]]()
    for attempt in range(_TRIES):
        if incumbent.done or limits.over:
            return
        left = limits.left
        program = Program(shares, margin, watched)
        solved = program.solve(
            upper=incumbent.best.seconds,
            gap=ENOUGH / 2,
            nodes=_NODES if left is None else 10**9,
            programs=_EFFORT // program.binaries if left is None else _MOST_PROGRAMS,
            seconds=None if left is None else max(0.1, left / (2 if attempt == 0 else 1.5)),
        )
        if not margin.any() and not shares.ties_travel:
            how = "solved" if solved.optimal else "bounded"
            incumbent.raise_bound(solved.bound, f"mixed-integer program of {shares.units} operations, {how}")
        if not solved.devices:
            return
        found = incumbent.evaluate(shares, solved.devices, solved.brought)
        incumbent.polish(found)
        if found.feasible:
            return
        more = _moments(incumbent, shares, found) - set(watched)
        watched += sorted(more)
        if not more:
            margin = _more_room(shares, margin, found)


def _moments(incumbent: Incumbent, shares: Shares, found: Evaluation) -> set[tuple[int, str]]:
    """(kind, operation) at which devices hold more than they may."""
    operations = incumbent.problem.graph.operations
    return {
        (row, name)
        for row, kind in enumerate(shares.kinds)
        for key in kind.keys
        if key in found.excess and (name := found.peak(key).operation) in operations
    }


def _more_room(shares: Shares, margin: Floats, found: Evaluation) -> Floats:
    """Leave as much more free on each kind of device as it was over."""
    more = margin.copy()
    for row, kind in enumerate(shares.kinds):
        more[row] += 1.05 * max((found.excess.get(key, 0) for key in kind.keys), default=0)
    return more
