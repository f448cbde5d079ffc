"""Close the gap: better placements from above, better bounds from below, until they meet or time is up.

Small, branchy and knapsack-like graphs go to the mixed-integer program, the others to column generation;
what either proposes is judged by the evaluator and refined on the fine graph. Without a time limit the
work is counted, so that the same input gives the same placement on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from graphplan.device import DeviceKey
from graphplan.passes.bound import Bound, lower_bound
from graphplan.passes.branch import Tree
from graphplan.passes.chain import Chain
from graphplan.passes.columns import ColumnGeneration
from graphplan.passes.dive import dive
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.limits import Limits
from graphplan.passes.master import mix_fractions
from graphplan.passes.pricing import Pricing
from graphplan.passes.program import Program
from graphplan.passes.refine import refine, repair
from graphplan.passes.residence import follow, reside
from graphplan.passes.shares import Shares

__all__ = ["close_gap"]

_LP_TOLERANCE = 1e-6
_ENOUGH = 1e-3  # gap at which to stop
_STACKED = 5  # a graph is a stack if it has so many times more units than kinds of them
_BINARIES = 450  # decisions of a program that is solved without being asked for time
_MANY_BINARIES = 6000
_NODES = 60  # of a branch and bound that is not asked for time
_POLISH_WORK = 60_000  # of the local search, likewise
_COLUMN_WORK = 3e9  # numbers that knapsacks may touch, some seconds
_LARGE = 300  # operations from which all of this work is done
_BRANCH_WORK = 2e8  # the same for parts of the problem
_STREAMED_UNITS = 500  # with streaming, columns prove little more than fractions do: not asked for time
_TURN = 60  # rounds of column generation between dives
_PROMISING = 1.1  # times the best seconds, up to which a placement is refined
_TRIES = 6  # programs, each with more of memory counted


def close_gap(problem: Problem, chain: Chain, best: Evaluation, limits: Limits) -> tuple[Evaluation, Bound]:
    """A placement at least as good as ``best``, and a lower bound for all."""
    search = _Closing(problem, chain, best, limits)
    search.run()
    bound = search.bound
    if bound.seconds > search.best.seconds:
        bound = Bound(search.best.seconds, bound.proof)
    return search.best, bound


class _Closing:
    def __init__(self, problem: Problem, chain: Chain, best: Evaluation, limits: Limits) -> None:
        self.problem, self.chain, self.best, self.limits = problem, chain, best, limits
        self.bound = lower_bound(problem)

    @property
    def done(self) -> bool:
        return self.limits.over or self.bound.seconds >= self.best.seconds * (1 - _ENOUGH)

    def run(self) -> None:
        if self.done or sum(1 for spec in self.problem.topology.devices if spec.computes) < 2:
            return
        shares = Shares(self.problem)
        fractions = mix_fractions(shares)
        if fractions is not None:
            self._raise(fractions.seconds * (1 - _LP_TOLERANCE), "operations in fractions, without moves")
        devices = sum(len(kind.keys) for kind in shares.kinds)
        binaries = shares.units * devices
        timed = self.limits.deadline is not None
        stacked = _STACKED * len(shares.counts) <= shares.units
        if binaries <= (_MANY_BINARIES if timed else _BINARIES) and not stacked:
            self._solve_program(shares, self.limits.until(0.6))
        worthwhile = timed or not self.problem.offload or shares.units <= _STREAMED_UNITS
        if not self.done and worthwhile:
            self._generate_columns(shares, self.limits.until(0.9))
        if timed and not self.done and binaries <= _MANY_BINARIES:
            self._solve_program(shares, self.limits)
        while timed and not self.done:
            before = self.best.seconds
            self._adopt(refine(self.problem, self.chain, self.best, 1_000_000, self.limits.deadline))
            if self.best.seconds >= before:
                break

    def _adopt(self, found: Evaluation) -> None:
        if found.feasible and found.seconds < self.best.seconds:
            self.best = found

    def _raise(self, seconds: float, proof: str) -> None:
        if seconds > self.bound.seconds:
            self.bound = Bound(seconds, proof)

    def _solve_program(self, shares: Shares, limits: Limits) -> None:
        """Solve, and again with the moments watched at which the evaluator finds a device too full."""
        margin, watched = np.zeros(len(shares.kinds)), list[tuple[int, str]]()
        for attempt in range(_TRIES):
            if self.done or limits.over:
                return
            left = limits.left
            solved = Program(shares, margin, watched).solve(
                upper=self.best.seconds,
                gap=_ENOUGH / 2,
                nodes=_NODES if left is None else 10**9,
                seconds=None if left is None else max(0.1, left / (2 if attempt == 0 else 1.5)),
            )
            if not margin.any():
                how = "solved" if solved.optimal else "bounded"
                self._raise(solved.bound, f"mixed-integer program of {shares.units} operations, {how}")
            if not solved.devices:
                return
            found = self._judge(shares, solved.devices, solved.brought)
            if found.feasible:
                return
            more = self._moments(shares, found) - set(watched)
            watched += sorted(more)
            if not more:
                margin = _more_room(shares, margin, found)

    def _moments(self, shares: Shares, found: Evaluation) -> set[tuple[int, str]]:
        """(kind, operation) at which devices hold more than they may."""
        operations = self.problem.graph.operations
        return {
            (row, name)
            for row, kind in enumerate(shares.kinds)
            for key in kind.keys
            if key in found.excess and (name := found.peak(key).operation) in operations
        }

    def _judge(self, shares: Shares, devices: Mapping[int, DeviceKey], brought: Iterable[str]) -> Evaluation:
        placed = {name: key for unit, key in devices.items() for name in shares.items[unit].members}
        operations = self.problem.obey(follow(self.problem.graph, placed))
        found = evaluate(self.problem, reside(self.problem, operations, brought))
        self._polish(found)
        return found

    def _polish(self, found: Evaluation) -> None:
        """Mend and refine what may become the best."""
        if not found.feasible:
            found = repair(self.problem, self.chain, found, deadline=self.limits.deadline)
        if found.feasible and found.seconds < self.best.seconds * _PROMISING:
            self._adopt(found)
            work = _POLISH_WORK if self.limits.deadline is None else 10 * _POLISH_WORK
            self._adopt(refine(self.problem, self.chain, found, work, self.limits.deadline))

    def _generate_columns(self, shares: Shares, limits: Limits) -> None:
        """Bound by column generation, dive from its mixture, part the problem where that is fractional."""
        pricing = Pricing(shares)
        generation = ColumnGeneration(pricing, [self.best])
        timed = limits.deadline is not None
        effort = min(1.0, shares.units / _LARGE)
        work = np.inf if timed else effort * _COLUMN_WORK
        generation.run(enough=self._enough, work=work, deadline=limits.until(0.7).deadline)
        proof = f"column generation over {shares.units} operations in {len(shares.counts)} groups"
        self._raise(generation.bound, f"{proof}, {generation.rounds} rounds")
        self._dive(generation, limits, work / 4)
        if timed and not generation.converged and not self.done:  # the dive has left some of the time
            generation.run(enough=self._enough, work=np.inf, deadline=limits.deadline)
            self._raise(generation.bound, f"{proof}, {generation.rounds} rounds")
        tree = Tree(generation)
        part: ColumnGeneration | None = generation
        work = np.inf if timed else effort * _BRANCH_WORK
        while not self.done and not limits.over and work > 0 and generation.converged:
            turn = min(work, _TURN * pricing.work(rough=False))
            tree.grow(enough=self._enough, work=turn, deadline=limits.deadline)
            work -= turn
            self._raise(tree.bound, f"{proof}, {tree.looked} parts")
            if tree.lowest is not None and tree.lowest is not part:
                part = tree.lowest
                self._dive(part, limits, work)
            elif tree.lowest is None:
                break

    @property
    def _enough(self) -> float:
        """A bound that needs no improvement."""
        return self.best.seconds * (1 - _ENOUGH)

    def _dive(self, generation: ColumnGeneration, limits: Limits, work: float) -> None:
        if self.done or limits.over:
            return
        found, _ = dive(self.problem, generation, work=work, deadline=limits.deadline)
        for evaluation in found:
            self._polish(evaluation)


def _more_room(
    shares: Shares, margin: np.ndarray[tuple[int], np.dtype[np.float64]], found: Evaluation
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Leave as much more free on each kind of device as it was over."""
    more = margin.copy()
    for row, kind in enumerate(shares.kinds):
        more[row] += 1.05 * max((found.excess.get(key, 0) for key in kind.keys), default=0)
    return more
