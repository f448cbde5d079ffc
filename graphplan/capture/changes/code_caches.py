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

from graphplan._compat.export import TRACED_NUMBERS

_LIBRARIES = {*sys.stdlib_module_names, "graphplan", "numpy", "torch"} - {"__main__"}
_CACHED: Any = type(functools.lru_cache(lambda: None))
_METHODS = (staticmethod, classmethod, property)
_TRACED = (FakeTensor, *TRACED_NUMBERS)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_ABSENT = object()


class CodeCaches:
    """What the functions and classes of a model reach, those of its own packages."""

    def __init__(self, model: nn.Module) -> None:
        self._tables: list[Any] = []  # dicts, lists, classes, and cells
        self._cached: list[Any] = []
        parts = list(model.modules())
        functions = [value for part in parts for value in vars(part).values() if type(value) is FunctionType]
        self._todo: list[Any] = [*functions, *(cls for kind in set(map(type, parts)) for cls in kind.__mro__)]
        self._packages = {_package(value) for value in self._todo} - _LIBRARIES
        seen = set[int]()
        while self._todo:
            value = self._todo.pop()
            if id(value) not in seen:
                seen.add(id(value))
                self._read(value)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """A block after which they hold nothing of a trace."""
        before = [dict(_items(table)) for table in self._tables]
        misses = [cached.cache_info().misses for cached in self._cached]
        try:
            yield
        finally:
            for table, known in zip(self._tables, before, strict=True):
                _put_back(table, known)
            for cached, count in zip(self._cached, misses, strict=True):
                if cached.cache_info().misses != count and any(map(_is_traced, _results(cached))):
                    cached.cache_clear()

    def _read(self, value: Any) -> None:
        kind = type(value)  # what stands for an object elsewhere, as of a request, may not be asked
        if kind is _CACHED:
            self._cached.append(value)
            self._todo.append(value.__wrapped__)
        elif issubclass(kind, _METHODS):
            self._todo.append(value.fget if issubclass(kind, property) else value.__func__)
        elif kind is FunctionType:
            if _package(value) in self._packages:
                self._todo += [value.__globals__, vars(value), *(value.__closure__ or ())]
        elif issubclass(kind, type):
            if _package(value) in self._packages:
                self._tables.append(value)
                self._todo += [*vars(value).values(), vars(sys.modules.get(value.__module__, object))]
        elif issubclass(kind, dict | list | CellType):
            self._tables.append(value)
            self._todo += [inside for _, inside in _items(value) if not issubclass(type(inside), ModuleType)]
        elif issubclass(kind, MutableMapping) or _package(kind) in self._packages:
            self._todo.append(_attributes(value))


def _attributes(value: Any) -> Any:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _package(code: Any) -> str:
    return (code.__module__ or "").partition(".")[0]


def _items(table: Any) -> list[tuple[Any, Any]]:
    if isinstance(table, CellType):
        try:
            return [("cell_contents", table.cell_contents)]
        except ValueError:  # it is empty yet
            return []
    if isinstance(table, list):
        return list(enumerate(list.__iter__(table)))
    # the items of a class derived from dict may be made, or imported, when they are asked for
    return list(vars(table).items() if isinstance(table, type) else dict.items(table))


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
    kind = type(value)
    if issubclass(kind, _TRACED):
        return True
    if id(value) in around or issubclass(kind, type | ModuleType | FunctionType):
        return False
    inside = value if issubclass(kind, _CONTAINERS) else _attributes(value)
    parts = dict.values(inside) if isinstance(inside, dict) else inside or ()
    return any(_is_traced(part, (*around, id(value))) for part in parts)
