"""The numbers that steer the search, and what it is limited by: work, and time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

ROUNDING = 1e-9  # relative: sums of seconds or bytes in another order differ by less


@dataclass(frozen=True, slots=True)
class SearchParams:
    """How far the search goes. Work is counted in visits: a state or a piece, looked at on one device.

    A million visits take some 70 milliseconds of one core; the same input gives the same plan.

    Attributes:
        segment_cuts: positions at which the segment DP cuts at most; more change plans by less than 0.1 %.
        segment_share: of all work that one run of the segment DP may take; with many mixed devices it then
            cuts at fewer positions.
        relaxed_states: states between two steps, times devices; where there are more, the cheapest values
            are relaxed, which keeps the bound valid.
        price_rounds: cutting planes of the Lagrangian dual, after which prices hardly change.
        first_width: labels kept between two steps in the first search.
        width_growth: factor from one search to the next wider one.
        completions: labels of a finished search that are judged exactly.
        retries: times that a search is repeated with larger margins, where exact peaks pass a budget.
        local_share: of the work that is left, for one run of the local search.
        turns_share: of all work, for accelerators that compute in turn.
        exchange_effort: times the work of a search, for exchanges of runs after its label searches.
        restarts: climbs in a row that are no better, after which the local search with streaming ends, where
            the effort is the default one; in proportion where it is more.
        sufficient_gap: relative gap at which the search ends: nobody measures a tenth of a percent.
        negligible: share below which a weight is not told apart: of all weights, for the home of a shared
            one; of the largest beside it, for a copy of its own at each forward pass. Of what a bound
            lacks, the least that is progress; of a budget, the least head-room that is worth a move; beyond
            the best seconds, how far a placement is climbed from.
        slot_sizes: sizes of prefetch buffers that are tried.
        slot_ratio: from one of these to the next smaller one, at least.
        coarse_least: operations up to which each is placed by itself where weights are streamed.
        coarse_longest: operations that are placed as one at most.
        milp_variables: operations times devices up to which the integer program is tried where nothing is
            streamed, and classes times devices up to which it tells exchangeable devices apart.
        milp_nodes: linear programs of one branch and bound, before it may go on only while it progresses.
        milp_windows: stretches of the order in which copies have to be done.
        visits_per_operation: default effort.
        least_visits: of that, whatever the graph; so that small graphs are solved to optimality.
        most_visits: of that, some two seconds.
        visits_per_second: that are planned for within a time limit; the clock ends the search in any case.
        streaming_effort: times the default where weights are streamed: copies and buffers are searched too.
        advice_effort: times the default for the budgets of an error: half of it ended before any bisection,
            more finds no smaller ones.
        call_effort: times the default for each search of one call among several: more makes the calls'
            own placements better, and not what they have in common.
        large_gap: relative gap above which a placement is searched for again, from the one that was found.
        more_work: times the default for that: it has halved the time of some, and takes up to a minute.
    """

    segment_cuts: int = 400
    segment_share: float = 0.1
    relaxed_states: int = 2_000
    price_rounds: int = 12
    first_width: int = 100
    width_growth: float = 3.0
    completions: int = 20
    retries: int = 3
    local_share: float = 0.5
    turns_share: float = 0.25
    exchange_effort: float = 0.4
    restarts: int = 15
    sufficient_gap: float = 1e-3
    negligible: float = 0.01
    slot_sizes: int = 4
    slot_ratio: float = 1.5
    coarse_least: int = 100
    coarse_longest: int = 16
    milp_variables: int = 450
    milp_nodes: int = 100
    milp_windows: int = 12
    visits_per_operation: int = 20_000
    least_visits: int = 3_500_000
    most_visits: int = 35_000_000
    visits_per_second: int = 15_000_000
    streaming_effort: float = 4.0
    advice_effort: float = 2.0
    call_effort: float = 0.3
    large_gap: float = 0.5
    more_work: float = 4.0

    def visits(self, operations: int) -> float:
        """The default effort for a graph of so many operations."""
        return float(min(self.least_visits + self.visits_per_operation * operations, self.most_visits))


PARAMS = SearchParams()


@dataclass(slots=True)
class Effort:
    """What is left of the work and of the time.

    Attributes:
        visits: that are left.
        deadline: ``time.monotonic()`` at which to stop, or None.
        total: visits at the start.
    """

    visits: float
    deadline: float | None = None
    total: float = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.visits

    @property
    def late(self) -> bool:
        """Whether time is up."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def over(self) -> bool:
        """Whether the work is done or time is up."""
        return self.visits <= 0 or self.late

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the deadline, or None."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def done(self) -> float:
        """Visits so far."""
        return self.total - self.visits

    def charge(self, visits: float) -> None:
        """Count work that was done."""
        self.visits -= visits

    def until(self, part: float) -> float | None:
        """The deadline of a part of the time that is left."""
        left = self.seconds_left
        return None if left is None else time.monotonic() + max(0.0, left) * part

    @contextmanager
    def share(self, part: float) -> Iterator[Effort]:
        """A part of what is left; what is done of it is charged at the end."""
        given = replace(self, visits=max(0.0, self.visits) * part, deadline=self.until(part))
        yield given
        self.charge(given.done)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to search.

    Attributes:
        deadline: ``time.monotonic()`` at which to stop; None: limited by work, so that the result does not
            depend on the clock.
        effort: share of the default work.
        proves: whether a bound is asked for; else the search ends with a good placement.
        advises: whether an error says which budgets would do for several calls, or beside a disk, which
            takes more searches.
        retries: whether another attempt follows where nothing is found, so that nobody reads which budgets
            would do.
    """

    deadline: float | None = None
    effort: float = 1.0
    proves: bool = True
    advises: bool = True
    retries: bool = False

    @classmethod
    def within(cls, time_limit: float | None) -> Limits:
        """Search so many seconds from now on; by work for None."""
        return cls(None if time_limit is None else time.monotonic() + time_limit)

    @property
    def left(self) -> float | None:
        """Seconds left, or None."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether time is up."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def until(self, share: float) -> Limits:
        """A part of what is left."""
        left = self.left
        if left is None:
            return replace(self, effort=self.effort * share)
        return replace(self, deadline=time.monotonic() + left * share)

    def one_of(self, searches: int) -> Limits:
        """Of one of so many searches: the time that is left is shared, the default work is each one's own."""
        return replace(self.until(1 / searches), effort=self.effort)

    def work(self, operations: int, times: float = 1.0) -> Effort:
        """What can be done in the time that is left; by work, ``times`` what so many operations are worth."""
        left = self.left
        if left is not None:
            return Effort(PARAMS.visits_per_second * left, self.deadline)
        return Effort(PARAMS.visits(operations) * self.effort * times)
