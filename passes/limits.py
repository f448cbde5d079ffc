"""How long the planner searches."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to search.

    Attributes:
        deadline: ``time.monotonic()`` at which to stop; None: limited by work.
        exhaustive: whether to go on after the first good placement.
        improves: whether to refine what is found, and to close the gap between it and the bound.
    """

    deadline: float | None = None
    exhaustive: bool = True
    improves: bool = True

    @classmethod
    def within(cls, time_limit: float | None) -> Limits:
        """Search so many seconds from now on; by work for None."""
        return cls(None if time_limit is None else time.monotonic() + time_limit)

    @property
    def left(self) -> float | None:
        """Seconds left, or None."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether time is up."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def until(self, share: float) -> Limits:
        """A part of the time that is left."""
        left = self.left
        return self if left is None else replace(self, deadline=time.monotonic() + max(0.0, left) * share)
