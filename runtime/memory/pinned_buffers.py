"""Buffers of pinned memory that bytes pass on their way from a file to an accelerator.

A GPU copies from pinned memory while the host goes on; from other memory the copy is slow, and the
host waits for it. Each buffer is filled again when what was copied from it last has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from graphplan.devices.topology import round_up
from graphplan.runtime.memory.copy_queues import Queues
from graphplan.runtime.memory.host_pages import HostPages

__all__ = ["StagedPart", "Staging", "flat_bytes"]


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Bytes that go to ``offset`` of what is copied."""

    offset: int
    data: torch.Tensor


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without gaps, in the order of its memory."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)


class Staging:
    """Some buffers of one size, used in turn.

    Args:
        queues: of the accelerator that copies from them; not used where the caller copies itself.
        nbytes: of each buffer.
        count: how many.
        pinned: whether a CUDA device copies from them.
    """

    def __init__(self, queues: Queues, nbytes: int, count: int, *, pinned: bool) -> None:
        self.queues, self.nbytes = queues, round_up(nbytes)
        self.pages = HostPages(count * self.nbytes, pinned=pinned)
        self.events = [queues.event() for _ in range(count)]
        self._next = 0

    def take(self) -> int:
        """The index of the next buffer, once what was copied from it has arrived."""
        index = self._next
        self._next = (index + 1) % len(self.events)
        self.queues.wait(self.events[index])
        return index

    def buffer(self, index: int) -> torch.Tensor:
        """Its bytes."""
        return self.pages.bytes_at(self.pages.start + index * self.nbytes, self.nbytes)

    def give(self, index: int) -> None:
        """All copies from it are enqueued."""
        self.queues.record_copies(self.events[index])

    def copy(self, target: torch.Tensor, parts: Iterable[StagedPart]) -> None:
        """Bring parts together, and copy all of them to the bytes of ``target``."""
        listed, total = list(parts), target.numel()
        for begin in range(0, total, self.nbytes):
            end = min(begin + self.nbytes, total)
            index = self.take()
            buffer = self.buffer(index)
            for part in listed:
                first = max(begin, part.offset)
                last = min(end, part.offset + part.data.numel())
                if first < last:
                    taken = part.data[first - part.offset : last - part.offset]
                    buffer[first - begin : last - begin].copy_(taken)
            try:
                self.queues.copy(target[begin:end], buffer[: end - begin])
                self.give(index)
            except BaseException:  # an interrupt in between: the buffer is read, and no event says so
                self.queues.drain()
                raise
