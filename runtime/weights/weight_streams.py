"""Stream weights from host memory into the prefetch buffer of each accelerator: copies, slots, events.

Each accelerator of a module has one storage, divided into slots by the plan, and a copy queue besides the
compute queue. A slot has two events. ``ready`` is recorded after the copy of a segment, and computation that
reads the segment waits for it. ``free`` is recorded after the last reader, and the next copy into the slot,
of this forward pass or the next, waits for it. The host waits for nothing. Forward passes of one module are
serialized by a lock, since they share the prefetch buffer.

A forward pass reads the values that a CPU parameter has when the copy runs. Once results are on the CPU, all
copies are complete; if results stay on the accelerator, synchronize before writing to a streamed parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphplan.capture.model.model_weights import identity, tensor_bytes
from graphplan.devices.topology import CPU, round_up
from graphplan.errors import PlanError
from graphplan.ir.schedule import STAGED_BYTES, PrefetchBuffer, PrefetchSegment
from graphplan.message_text import readable_bytes
from graphplan.runtime.checkpoint.mapped_files import MappedFile
from graphplan.runtime.memory.allocation import allocating
from graphplan.runtime.memory.arena import shaped
from graphplan.runtime.memory.copy_queues import Queues, queues_of
from graphplan.runtime.memory.host_pages import HostPages, Pages
from graphplan.runtime.memory.pinned_buffers import Staging, flat_bytes
from graphplan.runtime.weights.weight_changes import require_planned

_BUFFERS = 2
_CALLED_DURING_BACKWARD = (
    "a hook has called the model during its backward pass: both stream weights into the same memory, so that "
    "the rest of the pass would read wrong ones. Call the model after backward()"
)


class _Storage:
    """The prefetch buffer of one accelerator, shared by the calls of all structures of a module."""

    def __init__(self, device: torch.device, queues: Queues) -> None:
        self.device, self.queues = device, queues
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self.user: object = None  # identifies the stream that used the slots last
        self.unreleased = 0  # segments not yet released: above 0 while a call runs, or after it failed
        self.entries = 0  # how often a call has begun, or resumed after another
        self.staging: Staging | None = None  # for weights that are streamed from files
        weakref.finalize(self, self.queues.synchronize).atexit = False

    def enter(self, user: object, segments: int) -> None:
        """Begin or resume a call with this number of segments still to load.

        After a call of another structure, or one that failed, copies wait for all earlier computation.
        """
        continues = self.user is user and self.unreleased <= 0
        self.unreleased = segments
        self.entries += 1
        self.queues.adopt_current_stream()
        if not continues:
            self.queues.copies_wait_for_all_work()
        self.user = user

    def stage(self, nbytes: int) -> None:
        """Provide staging buffers for copies from files of segments of up to this size."""
        nbytes = min(nbytes, STAGED_BYTES)
        if self.staging is None or self.staging.nbytes < nbytes:
            self.queues.synchronize()
            self.staging = None  # freed before the larger ones are allocated
            self.staging = Staging(self.queues, nbytes, _BUFFERS, pinned=self.device.type == "cuda")

    def grow(self, nbytes: int) -> None:
        """Enlarge the storage to this size. Streams over the smaller one must no longer be used."""
        if self.bytes.numel() >= nbytes:
            return
        self.queues.synchronize()  # another stream may reuse the freed memory at once
        self.user = None
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self.device)  # freed before the next allocation
        with allocating(self.device, f"the {readable_bytes(nbytes)} that weights are streamed into"):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.queues.adopt_current_stream()  # copies follow earlier work of this stream on the memory


class _LoadedSegment:
    """A segment in host memory and in the prefetch buffer; a value in a lowered graph.

    Args:
        segment: the planned segment.
        slot: bytes that it is loaded into, and the events ``ready`` and ``free``.
        storage: the storage of the slot. It has no reference to segments: cycles would keep device memory.
        weights: the segment's weights on the host.
        source: its bytes in host memory if they are contiguous, else None.
        parts: offset -> bytes of a weight in a mapped file; empty if the segment is in memory.
    """

    def __init__(
        self,
        segment: PrefetchSegment,
        slot: tuple[torch.Tensor, Any, Any],
        storage: _Storage,
        weights: Sequence[torch.Tensor],
        source: torch.Tensor | None,
        parts: Mapping[int, torch.Tensor],
    ) -> None:
        self.parts = parts
        self.storage, self.queues = storage, storage.queues
        self.names = segment.weights
        buffer, self.ready, self.free = slot
        self.target, self.source = buffer[: segment.nbytes], source
        self.views = tuple(
            shaped(self.target[offset : offset + tensor_bytes(weight)], weight)
            for offset, weight in zip(segment.offsets, weights, strict=True)
        )
        self.layouts = tuple(map(_layout, weights))
        self.entry = 0
        self.host = weights[0].device
        self.recorded: Sequence[torch.Tensor] = ()

    def load(self, weights: Sequence[torch.Tensor]) -> None:
        """Enqueue the copy, after the last reader of the slot's previous segment."""
        self.entry = self.storage.entries
        # torch.jit.trace drops writes to memory that is older than the trace
        self.recorded = weights if torch.jit.is_tracing() else ()  # type: ignore[attr-defined, no-untyped-call]
        self.queues.copies_wait(self.free)
        in_place = tuple(map(_layout, weights)) == self.layouts
        staging = self.storage.staging
        if in_place and self.parts and staging is not None:
            staging.copy(self.target, self.parts)
        elif in_place and self.source is not None:
            self.queues.copy(self.target, self.source)
        else:  # the caller has replaced a weight, or they are not contiguous: copy one by one
            for name, view, weight in zip(self.names, self.views, weights, strict=True):
                require_planned(name, weight, self.host, view.dtype, view.shape)
                self.queues.copy(view, weight)
        self.queues.record_copies(self.ready)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Let the computation wait for the copy; return the segment's weights on the accelerator."""
        self.queues.work_waits(self.ready)
        return tuple(weight.to(self.storage.device) for weight in self.recorded) or self.views

    def await_copy(self) -> None:
        """Let the host wait for the copy, before hooks write to the weights."""
        self.queues.synchronize_event(self.ready)

    def release(self) -> None:
        """Release the slot after the computation that is enqueued so far.

        Raises:
            PlanError: another call has begun since the segment was loaded.
        """
        if self.entry != self.storage.entries:
            raise PlanError(_CALLED_DURING_BACKWARD)
        self.queues.record_work(self.free)
        self.storage.unreleased -= 1


class WeightStream:
    """The slots and segments of one call structure in a prefetch buffer; its generated code loads them.

    Args:
        storage: the storage of the accelerator.
        buffer: the planned slots and segments.
        weights: name -> tensor on the host, of every weight in ``buffer``.
        memory: the host memory of the weights.
    """

    def __init__(
        self,
        storage: _Storage,
        buffer: PrefetchBuffer,
        weights: Mapping[str, torch.Tensor],
        memory: ModuleStreams,
    ) -> None:
        self.storage, self.user = storage, object()
        new_event = storage.queues.event
        slots = [
            (storage.bytes[start : start + nbytes], new_event(), new_event())
            for start, nbytes in zip(buffer.starts, buffer.slots, strict=True)
        ]
        self.segments = []
        for segment in buffer.segments:
            tensors = [weights[name] for name in segment.weights]
            slot, parts = slots[segment.slot], dict[int, torch.Tensor]()
            if all(map(memory.is_in_file, tensors)):
                parts = dict(zip(segment.offsets, map(flat_bytes, tensors), strict=True))
                storage.stage(segment.nbytes)
            source = None if parts else memory.contiguous_bytes(segment, tensors)
            self.segments.append(
                _LoadedSegment(segment, slot, storage, weights=tensors, source=source, parts=parts)
            )

    def __deepcopy__(self, memo: dict[int, object]) -> WeightStream:
        return self  # copies of the generated code share it; a copy of the module makes its own

    def load(self, index: int, *weights: torch.Tensor) -> _LoadedSegment:
        """Enqueue the copy of a segment; the first begins a call.

        A later one resumes the call if another call has run since, as may happen before a backward pass.
        """
        if index == 0 or self.storage.user is not self.user:
            self.storage.enter(self.user, len(self.segments) - index)
        segment = self.segments[index]
        segment.load(weights)
        return segment


class ModuleStreams:
    """The prefetch buffers of a module, and the host memory of the weights that are streamed into them."""

    def __init__(self, make_queues: Callable[[torch.device], Queues] = queues_of) -> None:
        self.make_queues = make_queues
        self.storages: dict[torch.device, _Storage] = {}
        self.pages: list[Pages] = []

    def check_files(self) -> None:
        """Raise CheckpointError if a file that weights are read from has changed."""
        for pages in self.pages:
            if isinstance(pages, MappedFile):
                pages.check()

    def must_grow(self, prefetch_buffers: Mapping[torch.device, PrefetchBuffer]) -> bool:
        """Whether :meth:`prepare` would replace a prefetch buffer that streams may already use."""
        return any(
            0 < self.storages[device].bytes.numel() < buffer.nbytes
            for device, buffer in prefetch_buffers.items()
            if device in self.storages
        )

    def prepare(
        self, prefetch_buffers: Mapping[torch.device, PrefetchBuffer], weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Allocate these prefetch buffers, and gather their weights in host memory.

        Args:
            prefetch_buffers: accelerator -> its prefetch buffer.
            weights: name -> tensor, of all weights and of parts of weights, whose tensor is the whole. The
                data of streamed tensors, and of all that share their memory, moves to the pages.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._gather(prefetch_buffers, weights)
            for device, buffer in prefetch_buffers.items():
                self._storage(device).grow(buffer.nbytes)

    def _storage(self, device: torch.device) -> _Storage:
        if device not in self.storages:
            self.storages[device] = _Storage(device, self.make_queues(device))
        return self.storages[device]

    def _gather(
        self, prefetch_buffers: Mapping[torch.device, PrefetchBuffer], weights: Mapping[str, torch.Tensor]
    ) -> None:
        streamed = [n for buffer in prefetch_buffers.values() for s in buffer.segments for n in s.weights]
        # by object: a weight is copied once, whole, for all of its parts
        candidates = {id(tensor): tensor for name in streamed if (tensor := weights.get(name)) is not None}
        to_copy = [t for t in candidates.values() if _is_plain(t) and not self._pages_of(t)]
        if not to_copy:
            return
        total = sum(round_up(t.numel() * t.element_size()) for t in to_copy)
        pages = HostPages(total, pinned=any(device.type == "cuda" for device in prefetch_buffers))
        by_memory: dict[Any, list[torch.Tensor]] = {}
        for tensor in weights.values():
            by_memory.setdefault(identity(tensor), []).append(tensor)
        for tensor in to_copy:
            data = pages.reserve(tensor.data).copy_(tensor.data)
            for alias in by_memory[identity(tensor)]:
                alias.data = data
        self.pages.append(pages)

    def _pages_of(self, tensor: torch.Tensor) -> Pages | None:
        return next((pages for pages in self.pages if pages.holds(tensor.data_ptr())), None)

    def bind(
        self, device: torch.device, buffer: PrefetchBuffer, weights: Mapping[str, torch.Tensor]
    ) -> WeightStream:
        """Return the weight stream for the code of one call structure."""
        with torch.inference_mode(False), torch.no_grad():
            return WeightStream(self._storage(device), buffer, weights, self)

    def is_in_file(self, weight: torch.Tensor) -> bool:
        """Whether a weight is in a mapped file."""
        return isinstance(self._pages_of(weight), MappedFile)

    def contiguous_bytes(
        self, segment: PrefetchSegment, weights: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """Return a segment's bytes if host memory has its weights laid out as the segment, else None."""
        first, pages = weights[0].data_ptr(), self._pages_of(weights[0])
        offsets = tuple(weight.data_ptr() - first for weight in weights)
        if pages is None or offsets != tuple(segment.offsets) or first + segment.nbytes > pages.end:
            return None
        return pages.piece(first - pages.start, segment.nbytes)


def _layout(weight: torch.Tensor) -> tuple[int, tuple[int, ...], bool]:
    """Return address, strides and conj bit of a weight, which a new ``data`` may change."""
    return weight.data_ptr(), weight.stride(), weight.is_conj()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain CPU tensor without gaps."""
    if tensor.device.type != CPU or type(tensor.data) is not torch.Tensor or tensor.is_inference():
        return False
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
