"""The states of a frontier that can be reached, and the ways between them, step by step.

Where there are too many, values that cost little to copy are forgotten: they cost nothing then, and what is
computed of the states stays a lower bound. Values that are read by the same operations at the same cost (the
experts of a layer, say) may be told apart or not: how many of them are on each device is what matters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from graphplan.passes.frontier import Frontier, Step

__all__ = ["Stage", "make_stages"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_STATES = 10_000  # between two steps at most, times devices
_ALL_STATES = 20_000_000  # of all steps: some 240 MB


@dataclass(frozen=True, slots=True)
class Stage:
    """The states after a step, and the ways to them.

    Attributes:
        states: (states,) sorted.
        forgotten: bits of values that are not followed.
        onward: (devices, states before) index of the state after.
        seconds: (devices, states before) of the step, infinite where it may not be.
        before: bits of values that were not followed already before the step.
        bundle: where the bits of values begin that are counted instead of followed.
        mask: of the bits of one value.
    """

    states: Ints
    forgotten: int
    onward: npt.NDArray[np.int32]
    seconds: Floats
    before: int
    bundle: tuple[tuple[int, ...], ...]
    mask: int

    def ordered(self, states: Ints) -> Ints:
        """States of the frontier after this step, alike where only what is counted tells them apart."""
        return _sorted_within(states, self.bundle, self.mask)

    def find(self, states: Ints) -> Ints:
        """Indices of states of the frontier after this step, as far as they can be reached."""
        known = self.ordered(states & ~np.int64(self.before)) & ~np.int64(self.forgotten)
        return np.minimum(np.searchsorted(self.states, known), len(self.states) - 1)


def make_stages(
    frontier: Frontier,
    *,
    alike: bool = False,
    free: Sequence[int] = (),
    most: int | None = None,
    unused: int = 0,
) -> list[Stage]:
    """A stage for each step; in a stack, a layer's are mostly those of the layer before.

    Args:
        frontier: whose states these are.
        alike: whether values that nothing tells apart from here on are counted instead of followed.
        free: variables whose values are not followed, and cost nothing.
        most: states between two steps, times devices, beyond which values are forgotten.
        unused: bits of a state that say nothing that matters.
    """
    stages, made = list[Stage](), dict[Hashable, Stage]()
    most = min(_STATES if most is None else most, _ALL_STATES // len(frontier.steps))
    bundles: list[tuple[tuple[int, ...], ...]] = [()] * len(frontier.steps)
    if alike:
        bundles = _bundles(frontier)
    states, forgotten = np.zeros(1, dtype=np.int64), unused
    for step, bundle in zip(frontier.steps, bundles, strict=True):
        if step.variable in free:
            for touch in step.touches:
                forgotten |= _mask(frontier) << touch.shift
        key = step.signature, forgotten, bundle, states.tobytes()
        stage = made.get(key)
        if stage is None:
            stage = made[key] = _make_stage(frontier, step, states, forgotten, most, bundle)
        stages.append(stage)
        states, forgotten = stage.states, stage.forgotten
    return stages


def _make_stage(
    frontier: Frontier,
    step: Step,
    states: Ints,
    forgotten: int,
    most: int,
    bundle: tuple[tuple[int, ...], ...],
) -> Stage:
    after, seconds = frontier.extend(step.without(forgotten), states)
    forgotten &= ~step.closed | _uses(frontier)
    before = forgotten
    # what is not followed has no bits that could take another's place
    bundle = tuple(tuple(shift for shift in shifts if not before >> shift & 1) for shifts in bundle)
    after = _sorted_within(after & ~np.int64(before), bundle, _mask(frontier))
    known = _unique(after[np.isfinite(seconds)])
    for shift in step.open:
        if len(known) * frontier.count <= most:
            break
        forgotten |= _mask(frontier) << shift
        after &= ~np.int64(forgotten)
        known = _unique(known & ~np.int64(forgotten))
    onward = np.minimum(np.searchsorted(known, after), max(0, len(known) - 1))
    return Stage(known, forgotten, onward.astype(np.int32), seconds, before, bundle, _mask(frontier))


def _uses(frontier: Frontier) -> int:
    """Bits of devices in use, and in heavy use."""
    return (1 << 2 * frontier.count) - 1


def _mask(frontier: Frontier) -> int:
    return (1 << frontier.count) - 1


def _unique(values: Ints) -> Ints:
    """Sorted, each once; for these, faster than numpy's own, which hashes."""
    ordered = np.sort(values, axis=None)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if len(ordered) else ordered


# -- values that nothing tells apart --------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    """A value that is open: where its bits are, and the steps that make or read it, with its seconds."""

    shift: int
    places: list[int] = field(default_factory=list)
    seconds: bytes = b""


def _bundles(frontier: Frontier) -> list[tuple[tuple[int, ...], ...]]:
    """(steps,) after each, where the bits of values begin that the same steps read at the same cost."""
    opened = _opened(frontier)
    beginning: dict[int, list[_Open]] = defaultdict(list)
    for value in opened:
        beginning[value.places[0]].append(value)
    found, live = list[tuple[tuple[int, ...], ...]](), list[_Open]()
    for i in range(len(frontier.steps)):
        live = [value for value in (*live, *beginning[i]) if value.places[-1] > i]
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for value in live:
            alike[tuple(p for p in value.places if p > i), value.seconds].append(value.shift)
        found.append(tuple(tuple(sorted(shifts)) for shifts in alike.values() if len(shifts) > 1))
    return found


def _opened(frontier: Frontier) -> list[_Open]:
    """Values that are made before they are read; only these can be alike."""
    found, live, unmade = list[_Open](), dict[int, _Open](), set[int]()
    for i, step in enumerate(frontier.steps):
        for touch in step.touches:
            if touch.shift not in live:
                live[touch.shift] = _Open(touch.shift)
                found.append(live[touch.shift])
            value = live[touch.shift]
            value.places.append(i)
            if touch.read is not None:
                value.seconds = touch.read.tobytes()
            elif touch.made is None or len(value.places) > 1:  # read before it is made
                unmade.add(id(value))
        for shift in [shift for shift in live if step.closed >> shift & 1]:
            del live[shift]
    return [value for value in found if id(value) not in unmade]


def _sorted_within(states: Ints, bundle: Sequence[Sequence[int]], mask: int) -> Ints:
    """The same states, with the bits of values that nothing tells apart in one order."""
    for shifts in bundle:
        if len(shifts) < 2:
            continue
        each = np.sort(np.stack([states >> shift & mask for shift in shifts]), axis=0)
        for shift, bits in zip(shifts, each, strict=True):
            states = states & ~np.int64(mask << shift) | bits << shift
    return states
