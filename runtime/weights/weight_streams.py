"""Weights streamed from host memory into the prefetch buffer of each accelerator: copies, slots, events.

Each accelerator of a module has one storage, cut into slots as the plan says, and a queue for copies
beside the one for the call's own work. A slot has two events: ``ready`` is recorded behind the copy of a
segment, and the work that reads it is enqueued behind that; ``free`` is recorded behind the last reader,
and the next copy into the slot, of this call or the next one, is enqueued behind that. The host waits
for nothing. Calls of one module are serialised by a lock, since they share the prefetch buffer.

What a CPU parameter holds when the copy runs is what the call reads. Results that are back on the CPU are
proof that all copies are done; with results left on the accelerator, synchronise before writing to a
parameter that is streamed.
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
_CALLED_WITHIN = (
    "a hook has called the model while its backward pass was under way: both stream weights into the same "
    "memory, so that the rest of the pass would read wrong ones. Call the model after backward()"
)


class _Storage:
    """The prefetch buffer of one accelerator, shared by the calls of all structures of a module."""

    def __init__(self, device: torch.device, queues: Queues) -> None:
        self.device, self.queues = device, queues
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self.user: object = None  # stands for the stream whose slots the last call's events are about
        self.left = 0  # segments that are to be released: a call is under way, or has broken off
        self.entries = 0  # how often a call has begun, or gone on after another
        self.staging: Staging | None = None  # for what is streamed from files
        weakref.finalize(self, self.queues.settle).atexit = False

    def enter(self, user: object, segments: int) -> None:
        """A call begins, or goes on, with so many segments.

        After one of another structure, or one that broke off, all work is waited for.
        """
        follows = self.user is user and self.left <= 0
        self.left = segments
        self.entries += 1
        self.queues.enter()
        if not follows:
            self.queues.join()
        self.user = user

    def stage(self, nbytes: int) -> None:
        """Have buffers for copies of segments of up to so many bytes from files."""
        nbytes = min(nbytes, STAGED_BYTES)
        if self.staging is None or self.staging.nbytes < nbytes:
            self.queues.settle()
            self.staging = None  # before the larger ones are there
            self.staging = Staging(self.queues, nbytes, _BUFFERS, pinned=self.device.type == "cuda")

    def grow(self, nbytes: int) -> None:
        """Make it at least so large. What is bound to a smaller one must be gone."""
        if self.bytes.numel() >= nbytes:
            return
        self.queues.settle()  # memory that goes may be given to another stream at once
        self.user = None
        self.bytes = torch.empty(0, dtype=torch.uint8, device=self.device)  # before the larger one is there
        with allocating(self.device, f"the {readable_bytes(nbytes)} that weights are streamed into"):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.queues.enter()  # what this stream did with the memory before comes first


class _LoadedSegment:
    """A segment's place in host memory and in the prefetch buffer; what a lowered graph passes on.

    Args:
        segment: as planned.
        slot: bytes that it is loaded into, and the events at which these can be read, and loaded anew.
        storage: that has the slot. It knows no segment: cycles would keep device memory.
        weights: on the host.
        source: its bytes in one piece in host memory, or None.
        parts: offset -> its bytes where they are in files; none where it is in memory.
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
        self.storage, self.names, self.queues = storage, segment.weights, storage.queues
        place, self.ready, self.free = slot
        self.place, self.source = place[: segment.nbytes], source
        self.views = tuple(
            shaped(self.place[offset : offset + tensor_bytes(weight)], weight)
            for offset, weight in zip(segment.offsets, weights, strict=True)
        )
        self.layouts = tuple(map(_layout, weights))
        self.entry = 0
        self.host = weights[0].device

    def load(self, weights: Sequence[torch.Tensor]) -> None:
        """Enqueue the copy, behind the last reader of what is in the slot."""
        self.entry = self.storage.entries
        self.queues.copies_wait(self.free)
        in_place = tuple(map(_layout, weights)) == self.layouts
        staging = self.storage.staging
        if in_place and self.parts and staging is not None:
            staging.copy(self.place, self.parts)
        elif in_place and self.source is not None:
            self.queues.copy(self.place, self.source)
        else:  # one that the caller has replaced is read where it is now
            for name, view, weight in zip(self.names, self.views, weights, strict=True):
                require_planned(name, weight, self.host, view.dtype, view.shape)
                self.queues.copy(view, weight)
        self.queues.record_copies(self.ready)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Its weights on the accelerator."""
        self.queues.work_waits(self.ready)
        return self.views

    def await_copy(self) -> None:
        """Let the host wait until it is copied, before hooks write to the weights."""
        self.queues.wait(self.ready)

    def release(self) -> None:
        """Nothing enqueued from now on reads it.

        Raises:
            PlanError: another call has begun since it was loaded.
        """
        if self.entry != self.storage.entries:
            raise PlanError(_CALLED_WITHIN)
        self.queues.record_work(self.free)
        self.storage.left -= 1


class WeightStream:
    """The prefetch buffer as one call structure uses it: what its generated code loads segments with.

    Args:
        storage: of the accelerator.
        buffer: slots and segments, as planned.
        weights: name -> tensor on the host, of every weight in ``buffer``.
        memory: where they are.
    """

    def __init__(
        self,
        storage: _Storage,
        buffer: PrefetchBuffer,
        weights: Mapping[str, torch.Tensor],
        memory: ModuleStreams,
    ) -> None:
        self.storage, self.user = storage, object()
        new = storage.queues.event
        slots = [
            (storage.bytes[start : start + nbytes], new(), new())
            for start, nbytes in zip(buffer.starts, buffer.slots, strict=True)
        ]
        self.segments = []
        for segment in buffer.segments:
            here = [weights[name] for name in segment.weights]
            slot, parts = slots[segment.slot], dict[int, torch.Tensor]()
            if all(map(memory.in_file, here)):
                parts = dict(zip(segment.offsets, map(flat_bytes, here), strict=True))
                storage.stage(segment.nbytes)
            source = None if parts else memory.in_one_piece(segment, [weight.data_ptr() for weight in here])
            self.segments.append(_LoadedSegment(segment, slot, storage, here, source, parts))

    def __deepcopy__(self, memo: dict[int, object]) -> WeightStream:
        return self  # a copy of generated code uses the same buffer; a copy of the module makes its own

    def load(self, index: int, *weights: torch.Tensor) -> _LoadedSegment:
        """Enqueue the copy of a segment; that of the first begins a call.

        Before others, other calls may have come: those of a backward pass.
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
        """Whether :meth:`prepare` would replace a prefetch buffer to which something may be bound."""
        return any(
            0 < self.storages[device].bytes.numel() < buffer.nbytes
            for device, buffer in prefetch_buffers.items()
            if device in self.storages
        )

    def prepare(
        self, prefetch_buffers: Mapping[torch.device, PrefetchBuffer], weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Make room for these prefetch buffers, and bring their weights together in host memory.

        Args:
            prefetch_buffers: by the accelerator that they are on.
            weights: all of the module, and parts: name -> tensor; of a part, the whole. The data of each that
                is streamed is replaced by its copy in the pages, in all tensors over that memory.
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
        # by object: parts of one weight are copied together with it, once
        found = {id(tensor): tensor for name in streamed if (tensor := weights.get(name)) is not None}
        wanted = [t for t in found.values() if _is_plain(t) and not self._pages_of(t)]
        if not wanted:
            return
        total = sum(round_up(t.numel() * t.element_size()) for t in wanted)
        pages = HostPages(total, pinned=any(device.type == "cuda" for device in prefetch_buffers))
        of_one_memory: dict[Any, list[torch.Tensor]] = {}
        for tensor in weights.values():
            of_one_memory.setdefault(identity(tensor), []).append(tensor)
        for tensor in wanted:
            data = pages.reserve(tensor.data).copy_(tensor.data)
            for same in of_one_memory[identity(tensor)]:
                same.data = data
        self.pages.append(pages)

    def _pages_of(self, tensor: torch.Tensor) -> Pages | None:
        return next((pages for pages in self.pages if pages.holds(tensor.data_ptr())), None)

    def bind(
        self, device: torch.device, buffer: PrefetchBuffer, weights: Mapping[str, torch.Tensor]
    ) -> WeightStream:
        """The stream that one call structure's code uses."""
        with torch.inference_mode(False), torch.no_grad():
            return WeightStream(self._storage(device), buffer, weights, self)

    def in_file(self, weight: torch.Tensor) -> bool:
        """Whether a weight is in a file."""
        return isinstance(self._pages_of(weight), MappedFile)

    def in_one_piece(self, segment: PrefetchSegment, addresses: Sequence[int]) -> torch.Tensor | None:
        """A segment's bytes, where its weights lie in host memory as they do in the segment; else None."""
        first = addresses[0]
        for pages in self.pages:
            if pages.holds(first) and first + segment.nbytes <= pages.end:
                planned = tuple(first + offset for offset in segment.offsets)
                return pages.bytes_at(first, segment.nbytes) if tuple(addresses) == planned else None
        return None


def _layout(weight: torch.Tensor) -> tuple[int, tuple[int, ...], bool]:
    """Where a weight lies, and what its bytes there stand for: its ``data`` may become a view of itself."""
    return weight.data_ptr(), weight.stride(), weight.is_conj()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are all that it is, without gaps."""
    if tensor.device.type != CPU or type(tensor.data) is not torch.Tensor or tensor.is_inference():
        return False
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
