"""All orders in which CUDA may run work enqueued on its streams: does each read see the right bytes?

``CudaQueues`` itself is run, on streams and events that write down what they are asked for; a simulated
device says which bytes of a prefetch buffer each operation touches. The host's steps are then explored with
those of the streams, in all interleavings that the recorded waits allow. Memory that is freed belongs to the
stream that allocated it: its next owner writes to it there at once, and so may the last one of memory that
is allocated. For a slot that is loaded again without a wait::

    copies   write a ---------- write b       read a may come after write b
    work            \\- read a
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from graphplan.runtime.simulate.simulated_tensor import SimulatedTensor
from graphplan.runtime.weights import weight_streams

GARBAGE = -1


@dataclass(frozen=True)
class Step:
    """A step of a stream or of the host.

    Attributes:
        kind: ``"read"``, ``"write"``, ``"record"``, ``"wait"`` for a record, or ``"sync"`` with a stream.
        stream: that does it; for ``"sync"``, that the host waits for.
        number: of the record; of what is written.
        buffer: which prefetch buffer.
        start: first byte.
        end: behind the last.
    """

    kind: str
    stream: str = ""
    number: int = 0
    buffer: int = 0
    start: int = 0
    end: int = 0


@dataclass
class Recorder:
    """The host's actions in order, with the enqueued work at the place where it is enqueued."""

    steps: list[Step] = field(default_factory=list)
    current: str = "work 0"
    buffers: list[tuple[int, int, str]] = field(default_factory=list)  # address, bytes, owner
    number: int = 0

    def next(self) -> int:
        self.number += 1
        return self.number

    def add(self, kind: str, stream: str, number: int = 0) -> None:
        self.steps.append(Step(kind, stream, number))

    def wait_stream(self, stream: str, other: str) -> None:
        record = self.next()
        self.add("record", other, record)
        self.add("wait", stream, record)

    def garbage(self, buffer: int) -> None:
        _, size, owner = self.buffers[buffer]
        self.steps.append(Step("write", owner, GARBAGE, buffer, 0, size))

    def replaced(self, new: torch.Tensor) -> None:
        """A prefetch buffer was freed or replaced."""
        if new.numel():
            self.buffers.append((_address(new), new.numel(), self.current))
        if self.buffers:
            self.garbage(len(self.buffers) - 1)

    def watch(self, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """Record an operation's accesses to the prefetch buffer."""
        if not self.buffers:
            return
        index = len(self.buffers) - 1
        base, size, _ = self.buffers[index]
        for kind, tensors in (("read", read), ("write", written)):
            for tensor in tensors:
                if isinstance(tensor, SimulatedTensor) and tensor.numel():
                    start = _address(tensor) - base
                    end = start + tensor.numel() * tensor.element_size()
                    if 0 <= start < size:
                        self.steps.append(Step(kind, self.current, self.next(), index, start, end))


def _address(tensor: torch.Tensor) -> int:
    assert isinstance(tensor, SimulatedTensor)
    return int(tensor.elem.data_ptr())


def fakes(recorder: Recorder) -> dict[str, Any]:
    """The part of ``torch.cuda`` that ``CudaQueues`` uses."""

    class Stream:
        def __init__(self, device: Any = None, name: str = "copies") -> None:
            self.name = name

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and self.name == other.name

        __hash__ = None  # type: ignore[assignment]

        def wait_event(self, event: Event) -> None:
            if event.number:
                recorder.add("wait", self.name, event.number)

        def wait_stream(self, other: Stream) -> None:
            recorder.wait_stream(self.name, other.name)

        def synchronize(self) -> None:
            recorder.add("sync", self.name)

    class Event:
        number = 0

        def record(self, stream: Stream) -> None:
            self.number = recorder.next()
            recorder.add("record", stream.name, self.number)

    @contextmanager
    def stream(one: Stream) -> Iterator[None]:
        before, recorder.current = recorder.current, one.name
        yield
        recorder.current = before

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda device=None: Stream(name=recorder.current),
    }


@contextmanager
def recording(machine: Any) -> Iterator[Recorder]:
    """Context manager that records the use of prefetch buffers, as with CUDA's streams."""
    recorder = Recorder()

    def replace(storage: Any, new: torch.Tensor) -> None:
        vars(storage)["bytes"] = new
        recorder.replaced(new)

    held = property(lambda storage: vars(storage)["bytes"], replace)
    machine.watch = recorder.watch
    with (
        patch.multiple(torch.cuda, **fakes(recorder)),
        patch.object(weight_streams._Storage, "bytes", held, create=True),
    ):
        yield recorder
    machine.watch = None


def explore(steps: Sequence[Step]) -> str | None:
    """An error of some interleaving; None if there is none."""
    return _Explorer(steps).run()


class _Explorer:
    """All states of a program: the positions of the host and of each stream, and the memory."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.streams = sorted({step.stream for step in steps})
        marks = {(s.buffer, at) for s in steps if s.kind in ("read", "write") for at in (s.start, s.end)}
        self.marks = sorted(marks)
        self.cells = {cell: index for index, cell in enumerate(self.marks)}
        self.expected = self._expected()
        self.queues = {
            name: [i for i, step in enumerate(steps) if step.stream == name and step.kind != "sync"]
            for name in self.streams
        }

    def _touched(self, step: Step) -> list[int]:
        return [
            index
            for (buffer, at), index in self.cells.items()
            if buffer == step.buffer and step.start <= at < step.end
        ]

    def _expected(self) -> dict[int, tuple[int, ...]]:
        """The values of each read if all work runs as it is enqueued."""
        memory, found = [0] * len(self.cells), {}
        for index, step in enumerate(self.steps):
            if step.kind == "write":
                for cell in self._touched(step):
                    memory[cell] = step.number
            elif step.kind == "read":
                found[index] = tuple(memory[cell] for cell in self._touched(step))
        return found

    def run(self) -> str | None:
        start = (0, (0,) * len(self.streams), (0,) * len(self.cells), frozenset[int]())
        stack, seen = [start], {start}
        while stack:
            for state in self._next(stack.pop()):
                if isinstance(state, str):
                    return state
                if state not in seen:
                    seen.add(state)
                    stack.append(state)
        return None

    def _next(self, state: Any) -> Iterator[Any]:
        host, positions, memory, records = state
        if host < len(self.steps):
            step = self.steps[host]
            waits = step.kind == "sync" and self._behind(positions, step.stream, host)
            if not waits:
                yield host + 1, positions, memory, records
        for which, name in enumerate(self.streams):
            queue, at = self.queues[name], positions[which]
            if at == len(queue) or queue[at] >= host:
                continue
            step = self.steps[queue[at]]
            if step.kind == "wait" and step.number not in records:
                continue
            moved = (*positions[:which], at + 1, *positions[which + 1 :])
            if step.kind == "record":
                yield host, moved, memory, records | {step.number}
            elif step.kind == "write":
                cells = list(memory)
                for cell in self._touched(step):
                    cells[cell] = step.number
                yield host, moved, tuple(cells), records
            elif step.kind == "read":
                sees = tuple(memory[cell] for cell in self._touched(step))
                if sees != self.expected[queue[at]]:
                    yield f"{step} sees {sees}, not {self.expected[queue[at]]}"
                yield host, moved, memory, records
            else:
                yield host, moved, memory, records

    def _behind(self, positions: Sequence[int], name: str, host: int) -> bool:
        """Whether a stream has not completed the work enqueued so far."""
        at, queue = positions[self.streams.index(name)], self.queues[name]
        return at < len(queue) and queue[at] < host
