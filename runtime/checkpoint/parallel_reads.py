"""Read many tensors from files in parallel, directly into their targets where possible.

The threads of a pool read pieces of up to a few MiB. A piece that goes to host memory unchanged is read into
its place. One that is converted, or goes to an accelerator, passes through one of a few staging buffers, so
that host memory never holds more of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch

from graphplan.devices.topology import CPU, round_up
from graphplan.errors import CheckpointError
from graphplan.runtime.checkpoint.safetensors_header import FileState, FileTensor
from graphplan.runtime.memory.copy_queues import queues_of
from graphplan.runtime.memory.host_pages import HostPages
from graphplan.runtime.memory.pinned_buffers import flat_bytes

_CHUNK = 8 << 20  # the most bytes of a piece, and of what a thread reads at a time
_BUFFERS = 4
_THREADS = max(2, min(16, os.cpu_count() or 2))

Progress = Callable[[int], object]
Files = Mapping[FileState, int]
"""File -> its open descriptor."""


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor of a file, and the target of the same shape that is filled with it."""

    source: FileTensor
    target: torch.Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes can be read directly into the target's memory."""
        same_layout = self.target.dtype == self.source.dtype and self.target.is_contiguous()
        return same_layout and self.target.device.type == CPU and type(self.target) is torch.Tensor


def read_into(requests: Sequence[Read], progress: Progress) -> None:
    """Read every requested tensor.

    Raises:
        CheckpointError: a file is gone, or has changed since its header was read.
    """
    pieces = [piece for request in requests if request.source.nbytes for piece in _pieces(request)]
    pieces.sort(key=lambda piece: (str(piece.source.file.path), piece.source.start))
    with _open(piece.source.file for piece in pieces) as files, ThreadPoolExecutor(_THREADS) as pool:
        buffers = _HostBuffers([piece for piece in pieces if not piece.is_direct])
        try:
            for task in as_completed([pool.submit(_fill, b, files, buffers) for b in _batches(pieces)]):
                progress(task.result())
        except BaseException:  # also KeyboardInterrupt: reads that have not started are cancelled
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def _open(states: Iterable[FileState]) -> Iterator[Files]:
    """Context manager that opens the files, and checks that none has changed since its header was read."""
    with ExitStack() as stack:
        files: dict[FileState, int] = {}
        for state in dict.fromkeys(states):
            files[state] = state.open()
            stack.callback(os.close, files[state])
            state.check(files[state])
        yield files


def _pieces(request: Read) -> Iterator[Read]:
    """Yield the request in pieces; in one piece if its target is not contiguous."""
    source, target = request.source, request.target
    if source.nbytes <= _CHUNK or not target.is_contiguous():
        yield request
        return
    start = source.start
    for part in target.view(-1).split(_CHUNK // source.dtype.itemsize):
        yield Read(replace(source, shape=tuple(part.shape), start=start), part)
        start += part.numel() * source.dtype.itemsize


def _batches(pieces: Iterable[Read]) -> Iterator[list[Read]]:
    """Yield the pieces in batches: a task for each small tensor would take longer than to read it."""
    batch, size = list[Read](), 0
    for piece in pieces:
        if batch and size + piece.source.nbytes > _CHUNK:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.source.nbytes
    if batch:
        yield batch


def _fill(batch: Sequence[Read], files: Files, buffers: _HostBuffers) -> int:
    """Fill the targets of a batch, and return its bytes."""
    for piece in batch:
        if piece.is_direct:
            _read(files, piece.source, flat_bytes(piece.target))
        else:
            buffers.fill(files, piece)
    return sum(piece.source.nbytes for piece in batch)


def _read(files: Files, source: FileTensor, buffer: torch.Tensor) -> None:
    """Fill a buffer with the bytes of a tensor."""
    unfilled, start = memoryview(buffer.numpy().data), source.start
    path = source.file.path
    while unfilled:
        try:
            count = os.preadv(files[source.file], [unfilled], start)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{path} was truncated at byte {start} while it was read")
        unfilled, start = unfilled[count:], start + count


class _HostBuffers:
    """Buffers through which pieces are copied; a thread keeps one until its copy is complete."""

    def __init__(self, pieces: Sequence[Read]) -> None:
        self.queues = {device: queues_of(device) for device in {piece.target.device for piece in pieces}}
        for queues in self.queues.values():
            queues.copies_wait_for_all_work()  # earlier work may still read the memory that is filled
        count, nbytes = min(_BUFFERS, len(pieces)), max((piece.source.nbytes for piece in pieces), default=0)
        pinned = any(device.type == "cuda" for device in self.queues)
        pages = HostPages(count * round_up(nbytes), pinned=pinned)
        self.free = SimpleQueue[torch.Tensor]()
        for index in range(count):
            self.free.put(pages.piece(index * round_up(nbytes), nbytes))

    def fill(self, files: Files, piece: Read) -> None:
        """Read a piece and copy it into its target."""
        source, target = piece.source, piece.target
        buffer = self.free.get()
        try:
            data = buffer[: source.nbytes]
            _read(files, source, data)
            data = data.view(source.dtype).view(target.shape)
            if target.device.type != CPU:
                data = data.to(target.dtype)  # on the host, to save accelerator memory
            queues = self.queues[target.device]
            copied = queues.event()
            with torch.no_grad():  # each thread has its own mode
                queues.copy(target, data)
            queues.record_copies(copied)
            queues.synchronize_event(copied)
        finally:
            self.free.put(buffer)
