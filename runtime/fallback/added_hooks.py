"""Hooks that were added to submodules of a placed module after its graphs were traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Hook = tuple[int, str, int]
"""The index of the submodule in ``modules()``, the name of the hook table, the hook's key in that table."""

Hooks = tuple[dict[int, Any], Sequence[int]]
"""The hook table of a submodule, and the keys of some of its hooks."""


@contextmanager
def without_hooks(hooks: Sequence[Hooks]) -> Iterator[None]:
    """Context manager that removes these hooks from their tables until it exits."""
    originals = [(table, dict(table)) for table, _ in hooks]
    for table, keys in hooks:
        for key in keys:
            del table[key]
    try:
        yield
    finally:
        for table, contents in originals:
            table.clear()  # hooks run in the order of their table
            table.update(contents)


def hooks_of(module: nn.Module) -> frozenset[Hook]:
    """Return all hooks of the submodules."""
    parts = enumerate(module.modules())
    return frozenset(
        (index, name, key)
        for index, part in parts
        if index
        for name in HOOK_TABLES
        for key in vars(part)[name]
    )
