"""Buffers that a model assigns to itself in a forward pass: the graph writes to them.

Before and after, in the trace of a module's call::

    self.mean = 0.9 * self.mean + x            add = 0.9 * mean + x
                                               copy_ = copy_(mean, add)

``torch.export`` writes the buffers of the model itself, but not those of its submodules.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphplan.capture.changes.assigned_writes import ASSIGNS
from graphplan.errors import NoGraphError


@dataclass(frozen=True, slots=True, eq=False)
class ReplacedBuffer:
    """A buffer of which a call has changed the shape or type, or which it has set to None."""

    table: dict[str, Any]
    label: str
    before: torch.Tensor | None
    after: torch.Tensor | None

    @property
    def text(self) -> str:
        """The change as text."""
        return f"{self.label} is {_shape_text(self.before)} and is assigned {_shape_text(self.after)}"


class AssignedBuffers:
    """Assignments to buffers in one trace.

    Attributes:
        written: (id of the table of buffers, name) -> the tensor that a buffer was assigned.
        replaced: the buffers to which the graph cannot write what they were assigned, by the same key.
    """

    def __init__(self) -> None:
        self.written: dict[tuple[int, str], torch.Tensor] = {}
        self.replaced: dict[tuple[int, str], ReplacedBuffer] = {}
        self._before: dict[int, dict[str, Any]] = {}
        self._requiring = set[int]()  # ids of the buffers that required a gradient before the call
        self._with_history: list[str] = []

    @property
    def is_recorded(self) -> bool:
        """Whether the buffers before the call are known."""
        return bool(self._before)

    def record(self, modules: Iterable[nn.Module]) -> None:
        """Record the buffers before the call."""
        for part in modules:
            buffers = self._before[id(part._buffers)] = dict(part._buffers)
            self._requiring |= {id(x) for x in buffers.values() if x is not None and x.requires_grad}

    def write(self, graph: fx.Graph, label: str, table: dict[str, Any]) -> None:
        """Write to the buffers of a module, in the graph, what they were assigned."""
        before = self._before.get(id(table), table)  # a module made in the call has no old buffers
        for name in {**before, **table}:
            value, buffer = table.get(name), before.get(name)
            if value is not None and value.requires_grad and id(value) not in self._requiring:
                self._with_history.append(f"{label}.{name}")
            if value is buffer:
                continue
            if buffer is None or value is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                change = ReplacedBuffer(table, f"{label}.{name}", buffer, value)
                self.replaced[id(table), name] = change
                continue
            if {buffer.layout, value.layout} != {torch.strided}:
                raise NoGraphError(f"{label}.{name} is assigned a tensor of the layout {value.layout}")
            buffer.copy_(value.detach())
            next(iter(reversed(graph.nodes))).meta[ASSIGNS] = True
            self.written[id(table), name] = value

    def refuse_history(self) -> None:
        """Raise NoGraphError if a call leaves a buffer with a gradient history, which eager keeps."""
        if self._with_history:
            raise NoGraphError(
                f"a call leaves {self._with_history[0]} with a gradient, which eager mode keeps and a graph "
                "does not: assign .detach() of it, if no later backward pass goes through it"
            )

    def assigned(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors that buffers were assigned, under each name of a buffer in the module."""
        return {
            f"{path}.{name}" if path else name: self.written[id(part._buffers), name]
            for path, part in module.named_modules(remove_duplicate=False)
            for name in part._buffers
            if (id(part._buffers), name) in self.written
        }


def _shape_text(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
