"""How far a copy queue may be ahead of the clock: no further than its ring holds copies that are whole.

In seconds of copies as ``ways`` counts them, latency included; never less than what can be, so that bounds
stay bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from graphplan.passes.segments import SMALL
from graphplan.passes.ways import Choice, Choices, Ways

__all__ = ["Lengths"]

Floats = npt.NDArray[np.float64]

_FINE = 0.05  # of a ring: what is smaller fills it up
_SUMS = 3000  # of sizes that are told apart


class Lengths:
    """The longest leads of the accelerators.

    Args:
        ways: to run steps.
        choices: (steps,) these, step by step.

    Attributes:
        held: bytes that a ring may have to hold at once, in growing order.
        copied: bytes of all copies that there can be, about, and no fewer.
    """

    def __init__(self, ways: Ways, choices: Sequence[Choices]) -> None:
        self.bandwidth = np.array([link.bandwidth for link in ways.links])
        self._latency = [link.latency for link in ways.links]
        self._spare, self._held_in_part = ways.spare, ways.held_in_part
        every = [c for some in dict.fromkeys(choices) for c in some if c.row >= 0]
        self.held = sorted({c.held for c in every if c.held})
        self.copied = _most(choices, lambda c: c.copying * self.bandwidth[c.row])
        self._small = _most(choices, lambda c: c.copying * self._is_small(c))
        large = (c for c in every if not self._is_small(c) and c.copying > self._latency[c.row])
        # seconds of a copy with its latency, by those without
        self._late = max((c.copying / (c.copying - self._latency[c.row]) for c in large), default=1.0)
        self._filled: dict[float, float] = {}

    def _is_small(self, choice: Choice) -> bool:
        return choice.copying < SMALL * self._latency[choice.row]

    def most(self, rings: Sequence[float]) -> Floats:
        """(accelerators,) seconds of a lead at most, where rings have fewer than so many bytes."""
        seconds = np.array([self._bytes_in(ring) for ring in rings]) / self.bandwidth
        paid = np.minimum(seconds * (1 + 1 / SMALL), seconds * self._late + self._small)
        return np.asarray(paid + self._spare)

    def beside(self, choice: Choice, most: Floats) -> Floats:
        """(accelerators,) the same while an operation runs whose weights are in the ring."""
        if not choice.held or choice.beside:
            return most
        left = most.copy()
        left[choice.row] = max(0.0, left[choice.row] - choice.held / self.bandwidth[choice.row])
        return left

    def gained(self, choice: Choice, most: Floats) -> Floats:
        """(accelerators,) seconds by which leads grow at most while an operation runs."""
        after = np.minimum(self.beside(choice, most), choice.run - choice.beside)
        return np.asarray(after + choice.beside)

    def _bytes_in(self, ring: float) -> float:
        """Bytes that a ring of less than so many may hold."""
        if ring not in self._filled:
            self._filled[ring] = min(ring, self.copied, self._whole(ring))
        return self._filled[ring]

    def _whole(self, ring: float) -> float:
        """The largest sum of sizes below the ring's."""
        if self._held_in_part or not np.isfinite(ring):
            return ring
        sizes = [size for size in self.held if size < ring]
        if sizes and sizes[0] < _FINE * ring:
            return ring
        sums, fresh = {0.0}, {0.0}
        while fresh and len(sums) < _SUMS:
            fresh = {n + size for n in fresh for size in sizes if n + size < ring} - sums
            sums |= fresh
        return ring if fresh else max(sums)


def _most(choices: Sequence[Choices], amount: Callable[[Choice], float]) -> float:
    """The sum over steps of what the choice with most of it has."""
    each = {
        some: max((amount(c) for c in some if c.row >= 0), default=0.0) for some in dict.fromkeys(choices)
    }
    return float(sum(each[some] for some in choices))
