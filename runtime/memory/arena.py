"""One allocation of a device, cut into weights that each have a storage of their own.

Views of one large storage would be one to everything that looks at storages: saving a bias would write
them all, and libraries that look for ties would find nothing but ties. So each weight gets a storage
over its own bytes, which keeps the allocation alive; it goes with the last of them. For two weights of
1000 and 100 bytes::

    allocation   |a: 1000 bytes|24|b: 100 bytes|412|
    storages     |-----a-------|  |-----b------|
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from graphplan.devices.topology import round_up
from graphplan.message_text import readable_bytes
from graphplan.runtime.memory.allocation import allocating
from graphplan.runtime.simulate.simulated_tensor import SimulatedTensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are all that it is: no wrapper of others, nothing sparse or lazy."""
    data = tensor.detach()
    known = type(data) in (torch.Tensor, SimulatedTensor)
    return known and data.layout is torch.strided and not (data.is_conj() or data.is_neg())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device.

    A wrapper of other tensors, such as a quantised weight, is made anew from copies of what it wraps: its
    own ``.to`` need not know the device.
    """
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if isinstance(tensor, torch.nn.Parameter) and issubclass(type(tensor), torch.nn.Parameter):
        tensor = tensor.as_subclass(torch.Tensor)  # whose own ``.to`` may do more
    if flatten is None or isinstance(tensor, torch.nn.Parameter | SimulatedTensor):
        return tensor.to(device, copy=True)
    names, context = flatten()
    inner = {name: moved(getattr(tensor, name).detach(), device) for name in names}
    kind: Any = type(tensor)
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a copy of ``tensor``: its own where it has no gaps."""
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return tuple(torch.empty_like(like).stride())


def shaped(place: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes as what a copy of ``like`` would be."""
    return torch.as_strided(place.view(like.dtype), like.size(), dense_strides(like))


class Arena:
    """The memory of a device's weights.

    Args:
        device: where.
        nbytes: of all weights that it is to hold, each rounded up to whole steps.

    Raises:
        GraphplanError: the device has no room.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        with allocating(device, f"the {readable_bytes(nbytes)} of weights that reside there"):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def reserve(self, like: torch.Tensor) -> torch.Tensor:
        """The next free place, as what a copy of ``like`` would be; not written to yet."""
        place = _apart(self.bytes[self._used : self._used + like.nbytes])
        self._used += round_up(like.nbytes)
        return shaped(place, like)


def _apart(piece: torch.Tensor) -> torch.Tensor:
    """The same bytes under a storage of their own, which keeps the piece."""
    if isinstance(piece, SimulatedTensor):
        return piece.apart()
    return from_dlpack(piece) if piece.numel() else torch.empty_like(piece)
