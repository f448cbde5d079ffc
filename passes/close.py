"""Close the gap: better placements from above, better bounds from below, until they meet or time is up.

Small, branchy and knapsack-like graphs go to the mixed-integer program, the others to column generation;
what either proposes is judged by the evaluator and refined on the fine graph. Without a time limit the
work is counted, so that the same input gives the same placement on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceKey
from graphplan.passes.bound import Bound, lower_bound
from graphplan.passes.branch import Tree
from graphplan.passes.chain import Chain
from graphplan.passes.columns import ColumnGeneration
from graphplan.passes.dive import dive
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.labels import Found, Labels
from graphplan.passes.limits import Limits
from graphplan.passes.master import mix_fractions
from graphplan.passes.parts import Part, part_by_home
from graphplan.passes.program import Program
from graphplan.passes.refine import refine, repair
from graphplan.passes.residence import follow, reside
from graphplan.passes.shares import Shares

__all__ = ["close_gap"]

_LP_TOLERANCE = 1e-6
Floats = npt.NDArray[np.float64]

_ENOUGH = 1e-3  # gap at which to stop
_SLACK = 1e-6  # of what was searched for
_STACKED = 5  # a graph is a stack if it has so many times more units than kinds of them
_BINARIES = 450  # decisions of a program that is solved without being asked for time
_MANY_BINARIES = 6000
_NODES = 60  # of a branch and bound that is not asked for time
_POLISH_WORK = 60_000  # of the local search, likewise
_COLUMN_WORK = 6e9  # numbers that knapsacks may touch, some seconds
_LARGE = 300  # operations from which all of this work is done
_BRANCH_WORK = 2e8  # the same for parts of the problem
_STREAMED_UNITS = 500  # with streaming, columns prove little more than fractions do: not asked for time
_LABELLED = "labels over the fine graph"
_LABELS = 300  # kept between two steps, at first
_WIDER = 20_000
_WIDEST = 200_000
_LABEL_WORK = 4_000_000  # labels that may be made without being asked for time
_ROOM_TRIES = 3
_PROGRESS = 0.5  # of the way to the end that a search must have come to be made wider
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
        self.ran: list[Part] = []  # parts in which columns were generated

    @property
    def done(self) -> bool:
        return self.limits.over or self.bound.seconds >= self._enough * (1 - _SLACK)

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
        if binaries <= _BINARIES and not stacked:
            self._solve_program(shares, self.limits.until(0.6))
        parts = self._search_labels(shares)
        if timed and _BINARIES < binaries <= _MANY_BINARIES and not stacked:
            self._solve_program(shares, self.limits.until(0.6))
        if timed or not self.problem.offload or shares.units <= _STREAMED_UNITS:
            self._generate_columns(shares, parts, self.limits.until(0.98))
        if timed and not self.done and binaries <= _MANY_BINARIES:
            self._solve_program(shares, self.limits)
        width = _LABELS
        while timed and width < _WIDEST and not self.done:
            width *= 4
            self._widen(parts, width, self.limits)
        while timed and not self.done:
            before = self.best.seconds
            self._adopt(refine(self.problem, self.chain, self.best, 1_000_000, self.limits.deadline))
            if self.best.seconds >= before:
                break

    # -- labels -----------------------------------------------------------------------------------

    def _search_labels(self, shares: Shares) -> list[Part]:
        """Parts of the problem; look for placements label by label, first few and then more at a time."""
        if self.done:
            return []
        parts = list(part_by_home(self.problem, shares))
        limits = self.limits.until(0.5)
        if not all(part.suits_labels for part in parts):
            return parts
        for part in parts:
            part.prepare_labels(self._enough, limits.deadline)
            if limits.over:
                return parts
        self._raise_by(parts, _LABELLED)
        steps = max(
            (len(p.labels.frontier.steps) * p.labels.frontier.count for p in parts if p.labels), default=1
        )
        self._widen(parts, _LABELS, limits)
        alive = [part.progress(self._enough) for part in parts if part.bound < self._enough]
        if min(alive, default=1.0) >= _PROGRESS:  # else a part would hold back the bound of all
            self._widen(parts, max(_LABELS, min(_WIDER, _LABEL_WORK // steps)), limits)
        return parts

    def _widen(self, parts: list[Part], width: int, limits: Limits) -> None:
        for part in sorted(parts, key=lambda part: part.bound):
            if self.done or limits.over:
                return
            found = part.search(below=self._enough, width=width, deadline=limits.deadline)
            if found is not None and found.devices:
                self._take_labels(part, found, width, limits)
            self._raise_by(parts, _LABELLED)

    def _raise_by(self, parts: list[Part], proof: str) -> None:
        self._raise(min((part.bound for part in parts), default=0.0), proof)

    def _take_labels(self, part: Part, found: Found, width: int, limits: Limits) -> None:
        """Judge what labels have found; where a device is too full, look again with so much more free."""
        assert part.labels is not None
        onward, frontier = part.labels.onward, part.labels.frontier
        margin = np.zeros(frontier.count)
        for _ in range(_ROOM_TRIES):
            evaluation = self._evaluate(part, found.devices)
            if evaluation.feasible:
                break
            margin += [1.05 * evaluation.excess.get(key, 0) for key in frontier.devices]
            careful = Labels(onward, frontier.evenly(margin))
            again = careful.search(below=self._enough, width=width, deadline=limits.deadline)
            if again is None or not again.devices:
                break
            found = again
        if not evaluation.feasible or evaluation.seconds < self.best.seconds:
            self._polish(evaluation, _POLISH_WORK)

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
            found = self._judge(Part(self.problem, shares), solved.devices, solved.brought)
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

    def _judge(self, part: Part, devices: Mapping[int, DeviceKey], brought: Iterable[str]) -> Evaluation:
        found = self._evaluate(part, devices, brought)
        self._polish(found)
        return found

    def _evaluate(
        self, part: Part, devices: Mapping[int, DeviceKey], brought: Iterable[str] = ()
    ) -> Evaluation:
        items = part.shares.items
        placed = {name: key for unit, key in devices.items() for name in items[unit].members}
        operations = self.problem.obey(follow(self.problem.graph, placed))
        return evaluate(self.problem, reside(part.problem, operations, brought))

    def _polish(self, found: Evaluation, work: int | None = None) -> None:
        """Mend and refine what may become the best."""
        if not found.feasible:
            found = repair(self.problem, self.chain, found, deadline=self.limits.deadline)
        if found.feasible and found.seconds < self.best.seconds * _PROMISING:
            self._adopt(found)
            work = work or (_POLISH_WORK if self.limits.deadline is None else 10 * _POLISH_WORK)
            self._adopt(refine(self.problem, self.chain, found, work, self.limits.deadline))

    # -- columns ----------------------------------------------------------------------------------

    def _generate_columns(self, shares: Shares, parts: list[Part], limits: Limits) -> None:
        """Bound the whole and then its parts by columns; where these are fractional, branch."""
        if self.done or not parts:
            return
        alive = sorted((part for part in parts if part.bound < self._enough), key=lambda part: part.bound)
        whole: Part | None = None
        if len(parts) == 1:
            whole = parts[0]
            self._run_columns(whole, whole.worth, limits.until(0.9), dives=whole.labels is None)
        elif len(alive) == len(parts):  # the home has told little so far
            whole = Part(self.problem, shares)
            self._run_columns(whole, None, limits.until(0.9), dives=False)
            for part in parts:
                part.bound = max(part.bound, whole.bound)
        if whole is not None:
            self._raise_by(parts, self._proof())
            if whole.generation is not None and not whole.generation.converged:
                alive = []
        for left, part in zip(range(len(alive), 0, -1), alive, strict=True):
            if self.done or limits.over:
                return
            if part.bound < self._enough and part.generation is None:
                worth = part.worth if whole is None else whole.worth
                self._run_columns(part, worth, limits.until(0.9 / left), dives=False)
                self._raise_by(parts, self._proof())
        self._go_on(parts, limits)

    def _go_on(self, parts: list[Part], limits: Limits) -> None:
        """Finish what has not converged, then branch in the part with the lowest bound."""
        timed = limits.deadline is not None
        for part in sorted(parts, key=lambda part: part.bound):
            if timed and part.generation is not None and not part.generation.converged and not self.done:
                part.generation.run(enough=self._enough, work=np.inf, deadline=limits.deadline)
                part.bound = max(part.bound, part.generation.bound)
                self._raise_by(parts, self._proof())
        work = np.inf if timed else min(1.0, parts[0].shares.units / _LARGE) * _BRANCH_WORK
        while not self.done and not limits.over and work > 0:
            part = min(parts, key=lambda part: part.bound)
            if part.generation is None or not part.generation.converged:
                break
            work -= self._branch(part, parts, work, limits)
            if part.tree is None or part.tree.lowest is None:
                break

    def _proof(self) -> str:
        """What column generation was run over."""
        shares = self.ran[0].shares
        rounds = sum(part.generation.rounds for part in self.ran if part.generation is not None)
        looked = sum(part.tree.looked for part in self.ran if part.tree is not None)
        homes = sum(1 for part in self.ran if part.problem is not self.problem)
        apart = f" by the home of a shared weight ({homes} of them)" if homes else ""
        branches = f", {looked} branches" if looked else ""
        groups = f"{shares.units} operations in {len(shares.counts)} groups"
        return f"column generation over {groups}{apart}, {rounds} rounds{branches}"

    def _run_columns(self, part: Part, worth: Floats | None, limits: Limits, *, dives: bool) -> None:
        effort = min(1.0, part.shares.units / _LARGE)
        work = np.inf if limits.deadline is not None else effort * _COLUMN_WORK
        generation = part.begin_columns(self.best, worth)
        self.ran.append(part)
        share = 0.8 if dives else 1.0
        generation.run(enough=self._enough, work=work, deadline=limits.until(share).deadline)
        part.bound = max(part.bound, generation.bound)
        if dives:
            self._dive(part, generation, limits, work / 4)

    def _branch(self, part: Part, parts: list[Part], work: float, limits: Limits) -> float:
        """A turn of branching in a part, and a dive into its weakest branch; the work that it took."""
        assert part.generation is not None
        before = part.generation if part.tree is None else part.tree.lowest
        part.tree = part.tree or Tree(part.generation)
        turn = min(work, _TURN * part.generation.pricing.work(rough=False))
        part.tree.grow(enough=self._enough, work=turn, deadline=limits.deadline)
        part.bound = max(part.bound, part.tree.bound)
        self._raise_by(parts, self._proof())
        if part.tree.lowest is not None and part.tree.lowest is not before:
            self._dive(part, part.tree.lowest, limits, work)
        return turn

    @property
    def _enough(self) -> float:
        """A bound that needs no improvement."""
        return self.best.seconds * (1 - _ENOUGH)

    def _dive(self, part: Part, generation: ColumnGeneration, limits: Limits, work: float) -> None:
        if self.done or limits.over:
            return
        found, _ = dive(part.problem, generation, work=work, deadline=limits.deadline)
        for evaluation in found:
            self._polish(evaluate(self.problem, evaluation.schedule.assignment))


def _more_room(shares: Shares, margin: Floats, found: Evaluation) -> Floats:
    """Leave as much more free on each kind of device as it was over."""
    more = margin.copy()
    for row, kind in enumerate(shares.kinds):
        more[row] += 1.05 * max((found.excess.get(key, 0) for key in kind.keys), default=0)
    return more
