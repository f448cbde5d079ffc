"""Where a sequence repeats itself: stacks of equal layers, and equal parts within a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "Repeat", "find_repeats"]

Ints = npt.NDArray[np.int64]

_LEAST = 3  # times that something must come to be a repeat
_NEARLY = 0.9  # of the longest stretch that a shorter period must cover to be taken instead


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same, again and again.

    Attributes:
        body: what comes ``times`` times in a row; its indices are those of the first time.
        period: elements of the sequence that the body has.
        times: at least three.
    """

    body: tuple[Block, ...]
    period: int
    times: int


Block = int | Repeat


def find_repeats(sequence: Sequence[int] | Ints) -> tuple[Block, ...]:
    """The sequence as indices and repeats; repeats have repeats in them.

    Takes quadratic time, of which each number takes some nanoseconds.
    """
    return _blocks(np.asarray(sequence, dtype=np.int64), 0)


def _blocks(numbers: Ints, first: int) -> tuple[Block, ...]:
    found = _longest(numbers)
    if found is None:
        return tuple(range(first, first + len(numbers)))
    start, period, times = found
    end = start + period * times
    body = _blocks(numbers[start : start + period], first + start)
    repeat = Repeat(body, period, times)
    return (*_blocks(numbers[:start], first), repeat, *_blocks(numbers[end:], first + end))


def _longest(numbers: Ints) -> tuple[int, int, int] | None:
    """(start, period, times) of the repeat that covers most; of nearly equal ones, the shortest period."""
    best: tuple[int, int, int] | None = None
    for period in range(1, len(numbers) // _LEAST + 1):
        start, length = _longest_run(numbers[:-period] == numbers[period:])
        times = length // period + 1
        covered = 0 if best is None else best[1] * best[2]
        if times >= _LEAST and _NEARLY * times * period > covered:
            best = start, period, times
    return best


def _longest_run(same: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Where the longest stretch of true starts, and how long it is."""
    edges = np.flatnonzero(np.diff(same, prepend=False, append=False))
    if not len(edges):
        return 0, 0
    starts, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])
