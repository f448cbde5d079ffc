"""Parameters of the search, and its limits: work and time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

ROUNDING = 1e-9  # relative: sums of seconds or bytes in another order differ by less


@dataclass(frozen=True, slots=True)
class SearchParams:
    """Parameters of the search. Work is counted in visits: one state or piece examined on one device.

    A million visits take some 70 milliseconds of one core. The same input gives the same plan.

    Attributes:
        segment_cuts: most positions at which the segment DP cuts; more change plans by less than 0.1 %.
        segment_share: share of all work that one run of the segment DP may take; with many mixed devices it
            then cuts at fewer positions.
        relaxed_states: most states between two steps, times devices; beyond it the cheapest values are
            relaxed, which keeps the bound valid.
        price_rounds: cutting planes of the Lagrangian dual, after which prices hardly change.
        first_width: labels kept after each step of the first beam; without streaming, the first label search
            keeps ``width_growth`` times as many.
        width_growth: factor from one label search to the next wider one.
        completions: completed labels of a search whose exact seconds and peaks are computed.
        retries: repetitions of a search with larger margins, or of a repair, where peaks exceed a budget.
        local_share: share of the remaining work for one run of the local search.
        round_robin_share: share of all work for placements in which accelerators compute in turn.
        exchange_effort: work of exchanges after the label searches, as a multiple of the whole search's.
        restarts: climbs in a row without a gain, after which the local search with streaming ends, at the
            default effort; in proportion to a larger effort.
        sufficient_gap: relative gap at which the search ends: nobody measures a tenth of a percent.
        negligible: a relative difference that does not matter: of bytes, of a budget, of seconds, or of the
            gap that a bound has left to close.
        slot_sizes: sizes of prefetch slots that are tried.
        slot_ratio: least factor between two of these sizes.
        coarse_least: most operations of a graph that is not coarsened where weights are streamed.
        coarse_longest: most operations that are tied into one.
        milp_variables: most operations times devices for which the integer program is tried where nothing is
            streamed; most classes times devices for which it tells exchangeable devices apart.
        milp_nodes: linear programs that branch and bound solves without progress before it ends.
        milp_windows: windows of the order, each with rows for its copies.
        visits_per_operation: default effort, for each operation.
        least_visits: default effort for a graph without operations, so that small graphs are solved to
            optimality.
        most_visits: most default effort, some two seconds.
        visits_per_second: work planned for each second of a time limit; the clock ends the search anyway.
        streaming_effort: multiple of the default where weights are streamed: copies and buffers are searched
            too.
        advice_effort: multiple of the default for the budgets of an error: half of it ended before any
            bisection, more finds no smaller ones.
        call_effort: multiple of the default for each search of one pass among several: more improves the
            passes' own placements, and not their common homes of weights.
        disk_effort: share of the default for each search with a disk after one has found a placement.
        disk_climb: multiple of the default for the climb after them.
        large_gap: relative gap above which the search is repeated from the placement that it found.
        more_work: multiple of the default for that repetition: it has halved the time of some placements,
            and takes up to a minute.
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
    round_robin_share: float = 0.25
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
    streaming_effort: float = 3.0
    advice_effort: float = 2.0
    call_effort: float = 0.3
    disk_effort: float = 0.2
    disk_climb: float = 3.0
    large_gap: float = 0.5
    more_work: float = 4.0

    def visits(self, operations: int) -> float:
        """Return the default effort for a graph with this many operations."""
        return float(min(self.least_visits + self.visits_per_operation * operations, self.most_visits))


PARAMS = SearchParams()


@dataclass(slots=True)
class Effort:
    """The remaining work and time of a search.

    Attributes:
        visits: remaining visits.
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
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def over(self) -> bool:
        """Whether the work is used up or the deadline has passed."""
        return self.visits <= 0 or self.late

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def done(self) -> float:
        """Visits charged so far."""
        return self.total - self.visits

    def charge(self, visits: float) -> None:
        """Subtract visits that were made."""
        self.visits -= visits

    def charge_evaluation(self, operations: int) -> None:
        """Subtract the visits of one evaluation, in proportion to the operations as measured."""
        self.charge(3000.0 + 70.0 * operations)

    def until(self, share: float) -> float | None:
        """Return the deadline of this share of the remaining time; None without a deadline."""
        left = self.seconds_left
        return None if left is None else time.monotonic() + max(0.0, left) * share

    @contextmanager
    def fraction(self, share: float) -> Iterator[Effort]:
        """Context manager that yields a share of the remaining effort and charges its use."""
        sub_effort = replace(self, visits=max(0.0, self.visits) * share, deadline=self.until(share))
        yield sub_effort
        self.charge(sub_effort.done)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to search.

    Attributes:
        deadline: ``time.monotonic()`` at which to stop; None limits the search by work, so that the result
            does not depend on the clock.
        effort: multiple of the default work.
        proves: whether to compute a bound; if not, the search ends with a good placement.
        advises: whether to search for budgets that an error names, for several passes or with a disk; if
            not, those of other errors may be rough.
        caller_retries: whether the caller tries again if nothing is found; an error's budgets may be rough.
    """

    deadline: float | None = None
    effort: float = 1.0
    proves: bool = True
    advises: bool = True
    caller_retries: bool = False

    @classmethod
    def within(cls, time_limit: float | None) -> Limits:
        """Return limits of this many seconds from now; limits by work for None."""
        return cls(None if time_limit is None else time.monotonic() + time_limit)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def until(self, share: float) -> Limits:
        """Return limits of this share of the remaining time, or of the work without a deadline."""
        left = self.seconds_left
        if left is None:
            return replace(self, effort=self.effort * share)
        return replace(self, deadline=time.monotonic() + left * share)

    def one_of(self, searches: int) -> Limits:
        """Return limits of one of several searches: they share the remaining time; each has the full work."""
        return replace(self.until(1 / searches), effort=self.effort)

    def work(self, operations: int, times: float = 1.0) -> Effort:
        """Return ``times`` the work for this many operations, or less if the remaining time is short."""
        left = self.seconds_left
        limit = math.inf if left is None else PARAMS.visits_per_second * left
        return Effort(min(PARAMS.visits(operations) * self.effort * times, limit), self.deadline)
