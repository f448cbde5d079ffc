"""Staging buffers in pinned memory for copies from files to an accelerator.

A GPU copies from pinned memory asynchronously; a copy from pageable memory is slow, and the host waits for
it. A buffer is refilled once the last copy from it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from graphplan.devices.topology import round_up
from graphplan.runtime.memory.copy_queues import Queues
from graphplan.runtime.memory.host_pages import HostPages


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor without gaps, in memory order."""
    return torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class StagingBuffer:
    """Host memory, and the event after the last copy from it."""

    bytes: torch.Tensor
    copied: Any


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
        pages = HostPages(count * self.nbytes, pinned=pinned)
        starts = range(0, count * self.nbytes, self.nbytes)
        self.buffers = [StagingBuffer(pages.piece(s, self.nbytes), queues.event()) for s in starts]
        self._turns = cycle(self.buffers)

    def take(self) -> StagingBuffer:
        """Return the next buffer, once the last copy from it is complete."""
        buffer = next(self._turns)
        self.queues.wait(buffer.copied)
        return buffer

    def give(self, buffer: StagingBuffer) -> None:
        """Release a buffer after all copies from it are enqueued."""
        self.queues.record_copies(buffer.copied)

    def copy(self, target: torch.Tensor, parts: Mapping[int, torch.Tensor]) -> None:
        """Copy ``parts`` (offset in ``target`` -> bytes) into ``target`` through the buffers."""
        for begin in range(0, target.numel(), self.nbytes):
            end = min(begin + self.nbytes, target.numel())
            buffer = self.take()
            for offset, data in parts.items():
                first, last = max(begin, offset), min(end, offset + data.numel())
                if first < last:
                    buffer.bytes[first - begin : last - begin].copy_(data[first - offset : last - offset])
            try:
                self.queues.copy(target[begin:end], buffer.bytes[: end - begin])
                self.give(buffer)
            except BaseException:  # an interrupt in between: no event marks the end of the copy
                self.queues.settle()
                raise
