"""The functions that run around the calls of modules, and the names in their code."""

from __future__ import annotations

import functools
import inspect
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

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
    codes, found = [function.__code__], set[str]()
    for code in codes:
        found.update(code.co_names)
        codes += [one for one in code.co_consts if type(one) is CodeType]
    return found
