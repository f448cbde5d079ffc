"""A lower bound where weights are streamed, operation by operation, on the clock and on the copy queues.

A copy queue is ahead of the clock by what it has copied for operations that are still to come, and by no more
than its ring holds: its *lead*, in seconds. An operation whose weights are brought takes their seconds off the
lead, and waits where they are more; all others give it time. A label is a way to place the operations so far:
its state (see ``frontier``), the seconds, and the leads. Bytes that are kept have a price instead of a limit
(Lagrange), and a *case* says how large the rings are, and what operations may need beside weights, from one
size to another: the lower one takes memory, the upper one gives room. What is left to pay bounds what a label
can become: the fastest way to the end where seconds of copying have a price too.

Where there are too many labels, of those that differ little one stands for the others: as much faster as makes
it at least as good as any of them. So the bound stays one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from graphplan.device import CPU
from graphplan.graph import Graph
from graphplan.passes.frontier import Frontier
from graphplan.passes.segments import SMALL
from graphplan.passes.shares import Shares
from graphplan.passes.states import Stage, make_stages

__all__ = ["Case", "Leads", "Priced"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_CHOICES = 6  # of parts of an operation's weights that may be brought
_FINEST = 1e-9  # seconds of a lead that are not told apart, of the whole call
_COARSER = 1.4  # times as much in the next try


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of rings and of needs that are looked at together; from the first up to below the second.

    Attributes:
        rings: for each accelerator, bytes.
        needs: for each accelerator, bytes beside weights that the neediest operation there takes.
    """

    rings: tuple[tuple[float, float], ...]
    needs: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Priced:
    """A bound, at certain prices.

    Attributes:
        seconds: that no placement of the case goes below.
        over: (accelerators,) bytes that the cheapest way keeps beyond what there is room for.
        late: (accelerators,) seconds of copies in it beyond those that there is time for.
        labels: how many were made.
    """

    seconds: float
    over: Floats
    late: Floats
    labels: int = 0


@dataclass(frozen=True, slots=True)
class _Choice:
    """A way to run a step.

    Attributes:
        device: of the frontier.
        row: of the accelerator; -1 for the CPU.
        run: seconds.
        copying: seconds of the copies that it waits for.
        held: bytes of these.
        kept: bytes of weights that stay.
        need: bytes beside weights.
    """

    device: int
    row: int
    run: float
    copying: float
    held: float
    kept: float
    need: float


class Leads:
    """The bound over one frontier.

    Args:
        shares: of a problem with streaming.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares, self.frontier = shares, Frontier(shares)
        topology = shares.topology
        assert shares.cpu is not None
        devices = self.frontier.devices
        self.rows = [d for d, key in enumerate(devices) if topology[key].is_accelerator]
        links = [topology.link(shares.cpu.key, devices[d]) for d in self.rows]
        self.bandwidth = np.array([link.bandwidth for link in links])
        self.latency = np.array([link.latency for link in links])
        self.room = self.frontier.room[self.rows]
        shared = [step.variable for step in self.frontier.steps if step.variable >= shares.units]
        self.stages = make_stages(self.frontier, alike=True, free=shared)
        self.choices = [self._choices(step.variable) for step in self.frontier.steps]

    # -- what a step may do -----------------------------------------------------------------------

    def _choices(self, variable: int) -> list[_Choice]:
        shares, frontier = self.shares, self.frontier
        if variable >= shares.units:  # where it lives is left open, and costs nothing
            return [_Choice(0, -1, 0.0, 0.0, 0.0, 0.0, 0.0)]
        found = []
        for d in range(frontier.count):
            row = self.rows.index(d) if d in self.rows else -1
            kind = int(frontier.alike[d])
            run, fixed = float(shares.clock[kind, variable]), float(shares.queue[kind, variable])
            if not np.isfinite(run + fixed):
                continue
            if row < 0:
                found.append(_Choice(d, row, run, 0.0, 0.0, 0.0, 0.0))
                continue
            need = float(shares.working[kind, variable])
            for brought, held, kept in self._parts(variable):
                small = SMALL * self.latency[row] * self.bandwidth[row]
                late = self.latency[row] * brought / max(brought, small)
                copying = fixed + brought / self.bandwidth[row] + late
                held_in_all = held + fixed * self.bandwidth[row]
                found.append(_Choice(d, row, run, float(copying), float(held_in_all), kept, need))
        return found

    def _parts(self, variable: int) -> list[tuple[float, float, float]]:
        """Bytes copied, bytes held meanwhile, and bytes kept, for each part of a unit's weights."""
        shares = self.shares
        sizes = _streamed_sizes(shares.graph, shares, variable)
        total = float(shares.nbytes[variable]) - _fetched_bytes(shares.graph, shares, variable)
        sums = {(0, 0)}
        for size, padded in sizes:
            sums |= {(nbytes + size, taken + padded) for nbytes, taken in sums}
        ordered = sorted(sums)
        groups = [g.tolist() for g in np.array_split(np.array(ordered), min(len(ordered), _MOST_CHOICES))]
        # the first of those alike is copied, the last of them is not kept
        return [(group[0][0], group[0][0], max(0.0, total - max(g[1] for g in group))) for group in groups]

    @property
    def held(self) -> list[float]:
        """Bytes that rings may have to hold at once, in growing order."""
        return sorted({c.held for choices in self.choices for c in choices if c.held})

    @property
    def copied(self) -> float:
        """Bytes of all copies that there can be."""
        return sum(max((c.held for c in choices), default=0.0) for choices in self.choices)

    def needs(self, row: int) -> list[float]:
        """Bytes beside weights that operations may need on an accelerator, in growing order."""
        return sorted({c.need for choices in self.choices for c in choices if c.row == row})

    # -- one case ---------------------------------------------------------------------------------

    def capacity(self, case: Case) -> Floats:
        """(accelerators,) bytes for weights at most; negative where there is no way."""
        taken = [ring[0] + need[0] for ring, need in zip(case.rings, case.needs, strict=True)]
        return np.asarray(self.room - np.array(taken))

    def _allowed(self, case: Case) -> list[list[_Choice]]:
        """(steps,) what may be done in this case."""
        capacity = self.capacity(case)

        def may(c: _Choice) -> bool:
            if c.row < 0:
                return True
            fits = c.held < case.rings[c.row][1] and c.need < case.needs[c.row][1]
            return fits and c.kept <= capacity[c.row]

        return [[c for c in choices if may(c)] for choices in self.choices]

    def _ahead(self, case: Case) -> Floats:
        """(accelerators,) seconds that a queue may be ahead at most: what is in a ring has paid for its latency."""
        high = np.array([min(ring[1], self.copied) for ring in case.rings])
        return np.asarray(high / self.bandwidth * (1 + 1 / SMALL))

    def price(self, case: Case, prices: Floats, copying: Floats) -> tuple[Priced, list[Floats]]:
        """A bound without leads, and what is left to pay from each state.

        Args:
            case: what is looked at.
            prices: (accelerators,) seconds per byte.
            copying: (accelerators,) seconds per second of copies; no more than one in all.

        Returns:
            The bound; and, before each step and after the last, (states,) seconds to the end, where each second of
            a lead is worth as much as ``copying`` says.
        """
        capacity, ahead = self.capacity(case), self._ahead(case)
        allowed = self._allowed(case)
        if (capacity < 0).any() or not all(allowed):
            return Priced(np.inf, capacity * 0, capacity * 0), []
        rest = [np.zeros(len(self.stages[-1].states))]
        for stage, choices in zip(reversed(self.stages), reversed(allowed), strict=True):
            best = np.full(stage.seconds.shape[1], np.inf)
            for c in choices:
                np.minimum(best, self._paid(stage, c, prices, copying, ahead) + rest[-1][stage.onward[c.device]], out=best)
            rest.append(best)
        rest.reverse()
        seconds = float(rest[0][0] - prices @ capacity)
        kept, late = self._follow(allowed, rest, prices, copying, ahead)
        return Priced(seconds, kept - capacity, late), rest

    def _paid(self, stage: Stage, c: _Choice, prices: Floats, copying: Floats, ahead: Floats) -> Floats:
        """(states,) seconds of a choice, with prices, less what the leads gain meanwhile."""
        if stage.seconds.shape[0] == 0:
            raise AssertionError
        seconds = stage.seconds[c.device]
        moves = seconds - c.run
        gained = np.minimum(ahead[:, None], moves[None, :])
        free = ahead.copy()
        paid = 0.0
        if c.row >= 0:
            free[c.row] = max(0.0, ahead[c.row] - c.held / self.bandwidth[c.row])
            paid = prices[c.row] * c.kept + copying[c.row] * c.copying
        return np.asarray(seconds + paid - copying @ (gained + np.minimum(free, c.run)[:, None]))

    def _follow(
        self, allowed: list[list[_Choice]], rest: list[Floats], prices: Floats, copying: Floats, ahead: Floats
    ) -> tuple[Floats, Floats]:
        """Bytes kept, and seconds of copies less those that there is time for, on the cheapest way."""
        kept, late, state = np.zeros(len(self.rows)), np.zeros(len(self.rows)), 0
        for stage, choices, after in zip(self.stages, allowed, rest[1:], strict=True):
            paid = [
                self._paid(stage, c, prices, copying, ahead)[state] + after[stage.onward[c.device, state]]
                for c in choices
            ]
            c = choices[int(np.argmin(paid))]
            moves = float(stage.seconds[c.device, state]) - c.run
            free = ahead.copy()
            if c.row >= 0:
                kept[c.row] += c.kept
                late[c.row] += c.copying
                free[c.row] = max(0.0, ahead[c.row] - c.held / self.bandwidth[c.row])
            late -= np.minimum(ahead, moves) + np.minimum(free, c.run)
            state = int(stage.onward[c.device, state])
        return kept, late

    # -- labels -----------------------------------------------------------------------------------

    def search(
        self, case: Case, prices: Floats, copying: Floats, rest: list[Floats], *, below: float, width: int
    ) -> Priced:
        """The bound with leads; ``below`` where it is higher than that.

        Args:
            case: what is looked at.
            prices: (accelerators,) seconds per byte.
            copying: (accelerators,) seconds per second of copies, as ``rest`` has them.
            rest: what is left to pay, of ``price``.
            below: seconds that need not be passed.
            width: labels that go on from a step at most.
        """
        ahead, count = self._ahead(case), len(self.rows)
        least = below + float(prices @ self.capacity(case))
        batch = _Batch(np.zeros(1, dtype=np.int64), np.zeros(1), np.zeros((count, 1)), np.zeros((count, 1)))
        made = 0
        for stage, choices, after in zip(self.stages, self._allowed(case), rest[1:], strict=True):
            parts = [self._place(batch, stage, c, prices, ahead) for c in choices]
            batch = _Batch(*(np.concatenate([getattr(p, n) for p in parts], axis=-1) for n in _Batch.__slots__))
            promise = batch.seconds - copying @ batch.lead + after[batch.state]
            batch = batch.of(np.nonzero(promise < least)[0])
            made += len(batch.state)
            if not len(batch.state):
                return Priced(below, np.zeros(count), np.zeros(count), made)
            batch = _fewer(batch, width, _FINEST * below)
        best = int(batch.seconds.argmin())
        seconds = float(batch.seconds[best] - prices @ self.capacity(case))
        return Priced(seconds, batch.kept[:, best] - self.capacity(case), np.zeros(count), made)

    def _place(self, batch: _Batch, stage: Stage, c: _Choice, prices: Floats, ahead: Floats) -> _Batch:
        """All labels with one choice."""
        seconds = stage.seconds[c.device, batch.state]
        moves = seconds - c.run
        lead = np.minimum(batch.lead + moves, ahead[:, None])
        kept, free, wait = batch.kept, ahead, 0.0
        paid = 0.0
        if c.row >= 0:
            paid = prices[c.row] * c.kept
            kept = kept.copy()
            kept[c.row] += c.kept
        if c.copying:
            wait = np.maximum(c.copying - lead[c.row], 0.0)
            lead += wait
            lead[c.row] -= c.copying
            free = ahead.copy()
            free[c.row] = max(0.0, ahead[c.row] - c.held / self.bandwidth[c.row])
        lead = np.minimum(lead + c.run, free[:, None])
        state = stage.onward[c.device, batch.state].astype(np.int64)
        return _Batch(state, batch.seconds + seconds + wait + paid, lead, kept)


@dataclass(slots=True)
class _Batch:
    """Labels after a step; the last axis of every array is theirs."""

    state: Ints
    seconds: Floats  # with priced bytes
    lead: Floats  # (accelerators,)
    kept: Floats  # (accelerators,) bytes

    def of(self, chosen: Ints) -> _Batch:
        """Some of them."""
        return _Batch(self.state[chosen], self.seconds[chosen], self.lead[:, chosen], self.kept[:, chosen])


def _fewer(batch: _Batch, width: int, finest: float) -> _Batch:
    """Labels of which none is as good as another, and no more of them than that."""
    if batch.lead.shape[0] == 1:
        return _thin(batch, width, finest)
    return _in_cells(batch, width, finest)


def _thin(batch: _Batch, width: int, finest: float) -> _Batch:
    """With one lead, which waiting makes longer: those that are faster than any other that waits as long."""
    order = np.lexsort((batch.seconds, batch.state))
    state, early = batch.state[order], (batch.seconds - batch.lead[0])[order]
    first = np.concatenate([[True], state[1:] != state[:-1]])
    # the earliest so far of the same state, which are kept apart by as much as all differ
    apart = np.cumsum(first) * (early.max() - early.min() + 1.0)
    earliest = np.minimum.accumulate(early - apart)
    better = np.concatenate([[True], earliest[1:] < earliest[:-1]])
    order, early, first = order[better], early[better], np.cumsum(first)[better]
    if len(order) <= width:
        return batch.of(order)
    fresh = np.concatenate([[True], first[1:] != first[:-1]])
    step = finest
    while True:
        level = np.floor(early / step)
        stays = fresh | np.concatenate([[True], level[1:] < level[:-1]])
        if stays.sum() <= max(width, fresh.sum()):
            break
        step *= _COARSER
    rows = np.nonzero(stays)[0]
    last = np.concatenate([rows[1:] - 1, [len(early) - 1]])
    found = batch.of(order[rows])
    found.seconds = found.seconds - (early[rows] - early[last])
    return found


def _in_cells(batch: _Batch, width: int, finest: float) -> _Batch:
    """With several leads: one label of those whose leads are about the same."""
    step = finest
    while True:
        cells = np.floor(batch.lead / step).astype(np.int64)
        key = batch.state
        for row in cells:
            key = key * (int(row.max()) + 2) + row
        order = np.lexsort((batch.seconds, key))
        first = np.concatenate([[True], key[order][1:] != key[order][:-1]])
        if first.sum() <= width or step > 1.0:
            break
        step *= _COARSER
    starts = np.nonzero(first)[0]
    of = np.cumsum(first) - 1
    seconds, lead = batch.seconds[order], batch.lead[:, order]
    best_seconds, best_lead = seconds[starts], lead[:, starts]
    # how long the first must wait to have the leads of another
    wait = np.maximum((lead - best_lead[:, of]).max(axis=0), 0.0)
    gain = np.maximum(best_seconds[of] + wait - seconds, 0.0)
    found = batch.of(order[starts])
    found.seconds = best_seconds - np.maximum.reduceat(gain, starts)
    return found.of(_not_dominated(found, step))


def _not_dominated(batch: _Batch, step: float) -> Ints:
    """With two leads, those that no other beats that is ahead in both by a cell."""
    if batch.lead.shape[0] != 2:
        return np.arange(len(batch.state))
    cells = np.floor(batch.lead / step).astype(np.int64)
    cells -= cells.min(axis=1)[:, None]
    shape = (int(batch.state.max()) + 1, *(int(c) + 2 for c in cells.max(axis=1)))
    best = np.full(shape, np.inf)
    best[batch.state, cells[0], cells[1]] = batch.seconds
    for axis in (1, 2):
        best = np.flip(np.minimum.accumulate(np.flip(best, axis), axis=axis), axis)
    return np.nonzero(best[batch.state, cells[0] + 1, cells[1] + 1] > batch.seconds)[0]


def _streamed_sizes(graph: Graph, shares: Shares, unit: int) -> list[tuple[int, int]]:
    """Bytes of each weight that only this unit reads and that may be streamed, and those it takes in a ring."""
    return [(n, _padded(n)) for name in _own_weights(graph, shares, unit) if (n := graph.weights[name].nbytes) and name in graph.streamable]


def _fetched_bytes(graph: Graph, shares: Shares, unit: int) -> float:
    """Bytes of weights that are copied one by one where they are not kept: they count for nothing here."""
    own = (graph.weights[name] for name in _own_weights(graph, shares, unit))
    return float(sum(_padded(w.nbytes) for w in own if w.fetchable and w.name not in graph.streamable))


def _own_weights(graph: Graph, shares: Shares, unit: int) -> list[str]:
    names = dict.fromkeys(name for m in shares.items[unit].members for name in graph.operations[m].inputs)
    weights = [n for n in names if n in graph.weights and n not in shares.problem.fixed_weights]
    return [n for n in weights if {shares.unit_of.get(r) for r in graph.consumers.get(n, ())} <= {unit, None}]


def _padded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512
