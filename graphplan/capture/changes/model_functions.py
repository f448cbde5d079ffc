"""The functions that run around the calls of modules, and the names in their code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

EMPTY = object()
"""What is in a cell that is not yet filled."""

_CALLED = ("_forward_pre_hooks", "_forward_hooks")


def hooks_of(part: nn.Module) -> list[Any]:
    """Those that run around the calls of a module."""
    return [hook for table in _CALLED for hook in vars(part)[table].values()]


def function_of(hook: Any) -> Any:
    """The function that a hook runs, or what is like one."""
    while isinstance(hook, functools.partial | MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return hook if isinstance(hook, FunctionType) else inspect.getattr_static(type(hook), "__call__")


def names_in(function: FunctionType) -> set[str]:
    """Names of globals and attributes in the code of a function, and in what is defined in it."""
    return {name for code in codes_in(function.__code__) for name in code.co_names}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of what is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def content_of(cell: CellType) -> Any:
    """What a variable around a function holds; ``EMPTY`` before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY
