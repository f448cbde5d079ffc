"""Hooks that submodules of a placed module have beside those that its graphs were traced with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_CALLED = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Hook = tuple[int, str, int]
"""The place of its submodule, its table, its number there."""

Hooks = tuple[dict[int, Any], Sequence[int]]
"""A table of hooks, and numbers of some."""


def hooks_beside(
    traced: Collection[Hook], names: Sequence[Collection[str]], parts: Sequence[nn.Module]
) -> list[Hooks]:
    """Of all submodules in order, the tables of hooks that have some beside those that were ``traced``.

    A hook in place of one that was traced is traced as that was. So are those of a submodule with parameters
    that were not among ``names``: they make its weights of them, as ``torch.nn.utils.weight_norm`` does.
    """
    found: list[Hooks] = []
    for at, part in enumerate(parts, 1):
        for name in _CALLED if set(part._parameters) <= set(names[at]) else ():
            table: dict[int, Any] = vars(part)[name]
            known = {number for where, of, number in traced if (where, of) == (at, name)}
            if known <= table.keys() and (added := [number for number in table if number not in known]):
                found.append((table, added))
    return found


@contextmanager
def set_aside(hooks: Sequence[Hooks]) -> Iterator[None]:
    """A block in which the tables are without these hooks."""
    before = [(table, dict(table)) for table, _ in hooks]
    for table, numbers in hooks:
        for number in numbers:
            del table[number]
    try:
        yield
    finally:
        for table, found in before:
            table.clear()  # they run in this order
            table.update(found)


def hooks_of(module: nn.Module) -> frozenset[Hook]:
    """All hooks of submodules."""
    parts = enumerate(module.modules())
    return frozenset(
        (at, name, number) for at, part in parts if at for name in _CALLED for number in vars(part)[name]
    )
