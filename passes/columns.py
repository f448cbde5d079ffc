"""A lower bound by column generation: which shares of the graph can the devices have, and at what price.

The master problem, a linear program, mixes known shares (see ``shares``) so that every operation runs
once, no kind of device has more shares than devices, and the longest clock is as short as can be. Its
prices say what running each operation is worth; the knapsacks answer with the best shares at those
prices, and with a lower bound that holds whatever the prices are (Lagrange). Prices are smoothed towards
those of the best bound (Wentges, "Weighted Dantzig-Wolfe Decomposition", 1997).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceKey
from graphplan.passes.evaluate import Evaluation
from graphplan.passes.intervals import intervals
from graphplan.passes.master import Box, Column, Limit, Mixture, mix_columns, mix_fractions
from graphplan.passes.pricing import Effort, Prices, Pricing
from graphplan.passes.shares import Shares

__all__ = ["ColumnGeneration"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_SMOOTHING = 0.6
_WIDTH = 0.3  # of typical prices that those of a round may differ from the best known ones
_NARROWER, _NARROWEST = 0.7, 0.01  # times that after a round in vain, and the least
_WIDER = 3.0  # times that, where nothing better is in between
_MASTER = 60_000  # numbers that a knapsack could touch while the master problem prices one column
_GROUPS = 50  # from which the master problem takes longer
_TOLERANCE = 1e-6
_STALLED = 3  # rounds in which less than all knapsacks must raise the bound, ...
_STALL = {Effort.ROUGH: 1e-3, Effort.QUICK: 2e-4, Effort.WHOLE: 0.0}  # ... and by how much
_PROOF = 2.0  # rounds that one in double precision takes
_CHEAP = 0.5  # of a round's work that one with less effort may take
# share by which further rounds may raise the bound, for which none are worth it
_NEAR = {Effort.ROUGH: 3e-3, Effort.QUICK: 3e-4, Effort.WHOLE: 3e-4}


class ColumnGeneration:
    """Bounds a problem from below, round by round.

    Args:
        pricing: the knapsacks.
        known: placements whose shares are columns.
        prices: to begin with, where good ones are known.

    Attributes:
        bound: seconds that no placement can go below; grows.
        columns: the shares found.
        rounds: how many times the knapsacks were solved.
        converged: whether further rounds would not raise the bound.
        futile: whether known columns mix to less than what has been proven otherwise.
        mixture: of the columns, as the master problem has it.
        center: the prices of the best bound.
    """

    def __init__(
        self, pricing: Pricing, known: Sequence[Evaluation] = (), prices: Prices | None = None
    ) -> None:
        shares = pricing.shares
        self.pricing, self.shares = pricing, shares
        self.columns: list[Column] = []
        self._seen: set[bytes] = set()
        self.bound = 0.0
        self._guess = 0.0  # the bound in single precision
        self._proven = 0.0
        self._took: dict[Effort, float] = {}  # seconds of the last solution
        self._foreseen: dict[Effort, float] = {}  # what the first prices brought
        self.rounds = 0
        self.converged = self.futile = False
        self.gone = np.zeros(shares.units, dtype=bool)
        self.counts = shares.counts.copy()
        self.count_of = shares.count_of.copy()
        self.margin = np.zeros(len(shares.kinds))
        self.limits: tuple[Limit, ...] = ()
        self.mixture: Mixture | None = None
        for evaluation in known:
            self._add_known(evaluation)
        for kind, units in intervals(shares):
            taken, _ = shares.complete(units)
            if pricing.fits(kind, taken, np.zeros_like(taken), self.margin):
                self._add(kind, taken, np.zeros_like(taken))
        fractions = None if prices is not None else mix_fractions(shares)
        self.center = prices if fractions is None else fractions.prices
        self._width = _WIDTH
        self._typical = _typical_prices(shares)

    def _add_known(self, evaluation: Evaluation) -> None:
        assignment = evaluation.schedule.assignment
        for index, kind in enumerate(self.shares.kinds):
            for key in kind.keys:
                taken, aside = self.shares.share_of(assignment.operations, assignment.weights, key)
                self._add(index, taken, aside)

    def add_placement(self, devices: Mapping[int, DeviceKey]) -> None:
        """Make columns of a placement of units (item -> device)."""
        shares = self.shares
        for index, kind in enumerate(shares.kinds):
            for key in kind.keys:
                mine = np.array([devices[unit] == key for unit in range(shares.units)])
                if not mine.any():
                    continue
                taken, _ = shares.complete(mine)
                aside = np.zeros_like(taken)
                aside[shares.ties] = [devices.get(int(tie)) != key for tie in shares.ties]
                aside &= taken
                if self.pricing.fits(index, taken, aside, self.margin):
                    self._add(index, taken, aside)

    def borrow(self, other: ColumnGeneration) -> None:
        """Take over the columns of a problem with the same units and items, as far as they fit here."""
        keys = [set(kind.keys) for kind in self.shares.kinds]
        others = [set(kind.keys) for kind in other.shares.kinds]
        for column in other.columns:
            for kind, mine in enumerate(keys):
                fits = mine & others[column.kind] and self.pricing.fits(
                    kind, column.taken, column.aside, self.margin
                )
                if fits:
                    self._add(kind, column.taken, column.aside)

    def _add(self, kind: int, taken: Bools, aside: Bools) -> bool:
        key = bytes([kind]) + np.packbits(taken).tobytes() + np.packbits(aside).tobytes()
        if key in self._seen:
            return False
        self._seen.add(key)
        shares = self.shares
        clock = self.pricing.clock_seconds(kind, taken, aside)
        queue = self.pricing.queue_seconds(kind, taken, aside)
        if not np.isfinite(clock + queue):
            return False
        cover = np.bincount(shares.group[taken[: shares.units]], minlength=len(shares.counts))
        self.columns.append(Column(kind, taken, aside, cover, clock, queue))
        return True

    def run(self, *, enough: float, work: float, deadline: float | None = None, proven: float = 0.0) -> float:
        """Raise the bound.

        Args:
            enough: seconds of a bound that needs no improvement.
            work: numbers that the knapsacks may touch.
            deadline: ``time.monotonic()`` at which to stop, or None.
            proven: seconds of a bound that is known from elsewhere; who cannot pass it gives up.
        """
        self._proven = proven
        for effort in [] if self._guess else self._cheaper():
            if effort is Effort.QUICK or not self.rounds:
                work -= self.approach(enough=enough, work=0.7 * work, deadline=deadline, effort=effort)
        if deadline is not None and self.rounds and not self._guess and self._would_end(_PROOF) < deadline:
            # prices that cost little are near the best, mostly: what they prove is not left to the end
            self._guess = self._prove()
        tried = self.rounds
        self._go_on(enough, work, deadline, Effort.WHOLE)
        if self.futile:
            return self.bound
        hurried = self.rounds == tried and (deadline is None or self._would_end(_PROOF) < deadline)
        if self.center is not None and (self._guess > self.bound or (not self._guess and hurried)):
            self._prove()
        return self.bound

    def _prove(self) -> float:
        """The bound of the best prices, in double precision."""
        if self.center is None:
            return 0.0
        proven, _ = self._price(self.center, Effort.WHOLE, exact=True)
        self.bound = max(self.bound, proven)
        return proven

    def _cheaper(self) -> list[Effort]:
        """With what to begin: efforts that take much less than the next."""
        found, least = list[Effort](), _CHEAP * self.pricing.work(Effort.WHOLE)
        for effort in (Effort.QUICK, Effort.ROUGH):
            if effort is Effort.ROUGH and self.pricing.least_rough_work >= least:
                continue  # it is not worth making them
            if self.pricing.work(effort) < least:
                found.append(effort)
                least = _CHEAP * self.pricing.work(effort)
        return found[::-1]

    def _would_end(self, whole: float, cheaper: Effort = Effort.WHOLE) -> float:
        """When so many rounds with all effort, and one with less, would be over, by ``time.monotonic()``."""
        seconds = whole * self._round_seconds(Effort.WHOLE)
        if cheaper is not Effort.WHOLE:
            seconds += self._round_seconds(cheaper)
        return time.monotonic() + seconds

    def _round_seconds(self, effort: Effort) -> float:
        """What solving the knapsacks takes: as the last time, or as another effort took for its work."""
        if effort in self._took or not self._took:
            return self._took.get(effort, 0.0)
        other, took = next(reversed(self._took.items()))
        return took * self.pricing.work(effort) / self.pricing.work(other)

    def foresee(self, rounds: int) -> float:
        """Numbers that so many rounds and a proof would touch, judged by one with the least effort."""
        first, *others = self._cheaper() or [Effort.WHOLE]
        if self.center is not None:
            guess, _ = self._price(self.center, first)
            self._foreseen[first] = guess
            if first is Effort.WHOLE:
                self._guess = guess
        last = others[-1] if others else first
        return float(rounds * self.pricing.work(last) + _PROOF * self.pricing.work(Effort.WHOLE))

    def approach(
        self, *, enough: float, work: float, deadline: float | None = None, effort: Effort = Effort.ROUGH
    ) -> float:
        """Find shares and prices with less than all knapsacks: much faster, and no proof.

        Takes what :meth:`run` takes; returns the work that was done.
        """
        done = self._go_on(enough, work, deadline, effort)
        self._guess, self.converged = 0.0, False
        return done

    def _go_on(self, enough: float, work: float, deadline: float | None, effort: Effort) -> float:
        """Round by round; the work that was done."""
        done, smoothing, took = 0.0, _SMOOTHING, 0.0
        guesses: list[float] = []
        self._guess = self._guess or self._foreseen.pop(effort, 0.0)
        while (done < work or not done) and self._guess < enough and not self.converged:
            begun = time.monotonic()
            whole = _PROOF + (effort is Effort.WHOLE)  # rounds: there is a proof to come
            if deadline is not None and self._would_end(whole, effort) + took > deadline:
                break
            done += _MASTER * len(self.columns) * max(1.0, len(self.counts) / _GROUPS)
            mixture = self._mix_near()
            known = (1 + _TOLERANCE) * self._proven
            self.futile = mixture is not None and mixture.covers and mixture.seconds <= known
            if mixture is None or self.futile:
                break
            self.rounds += 1
            if self.center is None:
                tried = mixture.prices
            else:  # nothing is known of prices from elsewhere before they are tried
                tried = _blend(self.center, mixture.prices, smoothing if self._guess else 1.0)
            bound, fresh = self._price(tried, effort)
            done += self.pricing.work(effort)
            raised = bound > self._guess
            if raised or self.center is None:
                self.center, self._guess = tried, bound
            elif self._width > _NARROWEST:
                self._width *= _NARROWER
            close = mixture.seconds - self._guess < _NEAR[effort] * mixture.seconds
            ended = close or (not fresh and not smoothing)
            if ended and not mixture.covers:  # the best prices of the box are not the best ones
                self._width *= _WIDER
            self.converged = ended and mixture.covers
            guesses.append(self._guess)
            if len(guesses) > _STALLED and self._guess < (1 + _STALL[effort]) * guesses[-1 - _STALLED]:
                break
            smoothing = _SMOOTHING if fresh or raised else 0.0
            took = time.monotonic() - begun
        return done

    def mix(self) -> Mixture | None:
        """Solve the master problem of the columns known by now."""
        self.mixture = mix_columns(self.shares, self.columns, self.counts, self.count_of, self.limits)
        return self.mixture

    def _mix_near(self) -> Mixture | None:
        """The same with prices near those of the best bound, where there are any."""
        if self.center is None or self.limits:
            return self.mix()
        box = Box(self.center.cover, self._width * self._typical)
        return mix_columns(self.shares, self.columns, self.counts, self.count_of, self.limits, box)

    def _price(self, prices: Prices, effort: Effort, *, exact: bool = False) -> tuple[float, bool]:
        """The bound at these prices (none with less than all effort), and whether they brought columns."""
        shares = self.shares
        begun = time.monotonic()
        chosen = self.pricing.best(prices, self.gone, self.margin, effort, exact=exact)
        if not exact:
            self._took[effort] = time.monotonic() - begun
        least = np.zeros(len(shares.kinds))
        fresh = False
        for row, kind in enumerate(self.pricing.kinds(effort)):
            if not np.isfinite(chosen.cost[row]):
                continue
            if chosen.cost[row] < -_TOLERANCE * max(self._guess, 1e-12):
                taken, aside = chosen.taken[row], chosen.aside[row]
                if effort is not Effort.ROUGH or self.pricing.fits(int(kind), taken, aside, self.margin):
                    fresh |= self._add(int(kind), taken, aside)
            least[kind] = min(least[kind], chosen.cost[row])
        value = float(prices.cover @ self.counts) - float(prices.unique.sum()) + prices.constant
        return value + float(self.count_of @ least), fresh

    # -- parts of the problem ---------------------------------------------------------------------

    def fix(self, column: Column) -> ColumnGeneration:
        """The problem that is left when a device has this share."""
        rest = self._copy()
        units = self.shares.units
        rest.gone = self.gone | column.taken[:units]
        rest.counts = self.counts - column.cover
        rest.count_of = self.count_of.copy()
        rest.count_of[column.kind] -= 1
        rest.limits = tuple(
            replace(limit, count=limit.count - int(column.cover[limit.group]))
            if limit.kind == column.kind
            else limit
            for limit in self.limits
        )
        rest.columns = [
            c for c in self.columns if rest.count_of[c.kind] and not (c.taken[:units] & rest.gone).any()
        ]
        return rest

    def with_margin(self, margin: Floats) -> ColumnGeneration:
        """The problem in which shares leave so many bytes (per kind) free beyond what they must."""
        rest = self._copy()
        rest.margin = margin
        room = self.shares.room - margin
        rest.columns = [c for c in self.columns if self.shares.kept_bytes(c.taken, c.aside) <= room[c.kind]]
        return rest

    def with_limit(self, limit: Limit) -> ColumnGeneration:
        """The problem in which a kind of device runs no more, or no fewer, units of a group."""
        rest = self._copy()
        rest.limits = (*self.limits, limit)
        rest.bound = self.bound
        return rest

    def _copy(self) -> ColumnGeneration:
        rest = copy.copy(self)
        rest.columns, rest._seen = list(self.columns), set(self._seen)
        rest.bound, rest._guess, rest.converged = 0.0, 0.0, False
        rest._foreseen = {}
        return rest


def _typical_prices(shares: Shares) -> Floats:
    """(groups,) seconds that differ by as much as prices may: those on the slowest kind of device."""
    first = np.unique(shares.group, return_index=True)[1]
    clock = shares.clock[:, first]
    seconds = np.where(np.isfinite(clock), clock, 0.0).max(axis=0)
    return np.asarray(np.maximum(seconds, seconds.mean()), dtype=float)


def _blend(a: Prices, b: Prices, share: float) -> Prices:
    """``share`` of the first and the rest of the second."""
    rest = 1.0 - share
    return Prices(
        share * a.cover + rest * b.cover,
        share * a.compute + rest * b.compute,
        share * a.copies + rest * b.copies,
        share * a.unique + rest * b.unique,
        share * a.limited + rest * b.limited,
        share * a.constant + rest * b.constant,
    )
