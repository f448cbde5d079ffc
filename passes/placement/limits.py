"""How long the planner may search."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to search.

    Attributes:
        deadline: ``time.monotonic()`` at which to stop; None: limited by work, so that the result does not
            depend on the clock.
        effort: share of the default work.
        proves: whether a bound is asked for; else the search ends with a good placement.
    """

    deadline: float | None = None
    effort: float = 1.0
    proves: bool = True

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
