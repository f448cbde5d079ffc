"""What the code of a model keeps outside of it: global names and tables, and the caches of functions.

Tensors that are made once are often kept so::

    @lru_cache
    def positions(length):
        return torch.arange(length)

A trace would leave tensors without values there, for the next trace, and for the caller's own model.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from graphplan._compat.torch import TRACED_NUMBERS

_LIBRARIES = {*sys.stdlib_module_names, "graphplan", "numpy", "torch"}
_CACHED: Any = type(functools.lru_cache(lambda: None))
_METHODS = (staticmethod, classmethod, property)
_TRACED = (FakeTensor, *TRACED_NUMBERS)
_ABSENT = object()


@contextmanager
def untouched_caches(model: nn.Module) -> Iterator[None]:
    """A block after which what the code of a model reaches holds nothing of a trace."""
    code = _Code(model)
    before = [dict(_items(table)) for table in code.tables]
    misses = [cached.cache_info().misses for cached in code.cached]
    try:
        yield
    finally:
        for table, known in zip(code.tables, before, strict=True):
            _put_back(table, known)
        for cached, known in zip(code.cached, misses, strict=True):
            if cached.cache_info().misses != known and any(map(_is_traced, _results(cached))):
                cached.cache_clear()


class _Code:
    """What functions and classes of a model reach.

    Attributes:
        tables: dicts, lists, classes, and cells.
        cached: functions that keep their results.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tables: list[Any] = []
        self.cached: list[Any] = []
        self._todo: list[Any] = [cls for part in model.modules() for cls in type(part).__mro__]
        seen = set[int]()
        while self._todo:
            value = self._todo.pop()
            if id(value) not in seen:
                seen.add(id(value))
                self._read(value)

    def _read(self, value: Any) -> None:
        if isinstance(value, _CACHED):
            self.cached.append(value)
            self._todo.append(value.__wrapped__)
        elif isinstance(value, _METHODS):
            self._todo.append(value.fget if isinstance(value, property) else value.__func__)
        elif isinstance(value, FunctionType):
            if not _is_of_library(value.__module__):
                self._todo += [value.__globals__, vars(value), *(value.__closure__ or ())]
        elif isinstance(value, type):
            if not _is_of_library(value.__module__):
                self.tables.append(value)
                self._todo += [*vars(value).values(), vars(sys.modules.get(value.__module__, object))]
        elif isinstance(value, dict | list | CellType):
            self.tables.append(value)
            self._todo += [inside for _, inside in _items(value) if not isinstance(inside, ModuleType)]
        elif isinstance(value, MutableMapping) or not _is_of_library(type(value).__module__):
            self._todo.append(getattr(value, "__dict__", None))


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _items(table: Any) -> list[tuple[Any, Any]]:
    if isinstance(table, CellType):
        try:
            return [("cell_contents", table.cell_contents)]
        except ValueError:  # it is empty yet
            return []
    if isinstance(table, list):
        return list(enumerate(table))
    return list((vars(table) if isinstance(table, type) else table).items())


def _put_back(table: Any, known: dict[Any, Any]) -> None:
    """Take what is of a trace from a table, and give it back what was there."""
    new = [(name, value) for name, value in _items(table) if known.get(name, _ABSENT) is not value]
    for name in [name for name, value in new if _is_traced(value)]:
        if isinstance(table, list):
            table[:] = known.values()
            return
        if not isinstance(table, dict):
            setattr(table, name, known[name]) if name in known else delattr(table, name)
        elif name in known:
            table[name] = known[name]
        else:
            del table[name]


def _results(cached: Any) -> list[Any]:
    """What a function keeps: in its table, or, with a limit, behind the entries of that."""
    own = gc.get_referents(cached)
    entries = [entry for table in own if isinstance(table, dict) for entry in table.values()]
    return own + gc.get_referents(*entries)


def _is_traced(value: Any, around: tuple[int, ...] = ()) -> bool:
    """Whether something is of a trace, or holds that."""
    if isinstance(value, _TRACED):
        return True
    if id(value) in around or isinstance(value, type | ModuleType | FunctionType):
        return False
    inside = value if isinstance(value, list | tuple | set | frozenset) else getattr(value, "__dict__", ())
    inside = value if isinstance(value, dict) else inside
    parts = inside.values() if isinstance(inside, dict) else inside
    return any(_is_traced(part, (*around, id(value))) for part in parts)
