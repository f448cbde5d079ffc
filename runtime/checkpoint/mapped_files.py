"""Weights that stay in a file, which is mapped into memory and read page by page when they are used.

The pages are those of the system's page cache: this process holds no copy. Writes to such a weight
(``load_state_dict``, an optimizer) go to a private copy of the page, never to the file. A read from a mapped
file that was truncated would kill the process, so each forward pass first checks that the file is unchanged.
A file that is replaced or deleted stays readable until it is unmapped.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref

import torch

from graphplan.errors import CheckpointError
from graphplan.runtime.checkpoint.safetensors_header import FileState, FileTensor
from graphplan.runtime.memory.host_pages import Pages
from graphplan.runtime.memory.pinned_buffers import flat_bytes

# without it, a private mapping counts as committed memory of its whole size
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # mmap.MAP_NORESERVE from Python 3.13 on


class MappedFile(Pages):
    """A safetensors file that is mapped into memory.

    Raises:
        CheckpointError: the file is gone, or has changed since its header was read.
    """

    def __init__(self, state: FileState) -> None:
        self.state, self._file = state, state.open()
        weakref.finalize(self, os.close, self._file)
        self.check()
        try:
            flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            mapping = mmap.mmap(self._file, state.size, flags=flags, prot=access)
        except OSError as error:
            raise CheckpointError(f"{state.path} cannot be mapped: {error.strerror}") from error
        super().__init__(mapping, state.size)

    def check(self) -> None:
        """Raise CheckpointError if the file has changed since its header was read."""
        self.state.check(self._file)

    def tensor(self, tensor: FileTensor) -> torch.Tensor:
        """Return a tensor of the file, over the mapped pages."""
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return self.piece(tensor.start, tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def equal_in_files(a: FileTensor, b: FileTensor, chunk: int = 1 << 20) -> bool:
    """Whether two tensors in files have the same bytes; neither is copied into memory."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    left, right = (flat_bytes(MappedFile(tensor.file).tensor(tensor)) for tensor in (a, b))
    return all(torch.equal(x, y) for x, y in zip(left.split(chunk), right.split(chunk), strict=True))
