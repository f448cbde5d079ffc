"""Vector clocks over the two queues of an accelerator: do accesses to its prefetch buffer follow one another?

Each queue counts its own accesses. An event holds what its queue had seen when it was recorded; a queue
that waits for it has then seen that too. Two accesses to the same bytes, one of them a write, race unless
the queue of the later one has seen the earlier one. The clocks know nothing of the order in which the
simulation happens to run things.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from graphplan import Graph
from graphplan.devices.topology import DeviceKey
from graphplan.ir.schedule import Load, Move, Release, Run, Schedule, Wait
from graphplan.runtime.simulate.simulated_tensor import SimulatedTensor

COPIES, WORK = "copies", "work"
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """One access to the bytes ``start .. end-1`` of a prefetch buffer."""

    queue: str
    tick: int
    start: int
    end: int
    writes: bool
    what: str


@dataclass
class RaceLog:
    """The clocks of one prefetch buffer's two queues, and every access so far.

    Attributes:
        races: the races found, as text.
    """

    clocks: dict[str, Clock] = field(default_factory=lambda: {COPIES: {}, WORK: {}})
    accesses: list[Access] = field(default_factory=list)
    races: list[str] = field(default_factory=list)

    def snapshot(self, queue: str) -> Clock:
        return dict(self.clocks[queue])

    def wait(self, queue: str, clock: Clock) -> None:
        seen = self.clocks[queue]
        for other, tick in clock.items():
            seen[other] = max(seen.get(other, 0), tick)

    def access(self, queue: str, start: int, end: int, *, writes: bool, what: str) -> None:
        clock = self.clocks[queue]
        clock[queue] = clock.get(queue, 0) + 1
        new = Access(queue, clock[queue], start, end, writes, what)
        seen_write = writes
        for old in self.accesses:
            if old.start >= end or start >= old.end:
                continue
            follows = clock.get(old.queue, 0) >= old.tick
            seen_write |= old.writes and follows
            if (writes or old.writes) and not follows:
                verb = "writes" if writes else "reads"
                self.races.append(f"{what} {verb} bytes {start}..{end} while {old.what} is under way")
        if not seen_write:
            self.races.append(f"{what} reads bytes {start}..{end} before they are written")
        self.accesses.append(new)


class Event:
    """The clock of a queue when it was recorded; empty before."""

    def __init__(self) -> None:
        self.clock: Clock = {}


class ClockedQueues:
    """Runs everything at once, as on a device without streams, and keeps the clocks."""

    def __init__(self) -> None:
        self.log = RaceLog()
        self.copying = False

    def event(self) -> Event:
        return Event()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copying = True
        target.copy_(source)
        self.copying = False

    def record_copies(self, event: Event) -> None:
        event.clock = self.log.snapshot(COPIES)

    def record_work(self, event: Event) -> None:
        event.clock = self.log.snapshot(WORK)

    def copies_wait(self, event: Event) -> None:
        self.log.wait(COPIES, event.clock)

    def work_waits(self, event: Event) -> None:
        self.log.wait(WORK, event.clock)

    def adopt_current_stream(self) -> None:
        pass

    def copies_wait_for_all_work(self) -> None:
        self.log.wait(COPIES, self.log.snapshot(WORK))

    def synchronize(self) -> None:
        pass

    def watch(
        self, buffer: torch.Tensor, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        """Record an operation's accesses to ``buffer``."""
        base, size = _address(buffer), buffer.numel()
        queue = COPIES if self.copying else WORK
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                if (
                    not isinstance(tensor, SimulatedTensor)
                    or tensor.device != buffer.device
                    or not tensor.numel()
                ):
                    continue
                start = _address(tensor) - base
                if 0 <= start < size:
                    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                    end = start + (last + 1) * tensor.element_size()
                    self.log.access(
                        queue, start, end, writes=writes, what=f"{queue} of {tuple(tensor.shape)}"
                    )


def _address(tensor: torch.Tensor) -> int:
    assert isinstance(tensor, SimulatedTensor)
    return int(tensor.elem.data_ptr())


def races_of(graph: Graph, schedule: Schedule, calls: int = 3) -> list[str]:
    """Races in successive calls of a schedule, by its steps and its segments' predecessors alone."""
    found: list[str] = []
    for buffer in schedule.prefetch_buffers:
        log, starts = RaceLog(), buffer.starts
        ready: dict[int, Clock] = {}
        free: dict[int, Clock] = {}
        for call in range(calls):
            views: dict[str, tuple[int, int]] = {}
            copied: set[str] = set()
            for step in schedule.steps:
                if isinstance(step, Run):
                    _operate(graph, step, buffer.device, views, copied, log, call)
                elif isinstance(step, Move):
                    if step.destination == buffer.device:
                        copied.add(step.value)
                    elif step.source == buffer.device and step.value in views:
                        log.access(WORK, *views[step.value], writes=False, what=f"move of {step.value}")
                elif step.device != buffer.device:
                    continue
                elif isinstance(step, Load):
                    segment = buffer.segments[step.segment]
                    log.wait(COPIES, free.get(segment.previous, {}))
                    start = starts[segment.slot]
                    what = f"load {step.segment} of call {call}"
                    log.access(COPIES, start, start + segment.nbytes, writes=True, what=what)
                    ready[step.segment] = log.snapshot(COPIES)
                elif isinstance(step, Wait):
                    segment = buffer.segments[step.segment]
                    log.wait(WORK, ready.get(step.segment, {}))
                    for name, offset in zip(segment.weights, segment.offsets, strict=True):
                        start = starts[segment.slot] + offset
                        views[name] = (start, start + graph.weights[name].nbytes)
                else:
                    assert isinstance(step, Release)
                    free[step.segment] = log.snapshot(WORK)
        found += log.races
    return found


def _operate(
    graph: Graph,
    step: Run,
    device: DeviceKey,
    views: dict[str, tuple[int, int]],
    copied: set[str],
    log: RaceLog,
    call: int,
) -> None:
    operation = graph.operations[step.operation]
    if step.device != device:
        return
    for name in operation.inputs:
        if name in views and name not in copied and not operation.host_only:
            log.access(WORK, *views[name], writes=False, what=f"{operation.name} of call {call}")
    for name in operation.outputs:
        base = graph.values[name].alias_of
        if base in views and base not in copied:
            views[name] = views[base]


class DelayedQueues(ClockedQueues):
    """Copies on a separate thread, each after a random delay; work on the host."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw, self.pool = random.Random(seed), ThreadPoolExecutor(1)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        delay = self.draw.choice([0.0, 0.0, 0.002])
        self.pool.submit(lambda: (time.sleep(delay), target.copy_(source)))

    def record_copies(self, event: Any) -> None:
        event.done = self.pool.submit(lambda: None)

    def record_work(self, event: Any) -> None:
        pass

    def copies_wait(self, event: Any) -> None:
        pass

    def work_waits(self, event: Any) -> None:
        event.done.result()

    def synchronize(self) -> None:
        self.pool.submit(lambda: None).result()
