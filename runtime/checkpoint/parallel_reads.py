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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch

from graphplan.devices.topology import CPU, round_up
from graphplan.errors import CheckpointError
from graphplan.runtime.checkpoint.safetensors_header import FileState, FileTensor
from graphplan.runtime.memory.copy_queues import queues_of
from graphplan.runtime.memory.pinned_buffers import Staging, flat_bytes

_CHUNK = 8 << 20  # bytes of one read
_MOST = 256  # tensors in one read
_BUFFERS = 4
_THREADS = max(2, min(16, os.cpu_count() or 2))

Progress = Callable[[int], object]
Files = Mapping[FileState, int]
"""Descriptors of open files."""


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor of a file, and the tensor of the same shape that is to hold it."""

    source: FileTensor
    target: torch.Tensor

    @property
    def direct(self) -> bool:
        """Whether the file's bytes are the target's as they are."""
        same = self.target.dtype == self.source.dtype and self.target.is_contiguous()
        return same and self.target.device.type == CPU and type(self.target) is torch.Tensor


def read_into(requests: Sequence[Read], progress: Progress) -> None:
    """Read every requested tensor.

    Raises:
        CheckpointError: a file is gone, or has changed since its header was read.
    """
    filled = [request for request in requests if request.source.nbytes]
    by_device: dict[torch.device, list[Read]] = {}
    for request in filled:
        if not request.direct:
            by_device.setdefault(request.target.device, []).append(request)
    with _opened(request.source.file for request in filled) as files, ThreadPoolExecutor(_THREADS) as pool:
        try:
            _read_direct(_batches(request for request in filled if request.direct), files, pool, progress)
            for device, group in by_device.items():
                _read_staged(device, list(_batches(group)), files, pool, progress)
        except BaseException:  # an interrupt too: what is not begun need not be
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def _opened(states: Iterable[FileState]) -> Iterator[Files]:
    """Files, open, and as their headers say."""
    with ExitStack() as stack:
        files: dict[FileState, int] = {}
        for state in dict.fromkeys(states):
            files[state] = state.open()
            stack.callback(os.close, files[state])
            state.check(files[state])
        yield files


def _read(files: Files, batch: Sequence[Read], buffers: Iterable[torch.Tensor]) -> None:
    """Fill buffers one after another with what a batch has in its file."""
    state, start = batch[0].source.file, batch[0].source.start
    left = deque(memoryview(buffer.numpy().data) for buffer in buffers)
    while left:
        try:
            count = os.preadv(files[state], list(left), start)
        except OSError as error:
            raise CheckpointError(f"{state.path} cannot be read: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{state.path} was cut short at byte {start} while it was read")
        start += count
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]


def _batches(requests: Iterable[Read]) -> Iterator[list[Read]]:
    """Pieces that lie next to each other in a file, as many as one read takes."""
    pieces = chain.from_iterable(map(_pieces, requests))
    batch: list[Read] = []
    for piece in sorted(pieces, key=lambda piece: (str(piece.source.file.path), piece.source.start)):
        if batch and not _goes_on(batch, piece):
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _goes_on(batch: Sequence[Read], piece: Read) -> bool:
    """Whether a piece is behind a batch, and may be read with it."""
    last, source = batch[-1].source, piece.source
    behind = (last.file, last.end) == (source.file, source.start)
    return behind and source.end - batch[0].source.start <= _CHUNK and len(batch) < _MOST


def _pieces(request: Read) -> Iterator[Read]:
    """A tensor in parts of at most one read each; one that is not contiguous in whole."""
    source, target = request.source, request.target
    if source.nbytes <= _CHUNK or not target.is_contiguous():
        yield request
        return
    start = source.start
    for part in target.view(-1).split(_CHUNK // source.dtype.itemsize):
        yield Read(replace(source, shape=tuple(part.shape), start=start), part)
        start += part.numel() * source.dtype.itemsize


def _nbytes(batch: Sequence[Read]) -> int:
    return batch[-1].source.end - batch[0].source.start


def _read_direct(
    batches: Iterable[Sequence[Read]], files: Files, pool: ThreadPoolExecutor, progress: Progress
) -> None:
    def read(batch: Sequence[Read]) -> int:
        _read(files, batch, (flat_bytes(piece.target) for piece in batch))
        return _nbytes(batch)

    for done in as_completed([pool.submit(read, batch) for batch in batches]):
        progress(done.result())


def _read_staged(
    device: torch.device,
    batches: Sequence[Sequence[Read]],
    files: Files,
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    queues = queues_of(device)
    queues.join()  # the memory that is filled may have had other readers
    largest = max(sum(round_up(piece.source.nbytes) for piece in batch) for batch in batches)
    staging = Staging(queues, largest, min(_BUFFERS, len(batches)), pinned=device.type == "cuda")
    under_way: deque[tuple[Sequence[Read], int, Future[None]]] = deque()

    def finish() -> None:
        batch, index, reading = under_way.popleft()
        reading.result()
        for piece, part in zip(batch, _places(batch, staging.buffer(index)), strict=True):
            queues.copy(piece.target, _converted(piece, part))
        staging.give(index)
        progress(_nbytes(batch))

    try:
        for batch in batches:
            if len(under_way) == len(staging.events):
                finish()
            index = staging.take()
            places = list(_places(batch, staging.buffer(index)))
            under_way.append((batch, index, pool.submit(_read, files, batch, places)))
        while under_way:
            finish()
    finally:
        queues.settle()  # before the buffers go


def _places(batch: Sequence[Read], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Where a buffer has each piece: at an aligned place."""
    at = 0
    for piece in batch:
        yield buffer[at : at + piece.source.nbytes]
        at += round_up(piece.source.nbytes)


def _converted(piece: Read, part: torch.Tensor) -> torch.Tensor:
    """What was read, in the target's dtype; on the host, where the accelerator's memory is not needed."""
    data = part.view(piece.source.dtype).view(piece.target.shape)
    return data if piece.target.device.type == CPU else data.to(piece.target.dtype)
