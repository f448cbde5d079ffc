"""What a safetensors file holds, read from its header and checked against its size.

The format: eight bytes with the length of the header, the header (JSON: name -> dtype, shape, and the
bytes from where to where, counted from the header's end), the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphplan.errors import CheckpointError

__all__ = ["Entry", "FileHeader", "read_header"]

_LARGEST = 100_000_000  # bytes of a header; the format's own limit
_METADATA = "__metadata__"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: ``nbytes`` bytes from ``start`` on, counted from the file's beginning."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The tensors of a file, and what tells whether it has changed since.

    Attributes:
        path: of the file.
        size: bytes.
        changed_ns: when it was last written to, in nanoseconds.
        entries: by name.
    """

    path: Path
    size: int
    changed_ns: int
    entries: Mapping[str, Entry]


def read_header(path: Path) -> FileHeader:
    """Read and check a file's header.

    Raises:
        CheckpointError: no such file, or one that is damaged.
    """
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if state.st_size < 8 or not 2 <= length <= min(_LARGEST, state.st_size - 8):
                raise _damaged(path, f"a header of {length} bytes in a file of {state.st_size}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        listed = json.loads(text)
    except ValueError as error:
        raise _damaged(path, f"its header is no JSON: {error}") from error
    if not isinstance(listed, dict):
        raise _damaged(path, "its header is no JSON object")
    first = 8 + length
    entries = {name: _entry(path, name, row, first) for name, row in listed.items() if name != _METADATA}
    _check_extent(path, entries, first, state.st_size)
    return FileHeader(path, state.st_size, state.st_mtime_ns, entries)


def _entry(path: Path, name: str, row: Any, first: int) -> Entry:
    try:
        begin, end = row["data_offsets"]
        shape, text = tuple(row["shape"]), str(row["dtype"])
        numbers = (begin, end, *shape)
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"the header's row of {name!r} lacks something: {error}") from error
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers) or end < begin:
        raise _damaged(path, f"{name!r} has shape {list(shape)} in bytes {begin} to {end}")
    if text not in _DTYPES:
        raise CheckpointError(f"{path} has {name!r} as {text}, which is none of {', '.join(_DTYPES)}")
    dtype = _DTYPES[text]
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise _damaged(path, f"{name!r} of {text} and shape {list(shape)} has {end - begin} bytes")
    return Entry(name, dtype, shape, first + begin, end - begin)


def _check_extent(path: Path, entries: Mapping[str, Entry], first: int, size: int) -> None:
    """The tensors lie one after another, and end where the file ends."""
    at = first
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != at:
            raise _damaged(path, f"{entry.name!r} begins at byte {entry.start}, not {at}")
        at += entry.nbytes
    if at != size:
        raise _damaged(path, f"its tensors end at byte {at}, the file has {size}")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is no safetensors file, or is cut short: {what}")
