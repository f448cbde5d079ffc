"""A problem in parts: one for each device that may keep the largest weight that several operations read.

Where such a weight is decides most of the rest (an embedding that is read first and last, say), and a bound
that leaves it open is weak. The bound of the whole is the lowest of its parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from graphplan.passes.branch import Tree
from graphplan.passes.columns import ColumnGeneration
from graphplan.passes.evaluate import Evaluation, Problem
from graphplan.passes.frontier import Frontier
from graphplan.passes.labels import Found, Labels
from graphplan.passes.onward import Onward
from graphplan.passes.pricing import Prices, Pricing
from graphplan.passes.shares import Shares

__all__ = ["Part", "part_by_home"]

Floats = npt.NDArray[np.float64]

_TELLING = 0.01  # share of all weights from which a shared one makes parts
_PARTED_DEVICES = 5  # at most: with more, a part is hardly easier than the whole
_LABELLED_DEVICES = 8  # at most: each has its bits in a state
_ROUNDING = 1e-9


class Part:
    """What placements there are with one home for the largest shared weight.

    Attributes:
        problem: with that home.
        shares: its costs and sizes.
        bound: seconds that none of them can go below.
        labels: a search of its placements, once prepared; None where labels do not suit it.
        generation: of columns, once begun.
        tree: of the parts of this part, once begun.
    """

    def __init__(self, problem: Problem, shares: Shares) -> None:
        self.problem, self.shares = problem, shares
        self.bound = 0.0
        self._before = 0.0
        self.labels: Labels | None = None
        self.generation: ColumnGeneration | None = None
        self.tree: Tree | None = None

    @property
    def suits_labels(self) -> bool:
        """Whether there are few enough devices, and no streaming, which labels do not know."""
        shares = self.shares
        devices = sum(len(kind.keys) for kind, runs in zip(shares.kinds, shares.runs, strict=True) if runs)
        few = 2 <= devices <= _LABELLED_DEVICES
        return few and not self.problem.offload and not (len(shares.ties) and _keeps_only(shares))

    def prepare_labels(self, best: float, deadline: float | None, near: Part | None = None) -> None:
        """Find prices of bytes for the search.

        Args:
            best: seconds of a known placement.
            deadline: ``time.monotonic()`` at which to stop, or None.
            near: a part whose prices are known, to begin with.
        """
        onward = Onward(Frontier(self.shares))
        if (
            near is not None
            and near.labels is not None
            and near.labels.frontier.devices == onward.frontier.devices
        ):
            onward.prices = near.labels.onward.prices
        onward.price(best, deadline)
        self.bound = max(self.bound, onward.bound * (1 - _ROUNDING))
        if np.isfinite(onward.bound):
            self.labels = Labels(onward)

    def search(self, *, below: float, width: int, deadline: float | None) -> Found | None:
        """Raise the bound by labels and look for a placement; None where nothing is left to look for."""
        if self.labels is None or self.bound >= below:
            return None
        found = self.labels.search(below=below, width=width, deadline=deadline)
        if found is not None:
            self._before = self.bound
            self.bound = max(self.bound, found.bound * (1 - _ROUNDING))
        return found

    def progress(self, goal: float) -> float:
        """Share of the way to a bound of ``goal`` seconds that the last search by labels has come."""
        return (self.bound - self._before) / max(goal - self._before, 1e-12) if self._before else 0.0

    @property
    def worth(self) -> Floats | None:
        """(units,) seconds that each is worth at the best prices known; None before any are."""
        units = self.shares.units
        if self.generation is not None and self.generation.center is not None:
            return self.generation.center.cover[self.shares.group]
        if self.labels is not None and self.labels.onward.rest:
            return self.labels.onward.worth(len(self.shares.items))[:units]
        return None

    def is_like(self, other: Part) -> bool:
        """Whether shares of one are shares of the other: units, items and groups are the same."""
        mine, others = self.shares, other.shares
        same = len(mine.items) == len(others.items) and mine.needs == others.needs
        return same and np.array_equal(mine.group, others.group)

    def begin_columns(self, known: Evaluation, worth: Floats | None) -> ColumnGeneration:
        """Column generation, from what units are worth where that is known."""
        prices = None if worth is None else self._prices(worth)
        self.generation = ColumnGeneration(Pricing(self.shares), [known], prices)
        return self.generation

    def _prices(self, worth: Floats) -> Prices:
        shares = self.shares
        paid = np.bincount(shares.group, weights=worth, minlength=len(shares.counts))
        kinds, groups = len(shares.kinds), len(shares.counts)
        return Prices(
            paid / np.maximum(shares.counts, 1),
            1.0,
            np.zeros(kinds),
            np.zeros(len(shares.items)),
            np.zeros((kinds, groups)),
            0.0,
        )


def _keeps_only(shares: Shares) -> bool:
    """Whether an accelerator may run nothing, and could still keep a weight that others read."""
    kinds = zip(shares.kinds, shares.runs, strict=True)
    return any(kind.spec.is_accelerator and not runs for kind, runs in kinds)


def part_by_home(problem: Problem, shares: Shares) -> Iterator[Part]:
    """The parts; the problem itself where no weight is worth it."""
    ties = shares.ties
    largest = int(ties[shares.nbytes[ties].argmax()]) if len(ties) else -1
    devices = sum(len(kind.keys) for kind, runs in zip(shares.kinds, shares.runs, strict=True) if runs)
    telling = largest >= 0 and shares.nbytes[largest] >= _TELLING * shares.nbytes.sum()
    if not telling or problem.offload or devices > _PARTED_DEVICES or _keeps_only(shares):
        yield Part(problem, shares)
        return
    name = shares.items[largest].weight
    for kind, runs in zip(shares.kinds, shares.runs, strict=True):
        if runs and shares.nbytes[largest] <= kind.spec.room:  # others of the kind: the same by another name
            fixed = replace(problem, fixed_weights={**problem.fixed_weights, name: kind.keys[0]})
            yield Part(fixed, Shares(fixed))
