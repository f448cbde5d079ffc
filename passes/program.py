"""Placement as a mixed-integer linear program, for graphs that are small, branchy or knapsack-like.

Binary ``x[i, d]``: unit ``i`` runs on device ``d``. Continuous: ``z`` for a value that arrives, ``a`` for
one that several units read, ``r`` for a weight that is kept, ``s`` for one that is brought at every call.
The costs and sizes are those of ``shares``, so what it cannot go below is a lower bound of every placement.
HiGHS (Huangfu and Hall, 2018) proposes placements, through scipy; bounds are of branch and bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceKey
from graphplan.passes.branch_and_bound import least
from graphplan.passes.occupancy import Held, Occupancy
from graphplan.passes.rows import Rows
from graphplan.passes.shares import Shares

__all__ = ["Bounded", "Program", "Proposed", "Watched"]

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Watched = Mapping[tuple[int, str], int]

_NEEDY = 24  # units whose working set is counted on each device
_LATEST = 10.0  # times the seconds of a known placement, which no better one reaches


@dataclass(frozen=True, slots=True)
class Proposed:
    """A placement.

    Attributes:
        devices: unit -> device.
        brought: weights that are not kept where they are read.
    """

    devices: dict[int, DeviceKey]
    brought: frozenset[str]


@dataclass(frozen=True, slots=True)
class Bounded:
    """A bound.

    Attributes:
        seconds: that no placement can go below.
        met: whether it is as near to a known placement as was asked.
    """

    seconds: float
    met: bool


def _held_at(shares: Shares, watched: Watched) -> list[tuple[int, list[Held], int]]:
    if not watched:
        return []
    occupancy = Occupancy(shares.graph, shares.unit_of)
    return [
        (row, occupancy.during(name, shares.kinds[row].spec.type, unread=True), uncounted)
        for (row, name), uncounted in watched.items()
    ]


class Program:
    """The program of one problem.

    Args:
        shares: its costs and sizes.
        margin: (kinds,) bytes that are left free beyond what must be.
        watched: (kind, operation): moments at which activations that wait are counted too, each with the
            bytes that are left free then for what this does not count.
    """

    def __init__(self, shares: Shares, margin: Floats | None = None, watched: Watched | None = None) -> None:
        self.shares = shares
        self.held = _held_at(shares, watched or {})
        self.devices = [(row, key) for row, kind in enumerate(shares.kinds) for key in kind.keys]
        self.margin = np.zeros(len(shares.kinds)) if margin is None else margin
        self.count = 0
        self.integer: list[int] = []
        self.fixed_to_zero: list[int] = []
        self.rows = Rows()
        self.clock: list[tuple[int, float]] = []
        self.scale = float(np.nanmin(np.where(np.isfinite(shares.clock), shares.clock, np.nan), axis=0).sum())
        self.scale = max(self.scale, 1e-9)
        self.memory_scale = max(1.0, float(shares.nbytes.max(initial=1)))
        self.x = [self._device_variables(row) for row, _ in self.devices]
        self.aside = [self._aside_variables(d) for d in range(len(self.devices))]
        for d in range(len(self.devices)):
            self._moves(d)
            self._memory(d)
        self._once()
        self.makespan = self._new()
        self._clocks()

    @property
    def binaries(self) -> int:
        """How many decisions there are."""
        return len(self.integer)

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def _device_variables(self, row: int) -> list[int]:
        """A variable per item."""
        shares, found = self.shares, []
        for index in range(len(shares.items)):
            variable = self._new()
            found.append(variable)
            seconds = shares.clock[row, index]
            if not np.isfinite(seconds):
                self.fixed_to_zero.append(variable)
            elif seconds:
                self.clock.append((variable, float(seconds) / self.scale))
            if index < shares.units:
                self.integer.append(variable)
        return found

    def _aside_variables(self, device: int) -> dict[int, int]:
        shares, (row, _) = self.shares, self.devices[device]
        found: dict[int, int] = {}
        for index in np.nonzero(shares.nbytes)[0]:
            clock, queue = shares.aside.clock[row, index], shares.aside.queue[row, index]
            if not np.isfinite(clock + queue):
                continue
            variable = found[int(index)] = self._new()
            self.rows.add([(variable, 1.0), (self.x[device][index], -1.0)], -np.inf, 0.0)
            if clock:
                self.clock.append((variable, float(clock) / self.scale))
        return found

    def _moves(self, device: int) -> None:
        shares, (row, _), x = self.shares, self.devices[device], self.x[device]
        for (maker, reader), table in shares.tables.items():
            seconds = float(table[row, 0, 1])
            if seconds:
                arrives = self._new()
                self.rows.add([(arrives, 1.0), (x[maker], 1.0), (x[reader], -1.0)], 0.0, np.inf)
                self.clock.append((arrives, seconds / self.scale))
        for reader, item in shares.needs:
            self.rows.add([(x[item], 1.0), (x[reader], -1.0)], 0.0, np.inf)

    def _memory(self, device: int) -> None:
        shares, (row, _), x = self.shares, self.devices[device], self.x[device]
        kept = [(x[i], float(shares.nbytes[i]) / self.memory_scale) for i in np.nonzero(shares.nbytes)[0]]
        kept += [
            (variable, -float(shares.nbytes[i]) / self.memory_scale)
            for i, variable in self.aside[device].items()
        ]
        room = float(shares.room[row] - self.margin[row]) / self.memory_scale
        self.rows.add(kept, -np.inf, room)
        for watched, held, uncounted in self.held:
            if watched == row:
                spec = shares.kinds[row].spec
                mine = [o for o in held if not (o.is_input and shares.host in shares.kinds[row].keys)]
                extra_terms = [(self._held(x, one), one.allocated(spec) / self.memory_scale) for one in mine]
                most = float(shares.room[row] - uncounted) / self.memory_scale
                self.rows.add([*kept, *extra_terms], -np.inf, most)
        needs = shares.working[row]
        for unit in np.argsort(-needs, kind="stable")[:_NEEDY]:
            extra = float(needs[unit]) / self.memory_scale
            if extra > 1e-3 * room:
                terms = dict(kept)
                terms[x[unit]] = terms.get(x[unit], 0.0) + extra
                self.rows.add(list(terms.items()), -np.inf, float(shares.room[row]) / self.memory_scale)

    def _held(self, x: list[int], held: Held) -> int:
        """A variable that is 1 where the units of one of the sets are all there."""
        there = self._new()
        for units in held.units:
            terms = [(there, 1.0), *((x[unit], -1.0) for unit in sorted(units))]
            self.rows.add(terms, 1.0 - len(units), np.inf)
        return there

    def _once(self) -> None:
        devices = range(len(self.devices))
        for unit in range(self.shares.units):
            self.rows.add([(self.x[d][unit], 1.0) for d in devices], 1.0, 1.0)
        for tie in self.shares.ties:
            terms = [(self.x[d][tie], 1.0) for d in devices]
            terms += [(self.aside[d][int(tie)], -1.0) for d in devices if int(tie) in self.aside[d]]
            self.rows.add(terms, -np.inf, 1.0)

    def _clocks(self) -> None:
        self.rows.add([*self.clock, (self.makespan, -1.0)], -np.inf, 0.0)
        shares = self.shares
        for device, (row, _) in enumerate(self.devices):
            terms = [
                (self.x[device][i], float(shares.queue[row, i]) / self.scale)
                for i in np.nonzero(shares.queue[row])[0]
            ]
            terms += [
                (variable, float(shares.aside.queue[row, i]) / self.scale)
                for i, variable in self.aside[device].items()
                if shares.aside.queue[row, i]
            ]
            if terms:
                self.rows.add([*terms, (self.makespan, -1.0)], -np.inf, 0.0)

    def propose(
        self, *, upper: float, gap: float, nodes: int, seconds: float | None = None
    ) -> Proposed | None:
        """A placement of HiGHS's; None where it finds none.

        Args:
            upper: seconds of a known placement.
            gap: relative gap at which to stop.
            nodes: branches to look at.
            seconds: of clock, or None.
        """
        high, whole = self._limits(upper * (1 + 1e-6))
        values = self.rows.propose(
            self.makespan, high, whole.astype(float), gap=gap, nodes=nodes, seconds=seconds
        )
        return None if values is None else self._read(values)

    def bound(self, *, upper: float, gap: float, programs: int, seconds: float | None = None) -> Bounded:
        """Seconds that no placement can go below.

        Args:
            upper: seconds of a known placement.
            gap: relative gap to it at which to stop.
            programs: linear programs to solve.
            seconds: of clock, or None.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        high, whole = self._limits(_LATEST * upper)
        enough = upper * (1 - gap) / self.scale
        found = least(
            self.rows, self.makespan, high, whole, enough=enough, programs=programs, deadline=deadline
        )
        return Bounded(min(upper, found * self.scale), met=found >= enough)

    def _limits(self, latest: float) -> tuple[Floats, Bools]:
        """(variables,) the upper limit of each, and whether it is whole."""
        high, whole = np.ones(self.count), np.zeros(self.count, dtype=bool)
        high[self.fixed_to_zero] = 0.0
        high[self.makespan] = latest / self.scale
        whole[self.integer] = True
        return high, whole

    def _read(self, values: Floats) -> Proposed:
        devices: dict[int, DeviceKey] = {}
        for unit in range(self.shares.units):
            best = max(range(len(self.devices)), key=lambda d: values[self.x[d][unit]])
            devices[unit] = self.devices[best][1]
        brought = frozenset(
            self.shares.items[i].streamed
            for device in self.aside
            for i, variable in device.items()
            if values[variable] > 0.5
        )
        return Proposed(devices, brought)
