"""Inspection of Python code: the functions in values, their bytecode and globals, and their origin."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from graphplan.capture.changes.model_functions import codes_in
from graphplan.capture.source_lines import PACKAGE_FOLDERS, STANDARD_LIBRARY, is_of_versions


def function_of(value: Any) -> types.FunctionType | None:
    """Return the Python function that a value is or wraps, or None."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    elif type(value).__name__ == "_lru_cache_wrapper":
        value = value.__wrapped__
    return value if isinstance(value, types.FunctionType) else None


def file_of(cls: type) -> str:
    """Return the file that defines a class; "" if there is none."""
    module = sys.modules.get(cls.__module__)
    if cls.__module__ == "builtins":
        return STANDARD_LIBRARY[0]
    return getattr(module, "__file__", None) or ""


def file_of_module(module: Any) -> str | None:
    """Return the file of a module; None for built-in modules and for other entries of ``sys.modules``."""
    if not isinstance(module, types.ModuleType):
        return None
    file: str | None = object.__getattribute__(module, "__dict__").get("__file__")  # getattr may import it
    return file


def package_of(file: str) -> str:
    """Return the folder or single file of the installed package that ``file`` belongs to."""
    prefix, folder, rest = next(file.rpartition(one) for one in PACKAGE_FOLDERS if one in file)
    return prefix + folder + rest.partition("/")[0]


def code_parts(code: types.CodeType) -> Iterator[object]:
    """Yield the parts of a code object that determine what it computes, equal in all processes."""
    yield from (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_parts(constant)
        elif isinstance(constant, frozenset):
            yield sorted(map(repr, constant))
        else:
            yield repr(constant)


def globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the (name, value) of globals that a function reads, and of their attributes in user modules."""
    names, attributes = dict[str, None](), dict[str, None]()
    for code in codes_in(function.__code__):
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names[str(instruction.argval)] = None
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes[str(instruction.argval)] = None
    for name in names:
        if name in function.__globals__:
            value = function.__globals__[name]
            yield name, value
            file = file_of_module(value)
            if file and not is_of_versions(file):
                namespace = vars(value)
                yield from ((f"{name}.{one}", namespace[one]) for one in attributes if one in namespace)
