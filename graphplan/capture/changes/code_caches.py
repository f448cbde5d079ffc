"""Storage of a model's code outside of the model: global variables and tables, and caches of functions.

It often holds tensors that are made once::

    @lru_cache
    def positions(length):
        return torch.arange(length)

A trace would leave tensors without values there, which the next trace and the caller's model would find.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from graphplan._compat.export import TRACED_NUMBERS
from graphplan.capture.changes.attribute_snapshots import attributes_behind, held_by, items_of, own_attributes
from graphplan.capture.changes.model_functions import EMPTY, content_of, function_of, hooks_of, names_in
from graphplan.capture.structure import CONTAINERS, PLAIN_TYPES, reachable

_LIBRARIES = {*sys.stdlib_module_names, "graphplan", "numpy", "torch"} - {"__main__"}
_CACHED: Any = type(functools.lru_cache(lambda: None))
_WRAPPED = {
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    functools.partialmethod: "func",
    functools.cached_property: "func",
}
_TRACED = (FakeTensor, *TRACED_NUMBERS)
_ABSENT = object()


class CodeCaches:
    """The tables and caches that functions, classes and hooks in the packages of a model's code reach.

    Attributes:
        namespaces: the globals of these functions, by their ids.
    """

    def __init__(self, model: nn.Module) -> None:
        self.namespaces: dict[int, dict[str, Any]] = {}
        self._tables: dict[int, Any] = {}  # id -> dict, list, class or cell
        self._cached: list[Any] = []
        parts = list(model.modules())
        hooks = [hook for part in parts for hook in hooks_of(part)]
        functions = [value for part in parts for value in vars(part).values() if type(value) is FunctionType]
        classes = [cls for kind in set(map(type, parts)) for cls in kind.__mro__]
        code = [*map(function_of, hooks), *functions, *classes]
        self._packages = set(map(_package, code)) - _LIBRARIES
        self._todo: list[Any] = [*code, *hooks, *(type(one) for part in parts for one in vars(part).values())]
        attribute_ids, seen = held_by(model), set[int]()
        while self._todo:
            value = self._todo.pop()
            # attributes of the model are restored elsewhere
            if type(value) not in PLAIN_TYPES and id(value) not in seen:
                seen.add(id(value))
                if id(value) not in attribute_ids or not issubclass(
                    type(value), nn.Module | dict | list | deque
                ):
                    self._visit(value)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Context manager that, at its exit, removes traced values from these tables and caches."""
        before = [(table, dict(_items(table))) for table in self._tables.values()]
        misses = [cached.cache_info().misses for cached in self._cached]
        try:
            yield
        finally:
            for table, entries in before:
                _restore(table, entries)
            for cached, count in zip(self._cached, misses, strict=True):
                if cached.cache_info().misses != count and any(map(_is_traced, _results(cached))):
                    cached.cache_clear()

    def _visit(self, value: Any) -> None:
        kind = type(value)  # ``isinstance`` would make a proxy, such as one of a request, load its object
        if kind is _CACHED:
            self._cached.append(value)
            self._todo += _results(value)
        elif kind is MethodType:
            self._todo += [value.__func__, value.__self__]
        elif kind is BuiltinMethodType:
            self._todo.append(value.__self__)
        elif kind is functools.partial:
            self._todo += [value.func, *value.args, *value.keywords.values()]
        elif kind in _WRAPPED:
            self._todo.append(getattr(value, _WRAPPED[kind]))
        elif kind is FunctionType:
            if _package(value) in self._packages:
                if _top(value.__globals__.get("__name__")) in self._packages:  # not the file of a decorator
                    self.namespaces[id(value.__globals__)] = value.__globals__
                self._todo += [vars(value), *self._named_values(value), *(value.__closure__ or ())]
                self._todo += [*(value.__defaults__ or ()), value.__kwdefaults__]
        elif issubclass(kind, type):
            if _package(value) in self._packages:
                self._tables[id(value)] = value
                self._todo += [*value.__mro__, *vars(value).values()]
        elif issubclass(kind, (*CONTAINERS, CellType)):
            if not issubclass(kind, tuple | frozenset):  # which never change
                self._tables[id(value)] = value
            self._todo += [inside for _, inside in _items(value)]
        elif issubclass(kind, nn.Module):
            self._tables[id(vars(value))] = vars(value)
            self._todo += own_attributes(value).values()
        elif issubclass(kind, threading.local):
            self._todo.append(vars(value))  # this thread's attributes
        elif issubclass(kind, MutableMapping) or _package(kind) in self._packages:
            self._todo += [kind, attributes_behind(value)]

    def _named_values(self, function: FunctionType) -> list[Any]:
        """Return the globals that a function may read, in its own module and in others of these packages."""
        names, spaces, values = names_in(function), [function.__globals__], list[Any]()
        for space in spaces:
            self._tables[id(space)] = space
            # ``globals()[...]`` may read any name
            used = space.copy() if "globals" in names else names & space.keys()
            for value in map(space.get, used):
                if not issubclass(type(value), ModuleType):
                    values.append(value)
                elif _top(vars(value).get("__name__")) in self._packages and id(vars(value)) not in map(
                    id, spaces
                ):
                    spaces.append(vars(value))
        return values


def _package(code: Any) -> str:
    return _top(getattr(code, "__module__", None))


def _top(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _items(table: Any) -> list[tuple[Any, Any]]:
    if isinstance(table, CellType):
        inside = content_of(table)
        return [] if inside is EMPTY else [("cell_contents", inside)]
    return list(vars(table).items()) if isinstance(table, type) else items_of(table)


def _restore(table: Any, before: dict[Any, Any]) -> None:
    """Replace values of a trace in a table by the values before it."""
    new = [(name, value) for name, value in _items(table) if before.get(name, _ABSENT) is not value]
    for name in [name for name, value in new if _is_traced(value)]:
        if isinstance(table, list | deque | set):
            table.clear()
            table.update(before.values()) if isinstance(table, set) else table.extend(before.values())
            return
        if not isinstance(table, dict):
            setattr(table, name, before[name]) if name in before else delattr(table, name)
        elif name in before:
            table[name] = before[name]
        else:
            del table[name]


def _results(cached: Any) -> list[Any]:
    """Return the results in a function's cache: in its table, or, with ``maxsize``, behind its entries."""
    referents = gc.get_referents(cached)
    entries = [entry for table in referents if isinstance(table, dict) for entry in table.values()]
    return referents + gc.get_referents(*entries)


def _is_traced(value: Any) -> bool:
    """Whether a value is, or holds, a tensor or a number of a trace."""

    def inside(one: Any) -> Iterable[Any]:
        if issubclass(type(one), type | ModuleType | FunctionType):
            return ()
        contents = one if issubclass(type(one), CONTAINERS) else attributes_behind(one) or {}
        return [part for _, part in items_of(contents)]

    return any(issubclass(type(one), _TRACED) for one in reachable([value], inside, id))
