"""What is left of a call, as if operations could be divided: seconds from any moment to the end, from below.

At a moment, devices have so many bytes left and their clocks and copy queues stand where they stand. How the
operations that remain are best divided is a linear program, and each solution of its dual is a plane below
the seconds of all such moments (Benders, "Partitioning procedures for solving mixed-variables programming
problems", 1962). A few moments, full and empty, fast and late, give planes enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csr_array

__all__ = ["Fluid", "Planes", "Work"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MOMENTS = (0.0, 0.25, 0.5, 0.75, 0.9)  # of the order
_FEWEST = 8  # moments that are looked at in any case
_MOST = 60  # moments that are looked at
_EFFORT = 30_000  # moments times sorts of operations and devices, up to which these are looked at
_SWINGS = (0.02, 0.1)  # shares of a device by which a moment is fuller or emptier than even


@dataclass(frozen=True, slots=True)
class Work:
    """The steps of an order.

    Attributes:
        seconds: (devices, steps) of running, infinite where a step may not run.
        copying: (devices, steps) of its weights' copy, infinite where they cannot be brought.
        fixed: (devices, steps) of a copy that is made in any case.
        nbytes: (devices, steps) of weights that are not there yet.
        movable: (steps,) of those that can be brought.
        room: (devices,) bytes for them.
    """

    seconds: Floats
    copying: Floats
    fixed: Floats
    nbytes: Floats
    movable: Floats
    room: Floats


@dataclass(frozen=True, slots=True)
class Planes:
    """Planes below the seconds at the end: ``clock * now + queue @ queues - room @ left + rest[step]``.

    Attributes:
        clock: (planes,) per second that the clock shows.
        queue: (planes, devices) per second that the copy queues show.
        room: (planes, devices) seconds per byte that is left.
        rest: (planes, steps + 1) what the steps from one on add.
    """

    clock: Floats
    queue: Floats
    room: Floats
    rest: Floats


@dataclass(frozen=True, slots=True)
class _Solved:
    """The best division of what remains at a moment.

    Attributes:
        clock: as in ``Planes``.
        queue: (devices,)
        room: (devices,)
        worth: (sorts,) seconds that each step of a sort adds.
        kept: (devices, sorts) steps that run there and whose weights stay.
    """

    clock: float
    queue: Floats
    room: Floats
    worth: Floats
    kept: Floats


class Fluid:
    """The linear programs of one order."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.devices, self.steps = work.seconds.shape
        copied = np.nonzero(np.isfinite(work.copying).any(axis=0) | (work.fixed > 0).any(axis=0))[0]
        # what comes after the last copy is not beside any
        after = np.arange(self.steps) > copied.max(initial=-1)
        rows = (work.seconds, work.copying, work.fixed, work.nbytes, work.movable[None, :], after[None, :])
        columns = np.concatenate(rows).round(12)
        _, first, self.sort = np.unique(columns, axis=1, return_index=True, return_inverse=True)
        self.sort = self.sort.reshape(-1)
        self.first, self.after = first, after[first]
        # (sorts, steps + 1) how many of each sort are left before each step
        counts = np.zeros((len(first), self.steps + 1))
        each = np.zeros((len(first), self.steps))
        each[self.sort, np.arange(self.steps)] = 1.0
        counts[:, :-1] = each[:, ::-1].cumsum(axis=1)[:, ::-1]
        self.counts = counts
        fastest = work.seconds[:, first].min(axis=0)
        brought = np.where(np.isfinite(work.copying), work.copying, 0.0).max(axis=0)
        self.scale = max(float((fastest * counts[:, 0]).sum()), 0.1 * float(brought.sum()), 1e-9)
        self.size = max(1.0, float(work.room.max()))
        self._write()

    @cached_property
    def _beginning(self) -> _Solved | None:
        """The best division of everything."""
        return self._solve(0, 0.0, np.zeros(self.devices), self.work.room)

    def single(self) -> Floats:
        """(devices, steps) part that is kept of each step with a sort of its own, at the beginning."""
        solved = self._beginning
        alone = self.counts[:, 0] == 1
        kept = np.zeros((self.devices, len(alone))) if solved is None else np.where(alone, solved.kept, 0.0)
        return kept[:, self.sort]

    def planes(self, deadline: float | None = None) -> Planes:
        """Planes at even moments, and at moments that are less even, of as many as there is time for."""
        found: dict[bytes, _Solved] = {}
        moments = list(self._moments())
        most = min(_MOST, max(_FEWEST, _EFFORT // (len(self.first) * self.devices)))
        for step, now, queues, left in moments[:: -(-len(moments) // most) if moments else 1]:
            if found and deadline is not None and time.monotonic() > deadline:
                break
            solved = self._solve(step, now, queues, left)
            if solved is not None:
                parts = [np.array([solved.clock]), solved.queue, solved.room * self.work.room, solved.worth]
                found.setdefault(np.concatenate(parts).round(9).tobytes(), solved)
        clock = np.array([solved.clock for solved in found.values()])
        queue = np.array([solved.queue for solved in found.values()]).reshape(-1, self.devices)
        room = np.array([solved.room for solved in found.values()]).reshape(-1, self.devices)
        worth = np.array([solved.worth for solved in found.values()]).reshape(-1, len(self.first))
        return Planes(clock, queue, room, worth @ self.counts)

    def _moments(self) -> Iterator[tuple[int, float, Floats, Floats]]:
        if self.total == np.inf:
            return
        total = self.total
        for part in _MOMENTS:
            step, now = int(part * self.steps), part * total
            queues, left = np.full(self.devices, now), (1 - part) * self.work.room
            yield step, now, queues, left
            for swing in _SWINGS:
                for device in range(self.devices):
                    for sign in (-1.0, 1.0):
                        other = queues.copy()
                        other[device] += sign * swing * total
                        yield step, now, other, left
                        fuller = left.copy()
                        fuller[device] = max(0.0, left[device] + sign * swing * self.work.room[device])
                        yield step, now, queues, fuller
                yield step, now + swing * total, queues, left
                yield step, now - swing * total, queues, left

    def seconds(self, step: int, now: float, queues: Floats, left: Floats) -> float | None:
        """Seconds at the end at least, from a moment on; None where there is no way to it."""
        solved = self._solve(step, now, queues, left)
        if solved is None:
            return None
        here = solved.clock * now + solved.queue @ queues - solved.room @ left
        return float(here + solved.worth @ self.counts[:, step])

    @property
    def total(self) -> float:
        """Seconds of everything at least; infinite where there is no way to the end."""
        solved = self._beginning
        if solved is None:
            return np.inf
        return float(solved.worth @ self.counts[:, 0] - solved.room @ self.work.room)

    def _solve(self, step: int, now: float, queues: Floats, left: Floats) -> _Solved | None:
        devices, sorts = self.devices, len(self.first)
        right = np.concatenate([[-now / self.scale], -queues / self.scale, left / self.size])
        found = linprog(
            self.objective,
            A_ub=self.rows,
            b_ub=right,
            A_eq=self.cover,
            b_eq=self.counts[:, step],
            bounds=self.bounds,
            method="highs",
        )
        if found.status != 0:
            return None
        dual = np.maximum(-found.ineqlin.marginals, 0.0)
        room, worth = dual[1 + devices :] * self.scale / self.size, found.eqlin.marginals * self.scale
        kept = found.x[:-1].reshape(devices, 2, sorts)[:, 0]
        return _Solved(float(dual[0]), dual[1 : 1 + devices], room, worth, kept)

    def _write(self) -> None:
        """The rows, which are the same at every moment.

        Variables: per device the units that are kept and those that are brought; the seconds at the end.
        Rows: the clock, a queue for each device, the room of each device.
        """
        work, devices, sorts = self.work, self.devices, len(self.first)
        seconds, copying, fixed = (a[:, self.first] for a in (work.seconds, work.copying, work.fixed))
        nbytes = work.nbytes[:, self.first]
        stays = np.maximum(nbytes - work.movable[self.first], 0.0)
        count = 2 * devices * sorts + 1
        rows, high = np.zeros((1 + 2 * devices, count)), np.full(count, np.inf)
        for d in range(devices):
            kept = slice(2 * d * sorts, (2 * d + 1) * sorts)
            brought = slice((2 * d + 1) * sorts, (2 * d + 2) * sorts)
            runs = np.isfinite(seconds[d]) & np.isfinite(fixed[d])
            brings = runs & np.isfinite(copying[d])
            high[kept], high[brought] = np.where(runs, np.inf, 0.0), np.where(brings, np.inf, 0.0)
            rows[0, kept] = rows[0, brought] = np.where(runs, seconds[d], 0.0) / self.scale
            rows[1 + d, kept] = np.where(runs, fixed[d], 0.0) / self.scale
            rows[1 + d, brought] = np.where(brings, fixed[d] + copying[d], 0.0) / self.scale
            rows[1 + devices + d, kept] = nbytes[d] / self.size
            rows[1 + devices + d, brought] = np.where(brings, stays[d], 0.0) / self.size
            rows[1 : 1 + devices, kept] += np.where(self.after, rows[0, kept], 0.0)
        rows[: 1 + devices, -1] = -1.0
        self.rows = csr_array(rows)
        each, variables = np.tile(np.arange(sorts), 2 * devices), np.arange(2 * devices * sorts)
        self.cover = csr_array((np.ones(len(each)), (each, variables)), shape=(sorts, count))
        self.bounds = np.stack([np.zeros(count), high], axis=1)
        self.objective = np.zeros(count)
        self.objective[-1] = 1.0
