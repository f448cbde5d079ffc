"""What is left to pay where weights are streamed, when bytes and seconds of copying have prices.

A copy queue is ahead of the clock by what it has copied for operations that are still to come, and by no
more than its ring holds: its *lead*, in seconds. An operation whose weights are brought takes their seconds
off the lead, and waits where they are more; all other seconds add to it, up to the last copy. Give bytes that
are kept a price instead of a limit, and seconds of the lead one instead of a clock (Lagrange): then the
fastest way from each state of the frontier to the end is found backwards, moves between devices included, and
is a lower bound. The prices whose bound is highest are found by cutting planes (Kelley, 1960).

A *case* says how large the rings are, and what operations may need beside weights, from one size to another:
the lower one takes memory, the upper one gives room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from graphplan.device import DeviceKey
from graphplan.passes.frontier import Frontier
from graphplan.passes.lead_lengths import Lengths
from graphplan.passes.shares import Shares
from graphplan.passes.states import Stage, make_stages
from graphplan.passes.ways import Choice, Choices, Ways

__all__ = ["Case", "Guide", "Leads", "Prices", "Rest"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_STATES = 300  # between two steps, times devices: values that cost less to move are not followed
_ACCURACY = 5e-4  # share of the bound that better prices could add, for which none are looked for
_DEAREST = 50.0  # price of the bytes that a link copies in a second, in seconds
_FIRST = 0.4  # the same, to begin with; as much as one queue's seconds are worth


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes that are looked at together: from the first up to below the second, for each accelerator.

    Attributes:
        rings: bytes.
        needs: bytes beside weights that the neediest operation there takes.
    """

    rings: tuple[tuple[float, float], ...]
    needs: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """What memory and time are worth.

    Attributes:
        nbytes: (accelerators,) seconds per byte that is kept.
        copying: (accelerators,) seconds per second of a lead; no more than one in all.
    """

    nbytes: Floats
    copying: Floats


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left to pay.

    Attributes:
        bound: seconds that no placement of the case goes below; infinite where there is none.
        prices: at which.
        over: (accelerators,) bytes that the cheapest way keeps beyond those that there is room for.
        late: (accelerators,) seconds of copies in it beyond those that there is time for.
        seconds: before each step and after the last, (states,) to the end, with priced bytes, without leads.
        worth: (steps + 1, accelerators) seconds per second of a lead before each step.
    """

    bound: float
    prices: Prices
    over: Floats
    late: Floats
    seconds: tuple[Floats, ...] = ()
    worth: Floats | None = None

    def promise(self, step: int, state: Ints, seconds: Floats, lead: Floats) -> Floats:
        """(labels,) seconds at the end at least, with priced bytes, of what has come as far as before a step.

        Args:
            step: that comes next.
            state: (labels,) indices among the states before it.
            seconds: (labels,) so far, with priced bytes.
            lead: (accelerators, labels) seconds.
        """
        assert self.worth is not None
        return np.asarray(seconds - self.worth[step] @ lead + self.seconds[step][state])


@dataclass(frozen=True, slots=True)
class _Table:
    """The choices of a step in a case, as arrays.

    Attributes:
        onward: (choices, states before) index of the state after.
        moves: (choices, states before) seconds of moves, infinite where it may not be.
        during: (accelerators, choices, states before) seconds of these in which leads grow.
        run: (choices,) seconds.
        kept: (choices, accelerators) bytes of weights that stay.
        late: (choices, accelerators) seconds of copies, less those that leads gain while it runs.
    """

    onward: Ints
    moves: Floats
    during: Floats
    run: Floats
    kept: Floats
    late: Floats

    def paid(self, prices: Floats, worth: Floats) -> Floats:
        """(choices, states) seconds with prices of bytes and of leads."""
        alone = self.run + self.kept @ prices + self.late @ worth
        return np.asarray(self.moves + alone[:, None] - np.tensordot(worth, self.during, 1))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A case, for several prices.

    Attributes:
        case: what is looked at.
        tables: (steps,) one for those that are alike; none where there is no way.
        last: the last step that copies anything.
    """

    case: Case
    tables: list[_Table]
    last: int


class Leads:
    """The steps of a problem with streaming, and ways to run each.

    Args:
        shares: costs and sizes; weights that only one unit reads belong to it (``offload`` is False).

    Attributes:
        frontier: of the shares.
        rows: devices of the frontier that are accelerators.
        bandwidth: (accelerators,) of the links that weights come by, in bytes per second.
        room: (accelerators,) bytes.
        spare: seconds of operations that belong together and are spread over the order: copies may be made
            beside them at any time.
        stages: one for each step.
        choices: (steps,) where a step may run, and what of its weights may be brought.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares, self.frontier = shares, Frontier(shares)
        topology, devices = shares.topology, self.frontier.devices
        assert shares.cpu is not None
        self.rows = [d for d, key in enumerate(devices) if topology[key].is_accelerator]
        links = [topology.link(shares.cpu.key, devices[d]) for d in self.rows]
        self.bandwidth = np.array([link.bandwidth for link in links])
        self.room = self.frontier.room[self.rows]
        self.stages = self._make_stages()
        ways = Ways(self.frontier, self.rows, links)
        self.spare = ways.spare
        known: dict[Choices, Choices] = {}
        made = [ways.choices(step.variable) for step in self.frontier.steps]
        self.choices = [known.setdefault(choices, choices) for choices in made]
        self._lengths = Lengths(ways, self.choices)
        self._known: _Prepared | None = None

    def _make_stages(self) -> list[Stage]:
        frontier = self.frontier
        # where a weight lives that several units read is left open, and costs nothing
        shared = [step.variable for step in frontier.steps if step.variable >= self.shares.units]
        twins = len(set(frontier.alike.tolist())) < frontier.count
        unused = (1 << 2 * frontier.count) - (1 << frontier.count if twins else 1)
        return make_stages(frontier, alike=True, free=shared, most=_STATES, unused=unused)

    # -- sizes -----------------------------------------------------------------------------------

    @property
    def held(self) -> list[float]:
        """Bytes that a ring may have to hold at once, in growing order."""
        return self._lengths.held

    @property
    def copied(self) -> float:
        """Bytes of all copies that there can be, about, and no fewer."""
        return self._lengths.copied

    def needs(self, row: int) -> list[float]:
        """Bytes beside weights that operations may need on an accelerator, in growing order."""
        return sorted({c.need for choices in set(self.choices) for c in choices if c.row == row})

    @property
    def keys(self) -> list[DeviceKey]:
        """Of the accelerators."""
        return [self.frontier.devices[d] for d in self.rows]

    # -- one case ---------------------------------------------------------------------------------

    def capacity(self, case: Case) -> Floats:
        """(accelerators,) bytes for weights at most; negative where there is no way."""
        taken = [ring[0] + need[0] for ring, need in zip(case.rings, case.needs, strict=True)]
        return np.asarray(self.room - np.array(taken))

    def allowed(self, case: Case) -> list[Choices]:
        """(steps,) what may be done in a case."""
        capacity, known = self.capacity(case), dict[Choices, Choices]()

        def may(c: Choice) -> bool:
            if c.row < 0:
                return True
            fits = c.held < case.rings[c.row][1] and c.need < case.needs[c.row][1]
            return bool(fits and c.kept <= capacity[c.row])

        for choices in self.choices:
            if choices not in known:
                known[choices] = tuple(c for c in choices if may(c))
        return [known[choices] for choices in self.choices]

    def ahead(self, case: Case) -> Floats:
        """(accelerators,) seconds of a lead at most."""
        return self._lengths.most([high for _, high in case.rings])

    def ahead_beside(self, choice: Choice, ahead: Floats) -> Floats:
        """(accelerators,) the same while an operation runs whose weights are in the ring."""
        return self._lengths.beside(choice, ahead)

    def price(self, case: Case, prices: Prices) -> Rest:
        """What is left to pay at these prices."""
        prepared, capacity = self._prepare(case), self.capacity(case)
        if not prepared.tables:
            return Rest(np.inf, prices, np.zeros(len(self.rows)), np.zeros(len(self.rows)))
        worth = np.zeros((len(self.stages) + 1, len(self.rows)))
        worth[: prepared.last + 1] = prices.copying
        known: dict[tuple[int, bool], Floats] = {}
        rest, chosen = [np.zeros(len(self.stages[-1].states))], list[Ints]()
        for i in range(len(prepared.tables) - 1, -1, -1):
            table, key = prepared.tables[i], (id(prepared.tables[i]), i <= prepared.last)
            if key not in known:
                known[key] = table.paid(prices.nbytes, worth[i])
            each = known[key] + rest[-1][table.onward]
            best = each.argmin(axis=0)
            rest.append(each[best, np.arange(len(best))])
            chosen.append(best)
        rest.reverse()
        kept, late = self._follow(prepared, chosen[::-1])
        bound = float(rest[0][0] - prices.nbytes @ capacity - worth[0].sum() * self.spare)
        return Rest(bound, prices, kept - capacity, late, tuple(rest), worth)

    def _prepare(self, case: Case) -> _Prepared:
        """Tables of a case; those of the last one are remembered."""
        if self._known is None or self._known.case != case:
            allowed, tables = self.allowed(case), dict[tuple[int, int], _Table]()
            possible = (self.capacity(case) >= 0).all() and all(allowed)
            for stage, choices in zip(self.stages, allowed, strict=True) if possible else ():
                key = id(stage), id(choices)
                if key not in tables:
                    tables[key] = self._table(stage, choices, self.ahead(case))
            each = (
                [tables[id(s), id(c)] for s, c in zip(self.stages, allowed, strict=True)] if possible else []
            )
            self._known = _Prepared(case, each, _last_copy(allowed))
        return self._known

    def _table(self, stage: Stage, choices: Choices, ahead: Floats) -> _Table:
        devices, run = [c.device for c in choices], np.array([c.run for c in choices])
        moves = stage.seconds[devices] - run[:, None]
        during = np.minimum(moves[None], ahead[:, None, None])
        kept = np.zeros((len(choices), len(self.rows)))
        late = -np.array([self._lengths.gained(c, ahead) for c in choices])
        for index, c in enumerate(choices):
            if c.row >= 0:
                kept[index, c.row] = c.kept
                late[index, c.row] += c.copying
        return _Table(stage.onward[devices].astype(np.int64), moves, during, run, kept, late)

    def _follow(self, prepared: _Prepared, chosen: Sequence[Ints]) -> tuple[Floats, Floats]:
        """Bytes kept, and seconds of copies less those that there is time for, on the cheapest way."""
        kept, late, state = np.zeros(len(self.rows)), np.full(len(self.rows), -self.spare), 0
        for i, (table, best) in enumerate(zip(prepared.tables, chosen, strict=True)):
            index = best[state]
            kept += table.kept[index]
            if i <= prepared.last:
                late += table.late[index]
                late -= table.during[:, index, state]
            state = table.onward[index, state]
        return kept, late

    # -- the best prices --------------------------------------------------------------------------

    def highest(
        self, case: Case, near: Prices | None = None, *, enough: float = np.inf, rounds: int = 15
    ) -> Rest:
        """What is left to pay at the prices whose bound is highest.

        Args:
            case: what is looked at.
            near: prices to begin with.
            enough: a bound that needs no improvement.
            rounds: prices to try at most.
        """
        count = len(self.rows)
        best = self.price(case, near or self.first_prices())
        rests = [best]
        while len(rests) < rounds and best.bound < enough:
            above, proposed = self._propose(rests)
            if above - best.bound < _ACCURACY * best.bound:
                break
            own = np.concatenate([best.prices.nbytes * self.bandwidth, best.prices.copying])
            between = (own + proposed) / 2
            found = self.price(case, Prices(between[:count] / self.bandwidth, between[count:]))
            rests.append(found)
            if found.bound > best.bound:
                best = found
        return best

    def first_prices(self) -> Prices:
        """Prices to begin with."""
        count = len(self.rows)
        even = np.full(count, min(_FIRST, 0.9 / count))
        return Prices(even / self.bandwidth, even)

    def _propose(self, rests: Sequence[Rest]) -> tuple[float, Floats]:
        """The highest bound that is still possible, and its prices: of bytes by the bandwidth, of leads."""
        count, scale = len(self.rows), max(abs(rest.bound) for rest in rests)
        slopes = np.array([np.concatenate([rest.over / self.bandwidth, rest.late]) for rest in rests])
        points = [np.concatenate([r.prices.nbytes * self.bandwidth, r.prices.copying]) for r in rests]
        at = np.array([r.bound for r in rests]) - (slopes * np.array(points)).sum(axis=1)
        cuts = np.hstack([np.ones((len(rests), 1)), -slopes / scale])
        once = np.concatenate([[0.0], np.zeros(count), np.ones(count)])
        found = linprog(
            [-1.0, *[0.0] * (2 * count)],
            A_ub=np.vstack([cuts, once]),
            b_ub=np.concatenate([at / scale, [1.0]]),
            bounds=[(None, 1e3), *[(0.0, _DEAREST)] * count, *[(0.0, 1.0)] * count],
            method="highs",
        )
        return -float(found.fun) * scale, np.asarray(found.x[1:])


@dataclass(frozen=True, slots=True)
class Guide:
    """What a search over the same frontier is told of the rest.

    Attributes:
        leads: whose stages are those of the search.
        rest: of the case that is searched.
        capacity: (accelerators,) bytes for weights in it.
    """

    leads: Leads
    rest: Rest
    capacity: Floats

    def promise(self, step: int, states: Ints, clock: Floats, lead: Floats, kept: Floats) -> Floats:
        """(labels,) seconds at the end at least, of what has come as far as before a step.

        Args:
            step: that comes next.
            states: (labels,) of the frontier.
            clock: (labels,) seconds so far.
            lead: (devices, labels) seconds.
            kept: (devices, labels) bytes of weights so far.
        """
        rows, price = self.leads.rows, self.rest.prices.nbytes
        index = self.leads.stages[step - 1].find(states)
        paid = clock + price @ kept[rows] - float(price @ self.capacity)
        return self.rest.promise(step, index, paid, lead[rows])


def _last_copy(allowed: Sequence[Choices]) -> int:
    """The last step that copies anything: what a lead gains after it is worth nothing."""
    copies = (i for i, choices in enumerate(allowed) if any(c.copying for c in choices))
    return max(copies, default=-1)
