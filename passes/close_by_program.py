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
    """Propose, again with moments watched at which the evaluator finds a device too full; then bound."""
    if incumbent.done or limits.over:
        return
    program = _propose(incumbent, shares, limits.until(0.5))
    if not shares.ties_travel and not incumbent.done:
        _bound(incumbent, shares, program, limits)


def _propose(incumbent: Incumbent, shares: Shares, limits: Limits) -> Program:
    """Better placements, as far as there are; the program with the most moments and no margin."""
    margin, watched = np.zeros(len(shares.kinds)), dict[tuple[int, str], int]()
    exact = program = Program(shares, margin, watched)
    for _ in range(_TRIES):
        if incumbent.done or limits.over:
            break
        left = limits.left
        proposed = program.propose(
            upper=incumbent.best.seconds,
            gap=ENOUGH / 2,
            nodes=_NODES if left is None else 10**9,
            seconds=None if left is None else max(0.1, left / 1.5),
        )
        if proposed is None:
            break
        found = incumbent.evaluate(shares, proposed.devices, proposed.brought)
        incumbent.polish(found)
        if found.feasible:
            break
        over = _moments(incumbent, shares, found)
        for moment, nbytes in sorted(over.items()):  # watched already: there is more than is counted
            watched[moment] = watched[moment] + _more(nbytes) if moment in watched else 0
        if not over:
            margin = _more_room(shares, margin, found)
        program = Program(shares, margin, watched)
        exact = exact if margin.any() or any(watched.values()) else program
    return exact


def _bound(incumbent: Incumbent, shares: Shares, program: Program, limits: Limits) -> None:
    left = limits.left
    bounded = program.bound(
        upper=incumbent.best.seconds,
        gap=ENOUGH / 2,
        programs=_EFFORT // program.binaries if left is None else _MOST_PROGRAMS,
        seconds=None if left is None else max(0.1, left),
    )
    how = "solved" if bounded.met else "bounded"
    incumbent.raise_bound(bounded.seconds, f"mixed-integer program of {shares.units} operations, {how}")


def _moments(incumbent: Incumbent, shares: Shares, found: Evaluation) -> dict[tuple[int, str], int]:
    """(kind, operation) at which devices hold more than they may, and by how many bytes."""
    operations, over = incumbent.problem.graph.operations, dict[tuple[int, str], int]()
    for row, kind in enumerate(shares.kinds):
        for key in kind.keys:
            name = found.peak(key).operation
            if key in found.excess and name in operations:
                over[row, name] = max(found.excess[key], over.get((row, name), 0))
    return over


def _more(nbytes: int) -> int:
    return int(1.05 * nbytes) + 1 if nbytes else 0


def _more_room(shares: Shares, margin: Floats, found: Evaluation) -> Floats:
    """Leave as much more free on each kind of device as it was over."""
    more = margin.copy()
    for row, kind in enumerate(shares.kinds):
        more[row] += _more(max((found.excess.get(key, 0) for key in kind.keys), default=0))
    return more
