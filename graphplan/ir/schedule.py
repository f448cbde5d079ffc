"""The schedule: a placed graph as a list of transfers and runs, with nothing implicit.

The lowered module does exactly the steps of its schedule, so bytes and seconds are computed from it
alone. Before and after, for two operations on two devices::

    a = linear(x, w)            move x: cpu -> 0
    b = relu(a)                 run a on 0
                                move a: 0 -> 1
                                run b on 1
                                move b: 1 -> cpu      (output)

An *instance* is a value on a device. A value reaches a device at most once, and is freed there after its
last reader. Devices are keys, as in ``max_memory``; the caller's own device, from which inputs come and to
which outputs return, is ``host``.

Weights that reside on the CPU, or on disk, and are read on an accelerator are *streamed*: a *segment* (the
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
"""Most bytes of each of the two host buffers through which weights on disk pass to a prefetch buffer."""

MoveKind = Literal["activation", "weight", "input", "output", "writeback", "gradient"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where each operation runs and each weight resides: the decision of a search.

    Attributes:
        operations: operation name -> device key.
        weights: weight name -> device key.
        slots: device key -> slots of its prefetch buffer: fewer if there are fewer segments, more if more
            segments are in use at once. With 0, for calls whose weights autograd keeps, there is no prefetch
            buffer, and each weight is copied right before its first reader. A device that is not named has
            two slots, or one if two do not fit.
    """

    operations: Mapping[str, DeviceKey]
    weights: Mapping[str, DeviceKey]
    slots: Mapping[DeviceKey, int] = field(default_factory=dict)


def read_in_place(topology: Topology, assignment: Assignment) -> Iterator[tuple[str, DeviceKey]]:
    """Yield (weight, device) for weights on disk that a device reads there: the CPU, page by page."""
    memory = [spec.key for spec in topology.devices if spec.type == CPU]
    if DISK in topology:
        on_disk = [name for name, key in assignment.weights.items() if key == DISK]
        yield from ((name, key) for name in on_disk for key in memory)


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one value or weight, of ``nbytes``, to another device.

    A ``"writeback"`` copies an input that forward has changed into the caller's own tensor; a ``"gradient"``
    is copied to the device of its parameter.
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
    """Each run of an operation on a device, made once: a search writes thousands of schedules of them."""

    def __missing__(self, key: tuple[str, DeviceKey]) -> Run:
        run = self[key] = Run(*key)
        return run


@dataclass(frozen=True, slots=True)
class Load:
    """Enqueue the copy of a segment into its slot; it starts when the slot's last readers are done.

    Attributes:
        segment: its index in the prefetch buffer.
        device: the accelerator whose prefetch buffer it is.
        source: device where the weights reside.
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
    """Let later steps on a device wait until a segment is there; its weights can be read then."""

    segment: int
    device: DeviceKey


@dataclass(frozen=True, slots=True)
class Release:
    """All readers of a segment are enqueued; its slot may be loaded again after them."""

    segment: int
    device: DeviceKey


Step = Move | Run | Load | Wait | Release


def backward_start(graph: Graph, steps: Sequence[Step]) -> int:
    """Return how many steps belong to the forward pass; all, if there is no backward pass.

    The caller's code runs between the two passes, so the forward pass includes the moves of the results.
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
    while start < len(steps) and isinstance(steps[start], Release):  # of the last readers' segments
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
        previous: index of the segment that is in the slot before it; for the first segment of a slot, the
            slot's last one, from the call before.
    """

    weights: tuple[str, ...]
    offsets: tuple[int, ...]
    nbytes: int
    slot: int
    previous: int


@dataclass(frozen=True, slots=True)
class PrefetchBuffer:
    """The slots of an accelerator into which weights are streamed. It exists as long as the module.

    Attributes:
        device: key of the accelerator.
        source: device where the streamed weights reside; a load says if its weights are on disk instead.
        slots: bytes of each slot; they lie one after another.
        segments: in the order in which they are copied.
        nbytes: bytes of the storage; more than all ``slots`` if other calls that share it need more.
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
    """Return device -> bytes of the largest of these prefetch buffers there."""
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
        """Yield the moves of these kinds, or all, in order."""
        moves = (step for step in self.steps if isinstance(step, Move))
        return (move for move in moves if not kinds or move.kind in kinds)

    def runs(self) -> Iterator[Run]:
        """Yield the runs, in order."""
        return (step for step in self.steps if isinstance(step, Run))

    def loads(self) -> Iterator[Load]:
        """Yield the copies of segments, in order."""
        return (step for step in self.steps if isinstance(step, Load))

    def copies(self) -> Iterator[Move | Load]:
        """Yield all copies between devices, in order."""
        return (step for step in self.steps if isinstance(step, Move | Load))

    def weight_copies(self) -> Iterator[Move | Load]:
        """Yield the copies of weights to where they are used, in order."""
        return (copy for copy in self.copies() if isinstance(copy, Load) or copy.kind == "weight")

    def segment(self, step: Load | Wait | Release) -> PrefetchSegment:
        """Return the segment that a step copies, waits for or releases."""
        buffer = next(buffer for buffer in self.prefetch_buffers if buffer.device == step.device)
        return buffer.segments[step.segment]

    def with_prefetch_buffers(self, sizes: Mapping[DeviceKey, int], topology: Topology) -> Schedule:
        """Return the same schedule with a prefetch buffer of at least so many bytes on each of these devices.

        Existing buffers keep their indices, by which the lowered code refers to them.
        """
        cpu = next((spec.key for spec in topology.devices if spec.type == CPU), CPU)
        existing = {buffer.device: buffer for buffer in self.prefetch_buffers}
        added = (spec.key for spec in topology.devices if spec.key in sizes and spec.key not in existing)
        buffers = existing | {key: PrefetchBuffer(key, cpu, (), segments=(), nbytes=0) for key in added}
        grown = (replace(one, nbytes=max(one.nbytes, sizes.get(key, 0))) for key, one in buffers.items())
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
