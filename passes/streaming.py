"""Placements of models that do not fit: what accelerators stream, and what the CPU computes.

Where the largest weights live decides most of the rest, and so does how the memory of accelerators is
divided: among weights, a ring, and activations. Each such setting is bounded by ``fluid``; the most promising
are searched by ``beam``, which ``leads`` tells what is left to pay, and judged by the evaluator. The best is
then changed device by device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

import numpy as np

from graphplan.passes.beam import Beam, Way
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.leads import Case, Guide, Prices, Rest
from graphplan.passes.limits import Limits
from graphplan.passes.residence import cpu_key, follow, reside
from graphplan.passes.settings import Setting, make_settings, movable_weights

__all__ = ["stream"]

_ACCELERATORS = 9  # at most: each has its bits in a state
_SEARCHED = 4  # settings that are searched
_WIDTH = 300  # labels between two steps
_AGAIN = ((300, 0.05), (300, 0.0), (1500, 0.05))  # width and pace of further searches of the best setting
_WIDEST = 5000  # labels, where somebody asked for more time
_MOST = 100_000
_WORK = 4_500_000  # labels that all searches may keep where time is not limited
_CLOSE = 2e-3  # share of the seconds that is not worth a search
_SHORT = 300  # steps that a search counts for at least: to judge what it finds takes time too
_HOPELESS = 1.02  # times the seconds to be beaten, from which a search is not repeated with more care
_LOOSE = 1.5  # times the seconds to be beaten, up to which a placement is worth a look
_ROUNDS = 10  # prices that are tried for a setting
_ATTEMPTS = 5  # searches of a setting, each with more room left free
_PRECISE = 2  # of these, in which that is asked for single operations only


def stream(problem: Problem, best: Evaluation | None, limits: Limits) -> Iterator[Evaluation]:
    """Placements within the budgets that are faster than ``best``, each faster than the one before."""
    accelerators = sum(1 for spec in problem.topology.devices if spec.is_accelerator)
    if not 1 <= accelerators <= _ACCELERATORS or cpu_key(problem.topology) is None:
        return
    if not (problem.offload and problem.streams):
        return
    search = _Search(problem, best, limits)
    settings = make_settings(problem, limits)
    for setting in settings[:_SEARCHED]:
        yield from search.run(setting)
    yield from search.run_again()
    yield from search.run_others()
    if limits.deadline is not None:  # somebody asked for more
        for setting in settings[_SEARCHED:]:
            yield from search.run(setting)
        yield from search.run_wider()


class _Search:
    """What searches of one problem learn, one from the other.

    Attributes:
        setting: of the best placement; None until one is found.
        tried: shapes of settings that have been searched.
    """

    def __init__(self, problem: Problem, best: Evaluation | None, limits: Limits) -> None:
        self.problem, self.limits = problem, limits
        self.below = np.inf if best is None else best.seconds
        self.setting: Setting | None = None
        self.tried: set[Hashable] = set()
        self.left = _WORK
        # device and operation -> bytes beside the weights while it runs; device -> bytes to leave free
        self.needs: dict[tuple[object, str], float] = {}
        self.margin: dict[object, float] = {}
        self.rests: dict[tuple[int, Case], Rest] = {}
        self.prices: dict[int, Prices] = {}  # that were best last, of each set of homes

    @property
    def over(self) -> bool:
        """Whether time is up, or the work done."""
        return self.limits.over or (self.limits.deadline is None and self.left <= 0)

    def _allows(self, work: int) -> bool:
        """Whether a search of so many labels is within what is left."""
        return self.limits.deadline is not None or work <= self.left

    def run(
        self, setting: Setting, width: int = _WIDTH, *, pace: float = 0.0, alone: bool = True
    ) -> Iterator[Evaluation]:
        """The placements that a beam finds, as far as each is the fastest so far."""
        self.tried.add(setting.shape)
        self.margin.clear()
        hopeless = self.below * (1 - _CLOSE)
        if self.over or setting.bound >= hopeless or self._rest(setting).bound >= hopeless:
            return
        work = width * max(_SHORT, len(setting.frontier.steps))
        for attempt in range(_ATTEMPTS):
            if self.over or (width > _WIDTH and not self._allows(work)):
                return
            beam = self._beam(setting)
            self.left -= work
            way = beam.search(
                # what is slower says what devices need
                below=_LOOSE * self.below,
                width=width,
                pace=pace,
                guide=Guide(setting.leads, self._rest(setting), setting.leads.capacity(setting.case)),
                alone=alone,
                deadline=self.limits.deadline,
            )
            if way is None:
                return
            found = self._evaluate(setting, way)
            if found.feasible:
                if found.seconds < self.below:
                    self.below, self.setting = found.seconds, setting
                    yield found
                return
            self._learn(setting, way, found, precisely=attempt < _PRECISE)
            if min(way.seconds, found.seconds) > _HOPELESS * self.below:
                return  # with more room left free it only gets slower

    def run_again(self) -> Iterator[Evaluation]:
        """The best setting, in other ways."""
        for width, pace in _AGAIN:
            if self.setting is not None:
                yield from self.run(self.setting, width, pace=pace, alone=False)

    def run_wider(self) -> Iterator[Evaluation]:
        """The best setting with ever more labels, as long as there is time."""
        width = _WIDEST
        while self.setting is not None and not self.over and width <= _MOST:
            yield from self.run(self.setting, width)
            width *= 4

    def run_others(self) -> Iterator[Evaluation]:
        """The same with other rings, as long as that helps."""
        before = None
        while self.setting is not None and self.setting is not before and not self.over:
            before = self.setting
            for other in before.others():
                if other.shape not in self.tried:
                    yield from self.run(other)

    def _rest(self, setting: Setting) -> Rest:
        """What is left to pay in a setting."""
        key = id(setting.leads), setting.case
        if key not in self.rests:
            near = self.prices.get(key[0])
            rest = setting.leads.highest(setting.case, near, enough=self.below, rounds=_ROUNDS)
            self.rests[key] = rest
            if np.isfinite(rest.bound):
                self.prices[key[0]] = rest.prices
        return self.rests[key]

    def _beam(self, setting: Setting) -> Beam:
        frontier = setting.frontier
        needs, levels = setting.needs.copy(), np.array(setting.levels)
        for d, key in enumerate(frontier.devices):
            for i, step in enumerate(frontier.steps):
                for name in frontier.shares.items[step.variable].members:
                    known = self.needs.get((key, name), 0.0)
                    if known > needs[d, i]:
                        if needs[d, i] <= levels[d] < known:
                            levels[d] = known
                        needs[d, i] = known
        margin = np.array([self.margin.get(key, 0.0) for key in frontier.devices])
        return Beam(frontier, setting.rings, setting.movable, setting.settled, needs, levels, margin)

    def _evaluate(self, setting: Setting, way: Way) -> Evaluation:
        frontier = setting.frontier
        shares = frontier.shares
        placed = {name: key for item, key in way.devices.items() for name in shares.items[item].members}
        operations = self.problem.obey(follow(self.problem.graph, placed))
        brought = [name for item in way.brought for name in movable_weights(setting.problem, shares, item)]
        slots = {k: r.slots for k, r in zip(frontier.devices, setting.rings, strict=True) if r is not None}
        assignment = reside(setting.problem, operations, brought)
        return evaluate(self.problem, replace(assignment, slots=slots))

    def _learn(self, setting: Setting, way: Way, found: Evaluation, *, precisely: bool) -> None:
        """Count what the evaluator found a device to need: while that operation runs, or at any time."""
        graph = self.problem.graph
        for d, key in enumerate(setting.frontier.devices):
            if key not in found.excess:
                continue
            peak = found.peak(key)
            need, known = float(peak.nbytes - peak.weights), self.needs.get((key, peak.operation), 0.0)
            more = peak.operation in graph.operations and need > max(known, setting.need(d, peak.operation))
            if precisely and more:
                self.needs[key, peak.operation] = need  # what waits meanwhile is known only now
            else:  # of allocations, which take more than what is in them
                self.margin[key] = self.margin.get(key, 0.0) + found.excess[key] + float(way.left[d])
