"""Many tensors read from files at once, straight to where they are going.

Tensors that lie next to each other in a file are read by one call, several calls run side by side, each
of at most some MiB. What goes to host memory unchanged is read right into it; what is converted, or goes
to an accelerator, passes a few buffers, so that no more of the model than those is in host memory. For
three tensors next to each other in a file, the last of another dtype than the model's::

    one read of a, b      -> the places of a and b
    one read of c         -> a buffer -> converted to the place of c
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from graphplan.devices.topology import CPU, round_up
from graphplan.errors import CheckpointError
from graphplan.runtime.checkpoint.safetensors_header import Entry, FileHeader
from graphplan.runtime.memory.copy_queues import Queues, SerialQueues, queues_of
from graphplan.runtime.memory.pinned_buffers import Staging, flat_bytes

__all__ = ["Request", "read_into"]

_CHUNK = 8 << 20  # bytes of one read
_MOST = 256  # tensors in one read
_BUFFERS = 4
_THREADS = max(2, min(16, os.cpu_count() or 2))

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Request:
    """A tensor of a file, and the tensor of the same shape that is to hold it."""

    header: FileHeader
    entry: Entry
    target: torch.Tensor

    @property
    def direct(self) -> bool:
        """Whether the file's bytes are the target's as they are."""
        same = self.target.dtype == self.entry.dtype and self.target.is_contiguous()
        return same and self.target.device.type == CPU and type(self.target) is torch.Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of a tensor: ``nbytes`` of the file from ``start`` on, of ``dtype`` there."""

    start: int
    nbytes: int
    dtype: torch.dtype
    target: torch.Tensor


@dataclass(slots=True)
class _Batch:
    """Pieces next to each other in a file."""

    path: Path
    pieces: list[_Piece]
    nbytes: int

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def end(self) -> int:
        last = self.pieces[-1]
        return last.start + last.nbytes

    @property
    def room(self) -> int:
        """Bytes of a buffer that holds each piece at an aligned place."""
        return sum(round_up(piece.nbytes) for piece in self.pieces)


def read_into(requests: Sequence[Request], progress: Progress) -> None:
    """Read every requested tensor.

    Raises:
        CheckpointError: a file is gone, or has changed since its header was read.
    """
    filled = [request for request in requests if request.entry.nbytes]
    by_device: dict[torch.device, list[Request]] = {}
    for request in filled:
        if not request.direct:
            by_device.setdefault(request.target.device, []).append(request)
    with _Files(filled) as files, ThreadPoolExecutor(_THREADS) as pool:
        try:
            _read_direct(_batches([r for r in filled if r.direct]), files, pool, progress)
            for device, group in by_device.items():
                _read_staged(device, list(_batches(group)), files, pool, progress)
        except BaseException:  # an interrupt too: what is not begun need not be
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class _Files:
    """The files of some requests, open, and as their headers say."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.headers = {request.header.path: request.header for request in requests}
        self.open: dict[Path, int] = {}

    def __enter__(self) -> _Files:
        try:
            for path, header in self.headers.items():
                self.open[path] = os.open(path, os.O_RDONLY)
                state = os.fstat(self.open[path])
                if (state.st_size, state.st_mtime_ns) != (header.size, header.changed_ns):
                    raise CheckpointError(f"{path} has changed since its header was read: load it again")
        except OSError as error:
            self.__exit__()
            raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error
        except CheckpointError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.open.values():
            os.close(file)
        self.open.clear()

    def read(self, path: Path, start: int, buffers: Sequence[torch.Tensor]) -> None:
        """Fill buffers one after another with what is in a file from ``start`` on."""
        left = deque(memoryview(buffer.numpy().data) for buffer in buffers)
        while left:
            try:
                count = os.preadv(self.open[path], list(left), start)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointError(f"{path} was cut short at byte {start} while it was read")
            start += count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]


def _batches(requests: Sequence[Request]) -> Iterator[_Batch]:
    batch: _Batch | None = None
    for request in sorted(requests, key=lambda r: (str(r.header.path), r.entry.start)):
        for piece in _pieces(request):
            if batch is not None and (
                batch.path != request.header.path
                or batch.end != piece.start
                or batch.nbytes + piece.nbytes > _CHUNK
                or len(batch.pieces) == _MOST
            ):
                yield batch
                batch = None
            if batch is None:
                batch = _Batch(request.header.path, [], 0)
            batch.pieces.append(piece)
            batch.nbytes += piece.nbytes
    if batch is not None:
        yield batch


def _pieces(request: Request) -> Iterator[_Piece]:
    """A tensor in parts of at most one read each; one that is not contiguous in whole."""
    entry, target = request.entry, request.target
    if not target.is_contiguous():
        yield _Piece(entry.start, entry.nbytes, entry.dtype, target)
        return
    flat, size = target.view(-1), entry.dtype.itemsize
    step = _CHUNK // size
    for first in range(0, flat.numel(), step):
        part = flat[first : first + step]
        yield _Piece(entry.start + first * size, part.numel() * size, entry.dtype, part)


def _read_direct(
    batches: Iterator[_Batch], files: _Files, pool: ThreadPoolExecutor, progress: Progress
) -> None:
    def read(batch: _Batch) -> int:
        files.read(batch.path, batch.start, [flat_bytes(piece.target) for piece in batch.pieces])
        return batch.nbytes

    for done in as_completed([pool.submit(read, batch) for batch in batches]):
        progress(done.result())


def _read_staged(
    device: torch.device,
    batches: Sequence[_Batch],
    files: _Files,
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    queues: Queues = SerialQueues() if device.type == CPU else queues_of(device)
    queues.join()  # the memory that is filled may have had other readers
    largest = max(batch.room for batch in batches)
    staging = Staging(queues, largest, min(_BUFFERS, len(batches)), pinned=device.type == "cuda")
    under_way: deque[tuple[_Batch, int, Future[None]]] = deque()

    def finish() -> None:
        batch, index, reading = under_way.popleft()
        reading.result()
        for piece, part in zip(batch.pieces, _places(batch, staging.buffer(index)), strict=True):
            queues.copy(piece.target, _converted(piece, part))
        staging.give(index)
        progress(batch.nbytes)

    try:
        for batch in batches:
            if len(under_way) == len(staging.events):
                finish()
            index = staging.take()
            places = list(_places(batch, staging.buffer(index)))
            under_way.append((batch, index, pool.submit(files.read, batch.path, batch.start, places)))
        while under_way:
            finish()
    finally:
        queues.drain()  # before the buffers go


def _places(batch: _Batch, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    at = 0
    for piece in batch.pieces:
        yield buffer[at : at + piece.nbytes]
        at += round_up(piece.nbytes)


def _converted(piece: _Piece, part: torch.Tensor) -> torch.Tensor:
    """What was read, in the target's dtype; on the host, where the accelerator's memory is not needed."""
    data = part.view(piece.dtype).view(piece.target.shape)
    return data if piece.target.device.type == CPU else data.to(piece.target.dtype)
