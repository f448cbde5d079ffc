"""Staging buffers in pinned memory for copies from files to an accelerator.

A GPU copies from pinned memory asynchronously; a copy from pageable memory is slow, and the host waits for
it. A buffer is refilled once the last copy from it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphplan.devices.topology import round_up
from graphplan.runtime.memory.copy_queues import Queues
from graphplan.runtime.memory.host_pages import HostPages


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without gaps, in memory order."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)


class Staging:
    """Several staging buffers of one size, used in turn.

    Args:
        queues: queues of the device to which the buffers are copied.
        nbytes: size of each buffer.
        count: number of buffers.
        pinned: whether a CUDA device copies from them.
    """

    def __init__(self, queues: Queues, nbytes: int, count: int, *, pinned: bool) -> None:
        self.queues, self.nbytes = queues, round_up(nbytes)
        self.pages = HostPages(count * self.nbytes, pinned=pinned)
        self.events = [queues.event() for _ in range(count)]
        self._next = 0

    def take(self) -> int:
        """Return the index of the next buffer, once the last copy from it is complete."""
        index = self._next
        self._next = (index + 1) % len(self.events)
        self.queues.wait(self.events[index])
        return index

    def buffer(self, index: int) -> torch.Tensor:
        """Return the bytes of a buffer."""
        return self.pages.bytes_at(self.pages.start + index * self.nbytes, self.nbytes)

    def give(self, index: int) -> None:
        """Release a buffer after all copies from it are enqueued."""
        self.queues.record_copies(self.events[index])

    def copy(self, target: torch.Tensor, parts: Mapping[int, torch.Tensor]) -> None:
        """Copy ``parts`` (offset in ``target`` -> bytes) into ``target`` through the buffers."""
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
            except BaseException:  # an interrupt in between: no event marks the end of the copy
                self.queues.settle()
                raise
