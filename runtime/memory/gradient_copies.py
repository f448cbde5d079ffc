"""Gradients on the CPU of weights that an accelerator has trained: host memory that is used again.

A GPU copies to pinned memory at the link's bandwidth, to memory that nobody has written to yet at a thirtieth
of it. ``optimizer.zero_grad()`` gives gradients back at each step: the pages of each are kept for the next.
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
class _Place:
    """Host memory, and how many have it while no gradient is there."""

    bytes: torch.Tensor
    holders: int

    def takes(self, nbytes: int) -> bool:
        """Whether it is large enough, and nobody has it, in this process or one that it was sent to."""
        free = holders_of_storage(self.bytes) == self.holders and not self.bytes.is_shared()
        return free and nbytes <= self.bytes.nbytes


class GradientCopies:
    """The host memory of gradients that come from accelerators, of one module."""

    def __init__(self) -> None:
        self._first = WeakTensorKeyDictionary()  # of each parameter
        self._added: _Place | None = None  # of what is added to a gradient that is there, one after the other

    def copied(self, gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        """A copy of a gradient that nobody else has, laid out as its parameter."""
        first = parameter.grad is None
        place: _Place | None = self._first.get(parameter) if first else self._added
        if place is None or not place.takes(parameter.nbytes):
            pages = HostPages(round_up(parameter.nbytes), pinned=gradient.is_cuda)
            made = pages.bytes_at(pages.start, max(parameter.nbytes, 1))  # none over no bytes
            place = _Place(made, holders_of_storage(made))
            if first:
                self._first[parameter] = place
            else:
                self._added = place
        return shaped(place.bytes[: parameter.nbytes], parameter).copy_(gradient)
