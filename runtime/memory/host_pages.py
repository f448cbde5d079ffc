"""Host memory of streamed weights and of gradients: an anonymous mapping, pinned if a GPU copies it.

Weights that are copied together are adjacent, so that one copy moves them. Each has its own storage over its
bytes, so that saving or sharing one of them affects only its bytes. The mapping lives as long as any of them,
and is registered with CUDA once, at its exact size: torch's allocator of pinned memory would round it up to
a power of two.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from graphplan.devices.topology import round_up
from graphplan.runtime.memory.arena import dense_strides, shaped
from graphplan.warnings import warn

_HUGE = 2 << 20  # bytes of a huge page: filling them for the first time is several times as fast
_PORTABLE = 1  # cudaHostRegisterPortable: for every GPU


class Pages:
    """A mapping of host memory, and tensors over its bytes, each with its own storage.

    Args:
        mapping: the mapping; each tensor keeps it alive.
        nbytes: number of its bytes that are used.
    """

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        self._mapping = mapping
        self.start = self.piece(0, max(nbytes, 1)).data_ptr()
        self.end = self.start + nbytes

    def piece(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a tensor over ``nbytes`` bytes from an offset on."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=offset)

    def holds(self, address: int) -> bool:
        """Whether an address is in the used bytes of the mapping."""
        return self.start <= address < self.end


class _Mapping(mmap.mmap):
    """An anonymous mapping that is unregistered from CUDA before it is unmapped."""

    release: Callable[[], object] | None = None

    def __del__(self) -> None:
        # a weakref callback would be too late: mmap unmaps before it calls those
        if self.release is not None:
            self.release()
            self.release = None


class HostPages(Pages):
    """An anonymous mapping from which tensors are reserved one after another.

    Args:
        nbytes: total size of the tensors, each rounded up to the allocation granularity.
        pinned: whether to pin it for copies to and from CUDA devices.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        # private: shared pages, which Python's mmap takes by default, are never huge
        mapping = _Mapping(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(mapping, nbytes)
        self.pinned = pinned and self._register(mapping, nbytes)
        self._used = 0

    def _register(self, mapping: _Mapping, nbytes: int) -> bool:
        cudart = torch.cuda.cudart()
        try:
            code = int(cudart.cudaHostRegister(self.start, nbytes, _PORTABLE))
            reason = "" if code == 0 else f"cudaHostRegister returned {code}"
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        if reason:
            _forget_error()
            warn(
                f"{nbytes} bytes of host memory could not be pinned ({reason}): copies between them "
                "and a GPU, of streamed weights and gradients, are slower. Raise the limit of locked memory "
                "(ulimit -l), or let more weights reside on the accelerators"
            )
            return False
        mapping.release = partial(cudart.cudaHostUnregister, self.start)
        return True

    def reserve(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor over the next free bytes, with the layout of a copy of ``like``."""
        if not like.nbytes:
            return torch.empty_strided(like.size(), dense_strides(like), dtype=like.dtype)
        place = self.piece(self._used, like.nbytes)
        self._used += round_up(like.nbytes)
        return shaped(place, like)


def _forget_error() -> None:
    """Clear CUDA's last error, which the next kernel launch would otherwise raise as its own."""
    with suppress(RuntimeError):  # this launch raises it
        torch.zeros(1, device="cuda")
