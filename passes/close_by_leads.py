"""Bound what is streamed: homes of the largest weights and sizes of rings, those with the lowest bound first.

A part is a home for each of the largest weights and a *case* (see ``leads``): from which size to which rings
are, and what operations may need beside weights. What is left to pay bounds it. A part that could be better
than the best placement known is divided, and with one accelerator searched by labels (see ``lead_labels``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from graphplan.passes.evaluate import Problem
from graphplan.passes.incumbent import Incumbent
from graphplan.passes.lead_labels import bound_by_labels
from graphplan.passes.leads import Case, Leads, Prices, Rest
from graphplan.passes.limits import Limits
from graphplan.passes.residence import cpu_key
from graphplan.passes.settings import largest_homes
from graphplan.passes.shares import Shares, kinds_of

__all__ = ["bound_by_leads", "least_seconds"]

_ACCELERATORS = 4  # at most: each has sizes of its own
_SIZES = 10  # of rings that are told apart at first, up to the largest weight
_TELLING = 0.05  # of the largest, from which on they are
_TELLING_NEED = 3e-3  # of the room, likewise
_NEEDS = 4  # of what operations need beside weights
_SLOTS = (2, 3, 4)  # of the largest weight
_WIDER = 1.5  # times a ring the next larger one, from there on
_SMALLER = 4.0  # times a ring one that is told apart where the lower end is none at all
_APART = 1.06  # times its lower end the upper end of a size that is divided
_ROUNDS = 8  # prices that are tried for a part
_WIDTHS = (1000, 3000)  # labels between two steps, first and after that
_RAISE = 1.02  # times the price of bytes without labels, the one that is tried first with them
_RAISES = 5  # prices that are tried
_ACCURACY = 1e-3  # share of the bound that better ones could add, for which none are tried
_LABELS = 150  # that take about as long as a step without labels
_FEWEST = 5  # parts without which a bound is not worth its time
_WORK = 60_000  # steps where nobody asked for time
_ROUNDING = 1e-9

_Ends = tuple[float, ...]


def bound_by_leads(incumbent: Incumbent, limits: Limits) -> None:
    """Raise the bound of a problem with streaming.

    Args:
        incumbent: the search.
        limits: when to stop.
    """
    seconds, parts = least_seconds(incumbent.problem, incumbent.enough, limits)
    incumbent.raise_bound(seconds, f"prices of bytes and copies over the fine graph, in {parts} parts")


def least_seconds(problem: Problem, enough: float, limits: Limits) -> tuple[float, int]:
    """Seconds that no placement goes below, and in how many parts that was proven; 0 where nothing was.

    Args:
        problem: with streaming from the CPU to one or a few accelerators.
        enough: a bound that needs no improvement.
        limits: when to stop.
    """
    accelerators = sum(1 for spec in problem.topology.devices if spec.is_accelerator)
    streams = problem.streams and problem.offload and cpu_key(problem.topology) is not None
    # rings of earlier calls tell devices apart that are alike otherwise
    apart = (problem.rings or problem.growth) and any(len(kind.keys) > 1 for kind in kinds_of(problem))
    hopeless = limits.deadline is None and len(problem.graph.operations) * _FEWEST * _ROUNDS > _WORK
    if not (1 <= accelerators <= _ACCELERATORS and streams) or apart or hopeless:
        return 0.0, 0
    search = _Search(problem, enough, limits)
    return search.run() * (1 - _ROUNDING), search.count


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of the placements.

    Attributes:
        leads: with homes for the largest weights.
        rings: for each accelerator, ends of the sizes of its ring that are told apart here.
        needs: likewise, of what operations need beside weights.
        rest: what is left to pay.
        tuned: whether that is at the best prices.
        searches: how many there were with labels.
    """

    leads: Leads
    rings: tuple[_Ends, ...]
    needs: tuple[_Ends, ...]
    rest: Rest
    tuned: bool
    searches: int = 0

    def halves(self) -> list[tuple[tuple[_Ends, ...], tuple[_Ends, ...]]]:
        """Rings and needs of both halves; none where no sizes are told apart."""
        row = _widest(self.needs)
        if len(self.needs[row]) > 2:
            return [(self.rings, self._with(self.needs, row, half)) for half in _halves(self.needs[row])]
        row = _widest(self.rings)
        return [(self._with(self.rings, row, half), self.needs) for half in _halves(self.rings[row])]

    @staticmethod
    def _with(ends: tuple[_Ends, ...], row: int, own: _Ends) -> tuple[_Ends, ...]:
        return (*ends[:row], own, *ends[row + 1 :])

    def finer(self) -> _Part | None:
        """The same, with sizes of the widest ring told apart again; None where they hardly differ."""
        spans = [self._span(low, high) for low, high in self.rings]
        row = int(np.argmax(spans))
        if spans[row] < _APART:
            return None
        low, high = self.rings[row]
        middle = low * float(np.sqrt(spans[row])) if low else min(high, self.leads.copied) / _SMALLER
        return replace(self, rings=self._with(self.rings, row, (low, middle, high)))

    def _span(self, low: float, high: float) -> float:
        """Times the lower size the upper one."""
        high = min(high, self.leads.copied)
        if low:
            return high / low
        return _SMALLER if any(high > _SMALLER * size for size in self.leads.held[:1]) else 1.0


def _widest(ends: Sequence[_Ends]) -> int:
    return max(range(len(ends)), key=lambda row: len(ends[row]))


def _halves(ends: _Ends) -> list[_Ends]:
    middle = len(ends) // 2
    return [ends[: middle + 1], ends[middle:]] if len(ends) > 2 else []


class _Search:
    """Best first, until the lowest bound is high enough or nothing more can be done about it.

    Attributes:
        count: of parts that have been bounded.
    """

    def __init__(self, problem: Problem, enough: float, limits: Limits) -> None:
        self.problem, self.enough, self.limits = problem, enough, limits
        self.work, self.count = 0.0, 0
        self.order = count()
        self.open: list[tuple[float, int, _Part]] = []
        self.raise_ = _RAISE

    @property
    def over(self) -> bool:
        """Whether time is up, or the work done."""
        return self.limits.over or (self.limits.deadline is None and self.work > _WORK)

    def run(self) -> float:
        """Seconds that no placement goes below; 0 where there was no time to find any."""
        for homes in largest_homes(self.problem):
            if self.over:
                return 0.0
            fixed = {**self.problem.fixed_weights, **homes}
            leads = Leads(Shares(replace(self.problem, offload=False, fixed_weights=fixed)))
            rows = range(len(leads.rows))
            rings = tuple(self._ring_ends(leads, row) for row in rows)
            needs = tuple(_need_ends(leads, row) for row in rows)
            if all(len(ends) > 1 for ends in (*rings, *needs)):
                self._bound(leads, rings, needs, None, 0.0)
        stuck = np.inf
        while self.open and self.open[0][0] < min(self.enough, stuck) and not self.over:
            seconds, _, part = heapq.heappop(self.open)
            if not self._improve(seconds, part):
                stuck = min(stuck, seconds)
        return min([self.enough, stuck, *(seconds for seconds, _, _ in self.open[:1])])

    def _ring_ends(self, leads: Leads, row: int) -> _Ends:
        """Sizes of a ring from one to the next, from none at all to any; one where there can be no ring."""
        key = leads.keys[row]
        there, most = self.problem.rings.get(key, 0), self.problem.growth.get(key, np.inf)
        held, high = leads.held, leads.copied
        sizes = _snapped([size for size in held if size >= _TELLING * held[-1]], _SIZES)
        most_slots = min(high, float(leads.room[row]))
        sizes += [slots * held[-1] for slots in _SLOTS if held and slots * held[-1] < most_slots]
        while sizes and sizes[-1] * _WIDER < most_slots:
            sizes.append(sizes[-1] * _WIDER)
        ends = [0.0, *sizes, np.inf]
        inside = [end for end in ends if there < end <= most]
        return (float(there), *inside, *([most + 1.0] if most < np.inf else []))

    def _bound(
        self,
        leads: Leads,
        rings: tuple[_Ends, ...],
        needs: tuple[_Ends, ...],
        near: Prices | None,
        least: float,
    ) -> Prices:
        """Bound a part of what is known to take ``least`` seconds; returns its prices.

        Args:
            leads: with homes for the largest weights.
            rings: of the part.
            needs: of the part.
            near: prices that are good for what it is a part of; if there are none, the best are looked for.
            least: seconds.
        """
        case = _case(rings, needs)
        rest = self._tuned(leads, case, None) if near is None else leads.price(case, near)
        self.count += 1
        self.work += len(leads.stages)
        seconds = max(rest.bound, least)
        if seconds < self.enough:
            part = _Part(leads, rings, needs, rest, tuned=near is None)
            heapq.heappush(self.open, (seconds, next(self.order), part))
        return rest.prices

    def _tuned(self, leads: Leads, case: Case, near: Prices | None) -> Rest:
        self.work += len(leads.stages) * _ROUNDS / 2
        return leads.highest(case, near, enough=self.enough, rounds=_ROUNDS)

    def _improve(self, seconds: float, part: _Part) -> bool:
        """Raise the bound of a part, or divide it; False where neither can be done."""
        if not part.tuned:
            rest = self._tuned(part.leads, _case(part.rings, part.needs), part.rest.prices)
            if rest.bound < self.enough:
                tuned = replace(part, rest=rest, tuned=True)
                heapq.heappush(self.open, (max(seconds, rest.bound), next(self.order), tuned))
            return True
        halves = part.halves()
        if not halves:
            if len(part.leads.rows) == 1 and part.searches < len(_WIDTHS):
                self._label(seconds, part)
                return True
            finer = part.finer()
            halves = [] if finer is None else finer.halves()
        for rings, needs in halves:
            self._bound(part.leads, rings, needs, part.rest.prices, seconds)
        return bool(halves)

    def _label(self, seconds: float, part: _Part) -> None:
        """Search by labels, where bytes cost somewhat more than without these."""
        case, prices = _case(part.rings, part.needs), part.rest.prices
        width, raised = _WIDTHS[part.searches], self.raise_
        tried = list[tuple[float, float, float]]()
        for _ in range(_RAISES):
            rest = part.leads.price(case, Prices(prices.nbytes * raised, prices.copying))
            found = bound_by_labels(part.leads, case, rest, enough=self.enough, width=width)
            self.work += len(part.leads.stages) + found.labels / _LABELS
            tried.append((raised, found.seconds, found.over * float(prices.nbytes[0])))
            if found.seconds > seconds:
                seconds, self.raise_ = found.seconds, raised
            if seconds >= self.enough or self.over:
                break
            raised, most = _next_price(tried)
            if most - seconds < _ACCURACY * seconds:
                break
        if seconds < self.enough:
            more = replace(part, searches=part.searches + 1)
            heapq.heappush(self.open, (seconds, next(self.order), more))


def _next_price(tried: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """A price of bytes that may prove more, and the bound that it may prove at most.

    Args:
        tried: prices, what they proved, and how that grows with the price, from above.
    """
    below = max((each for each in tried if each[2] > 0), default=None)
    above = min((each for each in tried if each[2] <= 0), default=None)
    if below is None or above is None:
        price, _, slope = tried[-1]
        step = 1 + (_RAISE - 1) * 4 ** (len(tried) - 1)
        return (price * step if slope > 0 else price / step), np.inf
    price = (above[1] - above[2] * above[0] - below[1] + below[2] * below[0]) / (below[2] - above[2])
    price = min(max(price, 0.9 * below[0] + 0.1 * above[0]), 0.1 * below[0] + 0.9 * above[0])
    return price, below[1] + below[2] * (price - below[0])


def _case(rings: tuple[_Ends, ...], needs: tuple[_Ends, ...]) -> Case:
    return Case(tuple((e[0], e[-1]) for e in rings), tuple((e[0], e[-1]) for e in needs))


def _need_ends(leads: Leads, row: int) -> _Ends:
    """What operations may need from one size to the next, from nothing to anything."""
    telling = [need for need in leads.needs(row) if need >= _TELLING_NEED * leads.room[row]]
    return (0.0, *_snapped(telling, _NEEDS), np.inf)


def _snapped(sizes: Sequence[float], most: int) -> list[float]:
    """All of a few sizes; of many, some that are far apart."""
    if len(sizes) <= most:
        return list(sizes)
    steps = np.geomspace(sizes[0], sizes[-1], most)
    chosen = np.unique(np.searchsorted(sizes, steps * (1 - 1e-9)))
    return [sizes[i] for i in chosen]
