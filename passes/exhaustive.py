"""Exact placement of small graphs: every assignment, but for those that cannot win.

Depth first over the operations in order, and over the homes of the weights that each reads first. A
branch is cut where its seconds so far, plus the fastest time of what is left, reach the best known
placement, or where streaming alone takes as long, or where what a device holds for certain passes its
budget. Equal devices are opened in
the caller's order only. What remains is judged by the evaluator, so the best found is the optimum of
the model, and proves it: among placements whose weights live where a reader runs, or on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from graphplan.device import CPU, DISK, DeviceKey, DeviceSpec
from graphplan.passes.depth import deepen, deepest_seconds
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.residence import reside

__all__ = ["search_all"]

_TOLERANCE = 1e-9
_LEAF = 10  # branches that take as long as the clock of a placement, ...
_JUDGED = 50  # ... and as judging one that may be the best


def search_all(
    problem: Problem,
    best: Evaluation | None,
    *,
    fetch: bool,
    nodes: int,
    deadline: float | None = None,
) -> tuple[Evaluation | None, bool]:
    """The best placement, and whether the search was complete.

    Args:
        problem: what to place; every device that computes is tried.
        best: a placement to beat, or None.
        fetch: whether weights may live where none of their readers runs.
        nodes: most branches to look at.
        deadline: ``time.monotonic()`` at which to stop, or None.
    """
    search = _Search(problem, best, fetch, nodes, deadline)
    search.run()
    return search.best, search.left > 0 and not search.guessed


@dataclass
class _State:
    """A partial placement; changed on the way down, and back on the way up."""

    device: dict[str, DeviceKey] = field(default_factory=dict)
    home: dict[str, DeviceKey] = field(default_factory=dict)
    present: set[tuple[str, DeviceKey]] = field(default_factory=set)
    resident: dict[DeviceKey, int] = field(default_factory=dict)
    most: dict[DeviceKey, int] = field(default_factory=dict)
    copying: dict[DeviceKey, float] = field(default_factory=dict)  # seconds of streaming alone


class _Search:
    def __init__(
        self, problem: Problem, best: Evaluation | None, fetch: bool, nodes: int, deadline: float | None
    ) -> None:
        self.problem, self.best, self.fetch, self.left = problem, best, fetch, nodes
        self.deadline = deadline
        self.graph = problem.graph
        self.specs = [spec for spec in problem.topology.devices if spec.computes]
        self.by_key = {spec.key: spec for spec in problem.topology.devices}
        self.order = list(self.graph.operations.values())
        clocks = {spec.key: problem.clock(spec) for spec in self.specs}
        self.seconds = [{key: clock[op.name] for key, clock in clocks.items()} for op in self.order]
        fastest = [min(row.values()) for row in self.seconds]
        self.rest = [sum(fastest[i:]) for i in range(len(fastest) + 1)]
        self.last = self._last_reads()
        self.group = {name: group for group in self.graph.together for name in group}
        self.guessed = False
        self.state = _State()
        for spec in problem.topology.devices:
            self.state.resident[spec.key] = self.state.most[spec.key] = 0
            self.state.copying[spec.key] = 0.0
        self.state.present.update((name, problem.host) for name in self.graph.inputs)

    def _last_reads(self) -> dict[str, int]:
        last = {name: i for i, operation in enumerate(self.order) for name in operation.inputs}
        last.update(dict.fromkeys(self.graph.outputs, len(self.order)))
        return last

    def run(self) -> None:
        unread = [name for name in self.graph.weights if not self.graph.readers.get(name, ())]
        # one that only the accelerators can keep may be in the way after all
        self.guessed = bool(unread) and not any(spec.device == CPU for spec in self.specs)
        self._operation(0, 0.0)

    def _beaten(self, seconds: float) -> bool:
        return self.best is not None and seconds >= self.best.seconds * (1 - _TOLERANCE)

    def _operation(self, index: int, seconds: float) -> None:
        """Place operation ``index`` and all after it."""
        self.left -= 1
        if self.deadline is not None and time.monotonic() >= self.deadline:
            self.left = 0
        if self.left <= 0 or self._beaten(seconds + self.rest[index]):
            return
        if index == len(self.order):
            self._leaf()
            return
        operation = self.order[index]
        for key in self._devices(operation.name):
            self.state.device[operation.name] = key
            new = [
                name
                for name in operation.inputs
                if name in self.graph.weights and name not in self.state.home and not operation.host_only
            ]
            self._weights(index, key, new, seconds + self.seconds[index][key])
            del self.state.device[operation.name]

    def _devices(self, name: str) -> list[DeviceKey]:
        tied = [self.state.device[other] for other in self.group.get(name, ()) if other in self.state.device]
        allowed = self.problem.allowed.get(name)
        keys = [spec.key for spec in self._opened() if allowed is None or spec.key in allowed]
        if tied:
            return [key for key in keys if key == tied[0]]
        if self.state.device:  # where the operation before runs, first: most often the best
            before = next(reversed(self.state.device.values()))
            keys.sort(key=lambda key: key != before)
        return keys

    def _opened(self) -> Iterator[DeviceSpec]:
        """Devices in use, and of each kind of unused ones the first."""
        used = {*self.state.device.values(), *self.state.home.values()}
        pinned = set(self.problem.fixed_weights.values()).union(*self.problem.allowed.values())
        kinds: set[object] = set()
        for spec in self.specs:
            link = self.problem.topology.link(CPU, spec.key)
            kind = (spec.room, spec.flops, spec.bandwidth, spec.overhead, spec.type, link)
            special = spec.key in used or spec.key in pinned or self.problem.topology.links
            if special or kind not in kinds:
                yield spec
            if not special:
                kinds.add(kind)

    def _weights(self, index: int, key: DeviceKey, new: Sequence[str], seconds: float) -> None:
        """Give a home to each weight that this operation is the first to read."""
        if self._beaten(seconds + self.rest[index + 1]):
            return
        if not new:
            self._settle(index, key, seconds)
            return
        weight = self.graph.weights[new[0]]
        for home in self._homes(weight.name, key):
            nbytes = self.by_key[home].rounded(weight.nbytes)
            state = self.state
            if state.resident[home] + state.most[home] + nbytes > self.by_key[home].room:
                continue
            state.home[weight.name] = home
            state.resident[home] += nbytes
            state.present.add((weight.name, home))
            self._weights(index, key, new[1:], seconds)
            state.present.discard((weight.name, home))
            state.resident[home] -= nbytes
            del state.home[weight.name]

    def _homes(self, name: str, key: DeviceKey) -> list[DeviceKey]:
        fixed = self.problem.fixed_weights.get(name)
        if fixed is not None:
            return [fixed]
        weight = self.graph.weights[name]
        if not weight.fetchable:
            return [key]
        if len(self.graph.readers.get(name, ())) == 1 and not self.fetch:
            return [key]
        others = [spec.key for spec in self._opened() if spec.key != key and spec.type != DISK]
        if not self.fetch:  # a later reader's device
            return [key, *(other for other in others if self.by_key[other].is_accelerator)]
        cpu = [spec.key for spec in self.specs if spec.device == CPU and spec.key != key]
        return [key, *(others if len(self.graph.readers.get(name, ())) > 1 else cpu)]

    def _settle(self, index: int, key: DeviceKey, seconds: float) -> None:
        """Bring the inputs, run the operation, count what is certainly alive."""
        operation, state, topology = self.order[index], self.state, self.problem.topology
        arrived: list[tuple[str, DeviceKey]] = []
        spec = self.by_key[key]
        held = spec.allocated(operation.workspace_on(spec.type))
        streaming = copying = state.copying[key]
        if not operation.host_only:
            for name in operation.inputs:
                value = self.graph.values.get(name)
                if (value is not None and not value.is_tensor) or (name, key) in state.present:
                    continue
                weight = self.graph.weights.get(name)
                nbytes = weight.nbytes if weight is not None else value.copy_bytes if value else 0
                link = topology.link(self._home(name), key)
                if self._streamed(name, spec):
                    copying += nbytes / link.bandwidth  # which may hide behind compute
                    held += spec.rounded(nbytes)
                else:
                    seconds += link.seconds(nbytes)
                    held += spec.allocated(nbytes)
                arrived.append((name, key))
        made = [(name, key) for name in operation.outputs]
        for name in operation.outputs:
            held += spec.allocated(self.graph.values[name].nbytes)
            if name in self.graph.outputs and self.problem.returns_to_host and key != self.problem.host:
                value = self.graph.values[name]
                if value.is_tensor:
                    seconds += topology.link(key, self.problem.host).seconds(value.copy_bytes)
        held += self._alive_at_home(index, key)
        before = state.most[key]
        # copies come in the order of their use: this operation waits for all that has been copied by then
        seconds = max(seconds, copying + self.seconds[index][key])
        late = self._beaten(seconds + self.rest[index + 1])
        if state.resident[key] + max(before, held) <= spec.room and not late:
            state.most[key] = max(before, held)
            state.copying[key] = copying
            state.present.update(arrived)
            state.present.update(made)
            self._operation(index + 1, seconds)
            state.present.difference_update(made)
            state.present.difference_update(arrived)
            state.most[key] = before
            state.copying[key] = streaming

    def _streamed(self, name: str, spec: DeviceSpec) -> bool:
        home = self.by_key.get(self._home(name))
        fetched = self.problem.streams and name in self.graph.streamable and spec.is_accelerator
        return fetched and home is not None and home.type == CPU

    def _home(self, name: str) -> DeviceKey:
        if name in self.state.home:
            return self.state.home[name]
        made = self.graph.producer.get(name)
        return self.problem.host if made is None else self.state.device[made]

    def _alive_at_home(self, index: int, key: DeviceKey) -> int:
        """Bytes that earlier operations on this device made and that are certainly to be read from there.

        Where there is a copy already, later readers may all be with it.
        """
        spec, total = self.by_key[key], 0
        for operation in self.order[:index]:
            if self.state.device[operation.name] == key:
                for name in operation.outputs:
                    if name in self.order[index].inputs or (
                        self.last.get(name, -1) >= index and not self._copied(name, key)
                    ):
                        total += spec.allocated(self.graph.values[name].nbytes)
        return total

    def _copied(self, name: str, home: DeviceKey) -> bool:
        return any(
            (name, key) in self.state.present for key in (*self.by_key, self.problem.host) if key != home
        )

    def _leaf(self) -> None:
        self.left -= _LEAF
        settled = replace(self.problem, fixed_weights={**self.problem.fixed_weights, **self.state.home})
        assignment = reside(settled, self.state.device)
        if self._beaten(deepest_seconds(self.problem, assignment)):
            return
        if self.best is not None:  # else this may be the only one that fits
            self.left -= _JUDGED
        found = deepen(self.problem, evaluate(self.problem, assignment))
        if found.feasible and not self._beaten(found.seconds):
            self.best = found
