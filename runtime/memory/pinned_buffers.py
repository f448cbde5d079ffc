"""Staging buffers in pinned memory for copies from files to an accelerator.

A GPU copies from pinned memory asynchronously; a copy from pageable memory is slow, and the host waits for
it. A buffer is reused once the last copy from it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

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
        pages = HostPages(count * self.nbytes, pinned=pinned)
        starts = range(0, count * self.nbytes, self.nbytes)
        self._turns = cycle([(pages.piece(start, self.nbytes), queues.event()) for start in starts])

    def copy(self, target: torch.Tensor, parts: Mapping[int, torch.Tensor]) -> None:
        """Copy ``parts`` (offset in ``target`` -> bytes) into ``target`` through the buffers."""
        for begin in range(0, target.numel(), self.nbytes):
            end = min(begin + self.nbytes, target.numel())
            buffer, copied = next(self._turns)
            self.queues.synchronize_event(copied)  # the last copy from the buffer
            for offset, data in parts.items():
                first, last = max(begin, offset), min(end, offset + data.numel())
                if first < last:
                    buffer[first - begin : last - begin].copy_(data[first - offset : last - offset])
            try:
                self.queues.copy(target[begin:end], buffer[: end - begin])
                self.queues.record_copies(copied)
            except BaseException:  # an interrupt in between: no event marks the end of the copy
                self.queues.synchronize()
                raise
