"""Reuse host memory for gradients on the CPU of weights that an accelerator trains.

A GPU copies to pinned memory at the link's bandwidth, to memory that was never written to at a thirtieth of
it. ``optimizer.zero_grad()`` frees the gradients at each step: their pages are kept for the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from graphplan._compat.torch import holders_of_storage
from graphplan.devices.topology import round_up
from graphplan.runtime.memory.arena import shaped
from graphplan.runtime.memory.host_pages import HostPages


@dataclass(frozen=True, slots=True)
class _HostBuffer:
    """Host memory, and the reference count of its storage while no gradient uses it."""

    bytes: torch.Tensor
    holders: int

    def can_hold(self, nbytes: int) -> bool:
        """Whether this buffer has ``nbytes``, and no gradient uses it, here or in another process."""
        free = holders_of_storage(self.bytes) == self.holders and not self.bytes.is_shared()
        return free and nbytes <= self.bytes.nbytes


class GradientCopies:
    """The host memory of one module's gradients that come from accelerators."""

    def __init__(self) -> None:
        self._first = WeakTensorKeyDictionary()  # parameter -> buffer of its first gradient
        self._added: _HostBuffer | None = None  # one for all gradients that are added to existing ones

    def copied(self, gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """Return an unshared copy of a gradient, with the layout of its parameter."""
        first = parameter.grad is None
        buffer: _HostBuffer | None = self._first.get(parameter) if first else self._added
        if buffer is None or not buffer.can_hold(parameter.nbytes):
            pages = HostPages(round_up(parameter.nbytes), pinned=gradient.is_cuda)
            data = pages.piece(0, max(parameter.nbytes, 1))  # torch makes no tensor over 0 bytes
            buffer = _HostBuffer(data, holders_of_storage(data))
            if first:
                self._first[parameter] = buffer
            else:
                self._added = buffer
        return shaped(buffer.bytes[: parameter.nbytes], parameter).copy_(gradient)
