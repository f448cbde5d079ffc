"""One allocation of a device for many weights, each of which has its own storage.

With views of one large storage, saving a bias would write all weights, and libraries that look for shared
weights by storage would find all of them shared. So each weight gets a storage over its own bytes, which
keeps the allocation alive; the allocation is freed with the last of them. For two weights of 1000 and 100
bytes::

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
    """Whether a tensor is dense: no wrapper of other tensors, not sparse, without pending conj or neg."""
    data = tensor.detach()
    plain_class = type(data) in (torch.Tensor, SimulatedTensor)
    return plain_class and data.layout is torch.strided and not (data.is_conj() or data.is_neg())


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on a device.

    A wrapper of other tensors, such as a quantised weight, is rebuilt from copies of its inner tensors: its
    own ``.to`` may not support the device.
    """
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if isinstance(tensor, torch.nn.Parameter) and issubclass(type(tensor), torch.nn.Parameter):
        tensor = tensor.as_subclass(torch.Tensor)  # ``.to`` of a subclass may do more
    if flatten is None or isinstance(tensor, torch.nn.Parameter | SimulatedTensor):
        return tensor.to(device, copy=True)
    names, context = flatten()
    inner = {name: moved(getattr(tensor, name).detach(), device) for name in names}
    wrapper_class: Any = type(tensor)
    wrapper: torch.Tensor = wrapper_class.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return wrapper


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy of ``tensor``: its own if there are no gaps between its elements."""
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return tuple(torch.empty_like(like).stride())


def shaped(place: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View bytes as a tensor with the dtype, shape and strides of a copy of ``like``."""
    return torch.as_strided(place.view(like.dtype), like.size(), dense_strides(like))


class Arena:
    """The memory of a device's weights.

    Args:
        device: device of the allocation.
        nbytes: total size of the weights, each rounded up to the allocation granularity.

    Raises:
        GraphplanError: the device has no room.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        with allocating(device, f"the {readable_bytes(nbytes)} of weights that reside there"):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def reserve(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor over the next free bytes, with the layout of a copy of ``like``."""
        place = _with_own_storage(self.bytes[self._used : self._used + like.nbytes])
        self._used += round_up(like.nbytes)
        return shaped(place, like)


def _with_own_storage(piece: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same bytes with its own storage, which keeps the piece alive."""
    if isinstance(piece, SimulatedTensor):
        return piece.with_separate_storage()
    return from_dlpack(piece) if piece.numel() else torch.empty_like(piece)
