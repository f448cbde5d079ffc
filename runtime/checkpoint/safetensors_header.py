"""Read the header of a safetensors file: safetensors checks it against the file's size."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from graphplan.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of a file when its header was read, to detect later changes.

    Attributes:
        path: path of the file.
        size: bytes.
        changed_ns: modification time in nanoseconds.
    """

    path: Path
    size: int
    changed_ns: int

    def open(self) -> int:
        """Open the file and return its descriptor; raise CheckpointError if it cannot be read."""
        try:
            return os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error

    def check(self, descriptor: int) -> None:
        """Raise CheckpointError if the open file has changed since its header was read."""
        stat, remedy = os.fstat(descriptor), "weights are read from it: load the model again"
        if stat.st_size != self.size:
            raise CheckpointError(
                f"{self.path} had {self.size} bytes when it was opened and has {stat.st_size} now, "
                f"and {remedy}"
            )
        if stat.st_mtime_ns != self.changed_ns:
            raise CheckpointError(f"{self.path} was written to since it was opened, and {remedy}")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file; ``start`` is the offset of its first byte from the beginning of the file."""

    file: FileState
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a file by name.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        state = path.stat()
        with safe_open(path, framework="pt") as opened:
            mapped = {name: opened.get_tensor(name) for name in opened.offset_keys()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file, or is truncated: {error}") from error
    file, tensors = FileState(path, state.st_size, state.st_mtime_ns), {}
    start = state.st_size - sum(tensor.nbytes for tensor in mapped.values())  # the data ends with the file
    for name, tensor in mapped.items():
        tensors[name] = FileTensor(file, name, tensor.dtype, shape=tuple(tensor.shape), start=start)
        start += tensor.nbytes
    return tensors
