"""Buffers of pinned memory that bytes pass on their way from a file to an accelerator.

A GPU copies from pinned memory while the host goes on; from other memory the copy is slow, and the
host waits for it. Each buffer is filled again when what was copied from it last has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphplan.devices.topology import round_up
from graphplan.runtime.memory.copy_queues import Queues
from graphplan.runtime.memory.host_pages import HostPages


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

    def copy(self, target: torch.Tensor, parts: Mapping[int, torch.Tensor]) -> None:
        """Copy parts, each by its offset in ``target``, to the bytes of that."""
        for begin in range(0, target.numel(), self.nbytes):
            end = min(begin + self.nbytes, target.numel())
            index = self.take()
            buffer = self.buffer(index)
            for offset, data in parts.items():
                first, last = max(begin, offset), min(end, offset + data.numel())
                if first < last:
                    buffer[first - begin : last - begin].copy_(data[first - offset : last - offset])
            try:
                self.queues.copy(target[begin:end], buffer[: end - begin])
                self.give(index)
            except BaseException:  # an interrupt in between: the buffer is read, and no event says so
                self.queues.settle()
                raise
