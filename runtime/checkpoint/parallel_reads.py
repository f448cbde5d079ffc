"""Read many tensors from files in parallel, directly into their targets where possible.

One read covers tensors that are adjacent in a file, up to a few MiB; several reads run in parallel. Tensors
that go to host memory unchanged are read directly into it. Tensors that are converted, or go to an
accelerator, pass through a few staging buffers, so that host memory never holds more of them. For three
adjacent tensors in a file, the last of another dtype than the model's::

    one read of a, b      -> targets of a and b
    one read of c         -> staging buffer -> converted into the target of c
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
from graphplan.runtime.memory.pinned_buffers import Staging, StagingBuffer, flat_bytes

_CHUNK = 8 << 20  # the most bytes of one read
_MOST_TENSORS = 256  # in one read
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
    def direct(self) -> bool:
        """Whether the file's bytes can be read directly into the target's memory."""
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
        except BaseException:  # also KeyboardInterrupt: reads that have not started are cancelled
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def _opened(states: Iterable[FileState]) -> Iterator[Files]:
    """Context manager that opens the files, and checks that none has changed since its header was read."""
    with ExitStack() as stack:
        files: dict[FileState, int] = {}
        for state in dict.fromkeys(states):
            files[state] = state.open()
            stack.callback(os.close, files[state])
            state.check(files[state])
        yield files


def _read(files: Files, batch: Sequence[Read], buffers: Iterable[torch.Tensor]) -> None:
    """Fill the buffers, one after another, with the bytes of a batch of adjacent tensors."""
    state, start = batch[0].source.file, batch[0].source.start
    unfilled = deque(memoryview(buffer.numpy().data) for buffer in buffers)
    while unfilled:
        try:
            count = os.preadv(files[state], list(unfilled), start)
        except OSError as error:
            raise CheckpointError(f"{state.path} cannot be read: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{state.path} was cut short at byte {start} while it was read")
        start += count
        while unfilled and count >= len(unfilled[0]):
            count -= len(unfilled.popleft())
        if count:
            unfilled[0] = unfilled[0][count:]


def _batches(requests: Iterable[Read]) -> Iterator[list[Read]]:
    """Yield batches of adjacent pieces, as many as one read may cover."""
    pieces = chain.from_iterable(map(_pieces, requests))
    batch: list[Read] = []
    for piece in sorted(pieces, key=lambda piece: (str(piece.source.file.path), piece.source.start)):
        if batch and not _may_join(batch, piece):
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _may_join(batch: Sequence[Read], piece: Read) -> bool:
    """Whether a piece directly follows a batch in its file, and fits into the same read."""
    last, source = batch[-1].source, piece.source
    adjacent = (last.file, last.end) == (source.file, source.start)
    return adjacent and source.end - batch[0].source.start <= _CHUNK and len(batch) < _MOST_TENSORS


def _pieces(request: Read) -> Iterator[Read]:
    """Yield the request in pieces of at most one read each; in one piece if its target is not contiguous."""
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
    queues.join()  # earlier work may still read the memory that is filled
    largest = max(sum(round_up(piece.source.nbytes) for piece in batch) for batch in batches)
    staging = Staging(queues, largest, min(_BUFFERS, len(batches)), pinned=device.type == "cuda")
    under_way: deque[tuple[Sequence[Read], StagingBuffer, Future[None]]] = deque()

    def finish() -> None:
        batch, buffer, reading = under_way.popleft()
        reading.result()
        for piece, part in zip(batch, _slices(batch, buffer.bytes), strict=True):
            queues.copy(piece.target, _converted(piece, part))
        staging.give(buffer)
        progress(_nbytes(batch))

    try:
        for batch in batches:
            if len(under_way) == len(staging.buffers):
                finish()
            buffer = staging.take()
            slices = list(_slices(batch, buffer.bytes))
            under_way.append((batch, buffer, pool.submit(_read, files, batch, slices)))
        while under_way:
            finish()
    finally:
        queues.settle()  # before the buffers are freed


def _slices(batch: Sequence[Read], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the aligned slice of a buffer for each piece."""
    offset = 0
    for piece in batch:
        yield buffer[offset : offset + piece.source.nbytes]
        offset += round_up(piece.source.nbytes)


def _converted(piece: Read, part: torch.Tensor) -> torch.Tensor:
    """Return a piece as a tensor; for an accelerator, converted on the host to save accelerator memory."""
    data = part.view(piece.source.dtype).view(piece.target.shape)
    return data if piece.target.device.type == CPU else data.to(piece.target.dtype)
