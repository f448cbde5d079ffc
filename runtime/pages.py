"""Host memory that weights are streamed from: one anonymous mapping, page-locked where a GPU reads it.

Weights that are copied together lie next to each other, so that one copy moves them. Each has a storage
of its own over its bytes, so that saving or sharing one of them concerns its bytes alone. The mapping
lives as long as any of them, and is registered with CUDA once, as it is: torch's own allocator of
page-locked memory would round it up to a power of two.
"""

from __future__ import annotations

import mmap
import warnings

import torch

__all__ = ["HostPages"]

_ALIGNMENT = 512


class _Mapping(mmap.mmap):
    """An anonymous mapping that CUDA forgets before it is unmapped."""

    address = 0
    registered = False

    def __del__(self) -> None:
        # not a weakref's callback: mmap unmaps before it calls those
        if self.registered:
            self.registered = False
            torch.cuda.cudart().cudaHostUnregister(self.address)


class HostPages:
    """A mapping, and what it is given out for.

    Args:
        nbytes: of all tensors that it is to hold, each rounded up by :meth:`rounded`.
        pinned: whether a CUDA device copies from it.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._mapping = _Mapping(-1, max(nbytes, 1))
        self.start = self._bytes(0, max(nbytes, 1)).data_ptr()
        self.end = self.start + nbytes
        self.pinned = pinned and self._register(nbytes)
        self._used = 0

    @staticmethod
    def rounded(nbytes: int) -> int:
        """What a tensor of ``nbytes`` takes."""
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def _register(self, nbytes: int) -> bool:
        try:
            code = int(torch.cuda.cudart().cudaHostRegister(self.start, nbytes, 0))
            reason = "" if code == 0 else f"cudaHostRegister returned {code}"
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        if reason:
            warnings.warn(
                f"the {nbytes} bytes of streamed weights could not be page-locked ({reason}): they are "
                "copied from ordinary memory, which is slower. A higher limit of locked memory (ulimit -l), "
                "or more weights on the accelerators, would help",
                stacklevel=2,
            )
            return False
        self._mapping.address, self._mapping.registered = self.start, True
        return True

    def _bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        # a storage of its own for each, over the same mapping, which each of them keeps
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=offset)

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a dense tensor at the next free place."""
        nbytes = tensor.numel() * tensor.element_size()
        place = self._bytes(self._used, nbytes).view(tensor.dtype)
        self._used += self.rounded(nbytes)
        return torch.as_strided(place, tensor.size(), tensor.stride()).copy_(tensor)

    def holds(self, address: int) -> bool:
        """Whether an address is in the mapping."""
        return self.start <= address < self.end

    def bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        """The bytes from an address on."""
        return self._bytes(address - self.start, nbytes)
