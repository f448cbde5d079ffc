"""The hooks of modules, and the names in the code of functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

EMPTY = object()
"""The content of a cell that is not filled yet."""

_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks")


def hooks_of(part: nn.Module) -> list[Any]:
    """Return the forward pre-hooks and forward hooks of a module."""
    return [hook for table in _HOOK_TABLES for hook in vars(part)[table].values()]


def function_of(hook: Any) -> Any:
    """Return the function that a hook runs, or the ``__call__`` of its class."""
    while isinstance(hook, functools.partial | MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return hook if isinstance(hook, FunctionType) else inspect.getattr_static(type(hook), "__call__")


def names_in(function: FunctionType) -> set[str]:
    """Return the names of globals and attributes in the code of a function, and of functions inside it."""
    return {name for code in codes_in(function.__code__) for name in code.co_names}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of the functions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def content_of(cell: CellType) -> Any:
    """Return the content of a closure's cell; ``EMPTY`` before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY
