"""Memory that knapsacks use again and again: asking the system for it takes as long as filling it.

Whoever solves one takes a space from the list, or makes one, and puts it back. All knapsacks have the same
list, so that there are no more spaces than solutions at once; it goes with the last of them.
"""

from __future__ import annotations

import math
import weakref

import numpy as np
import numpy.typing as npt

__all__ = ["Space", "Spaces", "shared_spaces"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Space:
    """Memory for one solution, and then for the next."""

    def __init__(self) -> None:
        self._buffers = [np.empty(0), np.empty(0)]
        self._turn, self._bits, self._used = 0, np.empty(0, dtype=bool), 0

    def begin(self, state: Floats) -> None:
        """For states of this type."""
        self._used = 0
        if self._buffers[0].dtype != state.dtype:
            self._buffers = [np.empty(0, state.dtype), np.empty(0, state.dtype)]

    def states(self, shape: tuple[int, ...]) -> Floats:
        """An array to write to; the one before last is not used any more."""
        self._turn = 1 - self._turn
        size = math.prod(shape)
        if self._buffers[self._turn].size < size:
            self._buffers[self._turn] = np.empty(size, self._buffers[0].dtype)
        return self._buffers[self._turn][:size].reshape(shape)

    def choices(self, shape: tuple[int, ...]) -> Bools:
        """An array to write to, one of all until the next solution."""
        size = math.prod(shape)
        if self._bits.size - self._used < size:  # what was given out keeps the old memory alive
            self._bits, self._used = np.empty(max(size, 2 * self._bits.size), dtype=bool), 0
        self._used += size
        return self._bits[self._used - size : self._used].reshape(shape)


class Spaces(list[Space]):
    """Those that nobody uses, of all knapsacks there are; a list that can be referred to weakly."""


_known: weakref.ref[Spaces] | None = None


def shared_spaces() -> Spaces:
    """The same for all knapsacks, as long as there is one."""
    global _known
    found = None if _known is None else _known()
    if found is None:
        found = Spaces()
        _known = weakref.ref(found)
    return found
