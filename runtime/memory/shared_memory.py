"""Restore shared memory between buffers and plain tensors of a module after they were moved one by one.

::

    self.register_buffer("table", torch.zeros(4, 16))
    self.row = self.table[0]          a view: it sees writes to the table
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphplan.capture.model.model_weights import memory_of
from graphplan.errors import CaptureError


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a submodule: the submodule's index, whether it is a buffer or an attribute, its name."""

    part: int
    buffer: bool
    name: str
    tensor: torch.Tensor

    def table(self, parts: list[nn.Module]) -> dict[str, Any]:
        """Return the dict that holds the tensor, in the submodules ``parts`` of a copy of the model."""
        return parts[self.part]._buffers if self.buffer else vars(parts[self.part])

    @property
    def span(self) -> tuple[int, int]:
        """The offset of its first element in the storage, and of the element after its last."""
        start = self.tensor.storage_offset()
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return int(start), int(start + 1 + sum((size - 1) * stride for size, stride in steps))


def join_memory(model: nn.Module, copied: nn.Module) -> None:
    """Let tensors of a copy share memory as those of the model do, on the device of the largest of them.

    Raises:
        CaptureError: no tensor of a group spans all others, or their dtypes differ.
    """
    parts = list(copied.modules())
    for group in _groups(model):
        base = max(group, key=lambda entry: entry.span[1] - entry.span[0])
        root: torch.Tensor = base.table(parts)[base.name]
        start, stop = base.span
        for entry in group:
            first, last = entry.span
            if first < start or last > stop or entry.tensor.dtype != root.dtype:
                raise CaptureError(
                    f"{entry.name!r} and {base.name!r} share memory, and neither is a view of both"
                )
            shape, offset = (entry.tensor.shape, entry.tensor.stride()), root.storage_offset() + first - start
            if entry is not base:
                entry.table(parts)[entry.name] = root.as_strided(*shape, offset)


def _groups(model: nn.Module) -> list[list[_Entry]]:
    """Return the groups of different tensor objects that share memory."""
    by_memory: dict[Any, list[_Entry]] = {}
    for index, part in enumerate(model.modules()):
        tables = ((True, part._buffers), (False, vars(part)))
        for buffer, table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor) and (memory := memory_of(tensor)) is not None:
                    by_memory.setdefault(memory, []).append(_Entry(index, buffer, name, tensor))
    return [group for group in by_memory.values() if len({id(entry.tensor) for entry in group}) > 1]
