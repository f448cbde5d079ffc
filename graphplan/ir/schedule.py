"""The schedule: a placed graph as a list of moves and runs, with nothing implicit.

A schedule is what the lowered module does, step for step, so bytes and seconds are read off it and
off nothing else. Before and after, for two operations on two devices::

    a = linear(x, w)            move x: cpu -> 0
    b = relu(a)                 run a on 0
                                move a: 0 -> 1
                                run b on 1
                                move b: 1 -> cpu      (output)

An *instance* is a value on a device. A value reaches a device at most once, and is dropped there
after its last reader. Devices are keys, as in ``max_memory``; the caller's own device, from which
inputs come and to which outputs return, is ``host``.

Weights that live on the CPU, or on disk, and are read on an accelerator are *streamed*: a *segment* (the
weights of an operation, or of a few small ones) is copied in one go into a slot of the accelerator's
*prefetch buffer*, on a queue of its own, ahead of its first reader. For two segments and one slot::

    load 0: w0 -> slot 0 of 0, 4096 bytes
    wait 0 on 0
    run a on 0
    release 0 on 0
    load 1: w1 -> slot 0 of 0, 4096 bytes
    ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from graphplan.devices.topology import CPU, DISK, DeviceKey, Topology
from graphplan.ir.graph import Graph

STAGED_BYTES = 16 << 20
"""Of each of the two buffers that weights on disk pass on their way to a prefetch buffer, at most."""

MoveKind = Literal["activation", "weight", "input", "output", "writeback", "gradient"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where each operation runs and each weight lives: what a solver proposes.

    Attributes:
        operations: operation name -> device key.
        weights: weight name -> device key.
        slots: device key -> slots of its prefetch buffer, as far as there are segments for them; more where
            more segments are in use at once. 0, which is for calls of which autograd keeps the weights: no
            prefetch buffer, each weight is copied right before its first reader. A device that is not named
            has two, or one where two do not fit.
    """

    operations: Mapping[str, DeviceKey]
    weights: Mapping[str, DeviceKey]
    slots: Mapping[DeviceKey, int] = field(default_factory=dict)


def read_in_place(topology: Topology, assignment: Assignment) -> Iterator[tuple[str, DeviceKey]]:
    """The weights on disk, with each device that reads them where they are: the CPU, page by page."""
    memory = [spec.key for spec in topology.devices if spec.type == CPU]
    if DISK in topology:
        on_disk = [name for name, key in assignment.weights.items() if key == DISK]
        yield from ((name, key) for name in on_disk for key in memory)


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one value or weight, ``nbytes`` of it, to another device.

    A ``"writeback"`` copies an input that forward has changed into the caller's own tensor; a ``"gradient"``
    goes to where its parameter resides.
    """

    value: str
    source: DeviceKey
    destination: DeviceKey
    nbytes: int
    kind: MoveKind


@dataclass(frozen=True, slots=True)
class Run:
    """Run one operation on a device."""

    operation: str
    device: DeviceKey


class Runs(dict[tuple[str, DeviceKey], Run]):
    """Runs by operation and device, made once: a search writes thousands of schedules of the same ones."""

    def __missing__(self, key: tuple[str, DeviceKey]) -> Run:
        made = self[key] = Run(*key)
        return made


@dataclass(frozen=True, slots=True)
class Load:
    """Enqueue the copy of a segment into its slot: it starts when the slot's last readers are done.

    Attributes:
        segment: its index in the prefetch buffer.
        device: the accelerator whose prefetch buffer it is.
        source: where the weights reside.
        weights: their names.
        nbytes: bytes of the copy, the gaps between its weights included.
    """

    segment: int
    device: DeviceKey
    source: DeviceKey
    weights: tuple[str, ...]
    nbytes: int

    @property
    def destination(self) -> DeviceKey:
        """The device, as for a :class:`Move`."""
        return self.device


@dataclass(frozen=True, slots=True)
class Wait:
    """Let what follows on a device wait until a segment is there; its weights can then be read."""

    segment: int
    device: DeviceKey


@dataclass(frozen=True, slots=True)
class Release:
    """Everything that reads a segment is enqueued: its slot may be loaded anew after that."""

    segment: int
    device: DeviceKey


Step = Move | Run | Load | Wait | Release


def backward_start(graph: Graph, steps: Sequence[Step]) -> int:
    """How many steps of a training step are of the forward pass; all, where there is no other.

    The caller's code runs between the two, with the results, which are where they are returned by then.
    """
    if not graph.trains:
        return len(steps)
    forward = (
        index
        for index, step in enumerate(steps)
        if (isinstance(step, Run) and not graph.operations[step.operation].backward)
        or (isinstance(step, Move) and step.kind in ("output", "writeback"))
    )
    start = max(forward, default=-1) + 1
    while start < len(steps) and isinstance(steps[start], Release):  # of what the last operations read
        start += 1
    return start


@dataclass(frozen=True, slots=True)
class PrefetchSegment:
    """Weights that are copied to an accelerator in one go.

    Attributes:
        weights: names.
        offsets: bytes from the start of the slot to each of them.
        nbytes: bytes of the copy, the gaps between its weights included.
        slot: index of the slot that it is copied into.
        previous: index of the segment that is in the slot before it; for the first of a slot, the
            last of it, in the call before.
    """

    weights: tuple[str, ...]
    offsets: tuple[int, ...]
    nbytes: int
    slot: int
    previous: int


@dataclass(frozen=True, slots=True)
class PrefetchBuffer:
    """The slots of an accelerator into which weights are streamed. It lives as long as the module.

    Attributes:
        device: key of the accelerator.
        source: where the streamed weights live; some may be on disk instead, which their loads say.
        slots: bytes of each slot; they lie one after another.
        segments: in the order in which they are copied.
        nbytes: bytes of the storage, which calls of other structures may need larger than ``slots``.
    """

    device: DeviceKey
    source: DeviceKey
    slots: tuple[int, ...]
    segments: tuple[PrefetchSegment, ...]
    nbytes: int

    @property
    def starts(self) -> tuple[int, ...]:
        """Bytes from the start of the storage to each slot."""
        return tuple(accumulate(self.slots, initial=0))[:-1]


def prefetch_bytes(prefetch_buffers: Iterable[PrefetchBuffer]) -> dict[DeviceKey, int]:
    """Device -> bytes of the largest of these prefetch buffers there."""
    sizes: dict[DeviceKey, int] = {}
    for buffer in prefetch_buffers:
        sizes[buffer.device] = max(buffer.nbytes, sizes.get(buffer.device, 0))
    return sizes


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one forward pass.

    Attributes:
        steps: in execution order.
        assignment: the placement that they carry out.
        host: the key (or device name) of the caller's own device.
        returns_to_host: whether outputs are moved back to ``host``.
        prefetch_buffers: one for each accelerator that weights are streamed to.
    """

    steps: tuple[Step, ...]
    assignment: Assignment
    host: DeviceKey
    returns_to_host: bool = True
    prefetch_buffers: tuple[PrefetchBuffer, ...] = ()

    def moves(self, *kinds: MoveKind) -> Iterator[Move]:
        """The moves of these kinds, or all, in order."""
        found = (step for step in self.steps if isinstance(step, Move))
        return (move for move in found if not kinds or move.kind in kinds)

    def runs(self) -> Iterator[Run]:
        """The runs, in order."""
        return (step for step in self.steps if isinstance(step, Run))

    def loads(self) -> Iterator[Load]:
        """The copies of segments, in order."""
        return (step for step in self.steps if isinstance(step, Load))

    def copies(self) -> Iterator[Move | Load]:
        """Everything that crosses between devices, in order."""
        return (step for step in self.steps if isinstance(step, Move | Load))

    def weight_copies(self) -> Iterator[Move | Load]:
        """Copies of weights to where they are used, in order."""
        return (copy for copy in self.copies() if isinstance(copy, Load) or copy.kind == "weight")

    def segment(self, step: Load | Wait | Release) -> PrefetchSegment:
        """What a step copies, waits for or releases."""
        buffer = next(buffer for buffer in self.prefetch_buffers if buffer.device == step.device)
        return buffer.segments[step.segment]

    def with_prefetch_buffers(self, sizes: Mapping[DeviceKey, int], topology: Topology) -> Schedule:
        """The same schedule, with a prefetch buffer of at least so many bytes on each of these devices.

        Those that it has keep their numbers, by which its code knows them.
        """
        cpu = next((spec.key for spec in topology.devices if spec.type == CPU), CPU)
        own = {buffer.device: buffer for buffer in self.prefetch_buffers}
        others = (spec.key for spec in topology.devices if spec.key in sizes and spec.key not in own)
        found = own | {key: PrefetchBuffer(key, cpu, (), (), 0) for key in others}
        grown = (replace(one, nbytes=max(one.nbytes, sizes.get(key, 0))) for key, one in found.items())
        return replace(self, prefetch_buffers=tuple(grown))

    def __str__(self) -> str:
        slots = {
            (buffer.device, i): s.slot
            for buffer in self.prefetch_buffers
            for i, s in enumerate(buffer.segments)
        }
        return "\n".join(_line(step, slots) for step in self.steps)


def _line(step: Step, slots: Mapping[tuple[DeviceKey, int], int]) -> str:
    if isinstance(step, Run):
        return f"run {step.operation} on {step.device}"
    if isinstance(step, Move):
        return f"move {step.value}: {step.source} -> {step.destination}, {step.nbytes} bytes ({step.kind})"
    if isinstance(step, Load):
        place = f"slot {slots.get((step.device, step.segment), '?')} of {step.device}"
        return f"load {step.segment}: {', '.join(step.weights)} -> {place}, {step.nbytes} bytes"
    verb = "wait" if isinstance(step, Wait) else "release"
    return f"{verb} {step.segment} on {step.device}"
