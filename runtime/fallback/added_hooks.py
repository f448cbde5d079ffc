"""Hooks that were added to submodules of a placed module after its graphs were traced."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Hook = tuple[int, str, int]
"""The index of the submodule in ``modules()``, the name of the hook table, the hook's key in that table."""

Hooks = tuple[dict[int, Any], Sequence[int]]
"""The hook table of a submodule, and the keys of some of its hooks."""


def hooks_beside(
    traced: Collection[Hook], names: Sequence[Collection[str]], parts: Sequence[nn.Module]
) -> list[Hooks]:
    """Return the tables of submodules ``parts`` that have hooks beside those in ``traced``, and the new keys.

    A table that lacks a traced hook is left out: the new hooks replace it, and are traced like it. So is each
    table of a submodule with parameters that are not in its ``names``: its hooks compute weights from them,
    as ``torch.nn.utils.weight_norm`` does.
    """
    added_hooks: list[Hooks] = []
    for index, part in enumerate(parts, 1):
        for name in _TABLES if set(part._parameters) <= set(names[index]) else ():
            table: dict[int, Any] = vars(part)[name]
            known = {key for place, table_name, key in traced if (place, table_name) == (index, name)}
            if known <= table.keys() and (added := [key for key in table if key not in known]):
                added_hooks.append((table, added))
    return added_hooks


@contextmanager
def set_aside(hooks: Sequence[Hooks]) -> Iterator[None]:
    """Context manager that removes these hooks from their tables until it exits."""
    before = [(table, dict(table)) for table, _ in hooks]
    for table, keys in hooks:
        for key in keys:
            del table[key]
    try:
        yield
    finally:
        for table, contents in before:
            table.clear()  # hooks run in the order of their table
            table.update(contents)


def hooks_of(module: nn.Module) -> frozenset[Hook]:
    """Return all hooks of the submodules."""
    parts = enumerate(module.modules())
    return frozenset(
        (index, name, key) for index, part in parts if index for name in _TABLES for key in vars(part)[name]
    )
