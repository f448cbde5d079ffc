"""Buffers and plain tensors that lie in one memory: where they are moved one by one, they are joined again.

::

    self.register_buffer("table", torch.zeros(4, 16))
    self.row = self.table[0]          what is written to the table shows here
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
    """A tensor of a module: the index of the module, its table, the name there."""

    part: int
    buffer: bool
    name: str
    tensor: torch.Tensor

    def table(self, parts: list[nn.Module]) -> dict[str, Any]:
        """The same table in a copy."""
        return parts[self.part]._buffers if self.buffer else vars(parts[self.part])

    @property
    def span(self) -> tuple[int, int]:
        """Its first element in the memory, and the one after its last."""
        start = self.tensor.storage_offset()
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return int(start), int(start + 1 + sum((size - 1) * stride for size, stride in steps))


def join_memory(model: nn.Module, copied: nn.Module) -> None:
    """Let the tensors of a copy lie in one memory where those of the model do, on the device of the largest.

    Raises:
        CaptureError: none of them spans the others.
    """
    parts = list(copied.modules())
    for group in _groups(model):
        base = max(group, key=lambda entry: entry.span[1] - entry.span[0])
        here: torch.Tensor = base.table(parts)[base.name]
        start, stop = base.span
        for entry in group:
            first, last = entry.span
            if first < start or last > stop or entry.tensor.dtype != here.dtype:
                raise CaptureError(
                    f"{entry.name!r} and {base.name!r} share memory, and neither is a view of both"
                )
            shape, offset = (entry.tensor.shape, entry.tensor.stride()), here.storage_offset() + first - start
            if entry is not base:
                entry.table(parts)[entry.name] = here.as_strided(*shape, offset)


def _groups(model: nn.Module) -> list[list[_Entry]]:
    """What lies in one memory, of more than one object."""
    found: dict[Any, list[_Entry]] = {}
    for index, part in enumerate(model.modules()):
        tables = ((True, part._buffers), (False, vars(part)))
        for buffer, table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor) and (memory := memory_of(tensor)) is not None:
                    found.setdefault(memory, []).append(_Entry(index, buffer, name, tensor))
    return [group for group in found.values() if len({id(entry.tensor) for entry in group}) > 1]
