"""Buffers that a model assigns: the graph writes what was assigned into the buffer's own memory.

Before and after, in what is traced of a module's call::

    self.mean = 0.9 * self.mean + x            add = 0.9 * mean + x
                                               copy_ = copy_(mean, add)

Torch does so for the buffers of the model itself, and not for those of its submodules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphplan.errors import NoGraphError

_Table = dict[str, torch.Tensor | None]


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """A block after which the modules of a tree have the buffers that they had."""
    before = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for table, buffers in before:
            if list(map(id, table.values())) != list(map(id, buffers.values())):
                table.clear()
                table.update(buffers)


class AssignedBuffers:
    """Writes into buffers, in one trace."""

    def __init__(self) -> None:
        self._before: dict[int, _Table] = {}
        self._written: dict[tuple[int, str], Any] = {}

    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a module's call.

        Raises:
            NoGraphError: a buffer is added, removed, or takes another shape or type.
        """
        if not self._before:
            self._before = {id(table): dict(table) for _, table in _tables(module)}
        result = forward(*args, **kwargs)
        for part, table in _tables(module):
            before = self._before.get(id(table), table)  # a part of a Sequential is a module of its own
            if table.keys() != before.keys():
                raise NoGraphError(f"{part} adds or removes buffers when it is called, which no graph can do")
            for name, value in table.items():
                if value is not self._written.get((id(table), name), before[name]):
                    _write(f"{part}.{name}", before[name], value)
                    self._written[id(table), name] = value
        return result


def _write(name: str, buffer: torch.Tensor | None, value: torch.Tensor | None) -> None:
    """What follows in the call reads ``value`` itself, with its gradient."""
    if buffer is None or value is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        raise NoGraphError(
            f"{name} is {_said(buffer)} and is assigned {_said(value)}: in a graph, a buffer keeps its shape "
            "and type"
        )
    buffer.copy_(value.detach())


def _said(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _tables(module: nn.Module) -> Iterator[tuple[str, _Table]]:
    """The class and the buffers of each module of a tree; by their attributes, for a tracer hides modules."""
    pending: list[Any] = [module]
    while pending:
        part = pending.pop()
        name, own = type(part).__name__, vars(part)
        pending += [child for child in own["_modules"].values() if child is not None]
        yield name, own["_buffers"]
