"""Hill climbing over placements with streaming, judged by the evaluator alone.

Moves are the smallest there are: one slot more or fewer, a weight that comes to reside or to be streamed,
two that change places, a macro-operation that goes to another device, another home for a shared weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphplan.devices.topology import DeviceKey
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.frontier import Frontier
from graphplan.passes.placement.params import Effort

__all__ = ["climb_streamed"]

_TOLERANCE = 1e-9  # relative: a gain below that is rounding


def climb_streamed(arrays: Arrays, start: Evaluation, effort: Effort) -> Evaluation:
    """A placement that is at least as fast.

    Args:
        arrays: of the problem.
        start: a placement within the budgets.
        effort: what is charged.
    """
    return _Climb(arrays, start, effort).run()


class _Climb:
    def __init__(self, arrays: Arrays, start: Evaluation, effort: Effort) -> None:
        self.arrays, self.problem, self.best, self.effort = arrays, arrays.problem, start, effort
        self.frontier = Frontier(arrays, streaming=True)
        self.cpu = None if self.frontier.cpu is None else arrays.keys[self.frontier.cpu]
        names, streamable = arrays.names, self.frontier.is_streamable
        self.own = [[names[i] for i in own] for own in self.frontier.own]
        self.movable = [[names[i] for i in own if streamable(i)] for own in self.frontier.own]
        self.members = [[arrays.operations[i].name for i in unit] for unit in arrays.units]

    def run(self) -> Evaluation:
        improved = True
        while improved and not self.effort.over:
            improved = False
            for moves in (self._slots, self._residences, self._devices, self._homes, self._exchanges):
                for trial in moves():
                    if self.effort.over:
                        return self.best
                    if self._judge(trial):
                        improved = True
                        break
        return self.best

    def _judge(self, trial: Assignment) -> bool:
        found = evaluate(self.problem, trial)
        self.effort.charge(3000.0 + 200.0 * self.arrays.count)
        if not found.feasible or found.seconds >= self.best.seconds * (1 - _TOLERANCE):
            return False
        self.best = found
        return True

    def _changed(self, weights: dict[str, DeviceKey]) -> Assignment:
        now = self.best.assignment
        return replace(now, weights={**now.weights, **weights})

    def _slots(self) -> Iterator[Assignment]:
        now = self.best.assignment
        for ring in self.best.schedule.rings:
            count = len(ring.slots)
            for other in (count + 1, count - 1):
                if 0 < other <= len(ring.segments):
                    yield replace(now, slots={**now.slots, ring.device: other})

    def _residences(self) -> Iterator[Assignment]:
        """Streamed weights come to reside where they are read, those that are waited for longest first."""
        now = self.best.assignment
        streamed = [(unit, name) for unit, names in enumerate(self.movable) for name in names]
        streamed = [(u, n) for u, n in streamed if now.weights[n] == self.cpu and self._device(u) != self.cpu]
        for unit, name in sorted(streamed, key=lambda pair: -self._nbytes(pair[1])):
            yield self._changed({name: self._device(unit)})

    def _exchanges(self) -> Iterator[Assignment]:
        """A resident weight is streamed, alone or in exchange for another of its device."""
        now = self.best.assignment
        if self.cpu is None:
            return
        movable = [(self._device(u), name) for u, names in enumerate(self.movable) for name in names]
        for device, name in movable:
            if now.weights[name] != device or device == self.cpu:
                continue
            yield self._changed({name: self.cpu})
            for other_device, other in movable:
                if other_device == device and now.weights[other] == self.cpu:
                    yield self._changed({name: self.cpu, other: device})

    def _devices(self) -> Iterator[Assignment]:
        """A macro-operation goes to another device, with its weights resident there or streamed."""
        now = self.best.assignment
        for unit, members in enumerate(self.members):
            here = self._device(unit)
            for d, key in enumerate(self.arrays.keys[: self.arrays.computing]):
                if key == here or self.frontier.clock[d, unit] == float("inf"):
                    continue
                operations = {**now.operations, **dict.fromkeys(members, key)}
                homes = dict.fromkeys(self.own[unit], key)
                yield replace(now, operations=operations, weights={**now.weights, **homes})
                if self.arrays.specs[d].is_accelerator and self.cpu is not None and self.movable[unit]:
                    homes |= dict.fromkeys(self.movable[unit], self.cpu)
                    yield replace(now, operations=operations, weights={**now.weights, **homes})

    def _homes(self) -> Iterator[Assignment]:
        """A shared weight resides with another of its readers, or in CPU memory."""
        now = self.best.assignment
        for item in self.frontier.shared:
            name = self.arrays.names[item]
            keys = dict.fromkeys(self._device(unit) for unit in self.frontier.readers[item])
            for key in [
                *keys,
                *([self.cpu] if self.frontier.is_streamable(item) and self.cpu is not None else []),
            ]:
                if key != now.weights[name]:
                    yield self._changed({name: key})

    def _device(self, unit: int) -> DeviceKey:
        return self.best.assignment.operations[self.members[unit][0]]

    def _nbytes(self, name: str) -> int:
        return self.arrays.graph.weights[name].nbytes
