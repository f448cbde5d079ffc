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
from graphplan.capture.structure import reached

_LIBRARIES = {*sys.stdlib_module_names, "graphplan", "numpy", "torch"} - {"__main__"}
_CACHED: Any = type(functools.lru_cache(lambda: None))
_AROUND = {
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    functools.partialmethod: "func",
    functools.cached_property: "func",
}
_PLAIN = {bool, int, float, str, bytes, type(None)}
_TRACED = (FakeTensor, *TRACED_NUMBERS)
_CONTAINERS = (dict, list, deque, tuple, set, frozenset)
_ABSENT = object()


class CodeCaches:
    """What the functions, classes and hooks of a model reach, those of their own packages."""

    def __init__(self, model: nn.Module) -> None:
        self._tables: dict[int, Any] = {}  # by id: dicts, lists, classes, and cells
        self._cached: list[Any] = []
        parts = list(model.modules())
        hooks = [hook for part in parts for hook in hooks_of(part)]
        functions = [value for part in parts for value in vars(part).values() if type(value) is FunctionType]
        classes = [cls for kind in set(map(type, parts)) for cls in kind.__mro__]
        code = [*map(function_of, hooks), *functions, *classes]
        self._packages = set(map(_package, code)) - _LIBRARIES
        self._todo: list[Any] = [*code, *hooks, *(type(one) for part in parts for one in vars(part).values())]
        own, seen = held_by(model), set[int]()
        while self._todo:
            value = self._todo.pop()
            # attributes of the model are left to others
            if type(value) not in _PLAIN and id(value) not in seen:
                seen.add(id(value))
                if id(value) not in own or not issubclass(type(value), nn.Module | dict | list | deque):
                    self._read(value)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """A block after which they hold nothing of a trace."""
        before = [(table, dict(_items(table))) for table in self._tables.values()]
        misses = [cached.cache_info().misses for cached in self._cached]
        try:
            yield
        finally:
            for table, known in before:
                _put_back(table, known)
            for cached, count in zip(self._cached, misses, strict=True):
                if cached.cache_info().misses != count and any(map(_is_traced, _results(cached))):
                    cached.cache_clear()

    def _read(self, value: Any) -> None:
        kind = type(value)  # what stands for an object elsewhere, as of a request, may not be asked
        if kind is _CACHED:
            self._cached.append(value)
            self._todo += _results(value)
        elif kind is MethodType:
            self._todo += [value.__func__, value.__self__]
        elif kind is BuiltinMethodType:
            self._todo.append(value.__self__)
        elif kind is functools.partial:
            self._todo += [value.func, *value.args, *value.keywords.values()]
        elif kind in _AROUND:
            self._todo.append(getattr(value, _AROUND[kind]))
        elif kind is FunctionType:
            if _package(value) in self._packages:
                self._todo += [vars(value), *self._named(value), *(value.__closure__ or ())]
                self._todo += [*(value.__defaults__ or ()), value.__kwdefaults__]
        elif issubclass(kind, type):
            if _package(value) in self._packages:
                self._tables[id(value)] = value
                self._todo += [*value.__mro__, *vars(value).values()]
        elif issubclass(kind, dict | list | deque | CellType):
            self._tables[id(value)] = value
            self._todo += [inside for _, inside in _items(value)]
        elif issubclass(kind, tuple):
            self._todo += tuple.__iter__(value)
        elif issubclass(kind, nn.Module):
            self._tables[id(vars(value))] = vars(value)
            self._todo += own_attributes(value).values()
        elif issubclass(kind, threading.local):
            self._todo.append(vars(value))  # those of this thread
        elif issubclass(kind, MutableMapping) or _package(kind) in self._packages:
            self._todo += [kind, attributes_behind(value)]

    def _named(self, function: FunctionType) -> list[Any]:
        """What a function finds under the names in it, in its own module and in others of the packages."""
        names, spaces, found = names_in(function), [function.__globals__], list[Any]()
        for space in spaces:
            self._tables[id(space)] = space
            read = space.copy() if "globals" in names else names & space.keys()  # by names that it makes
            for value in map(space.get, read):
                if not issubclass(type(value), ModuleType):
                    found.append(value)
                elif _top(vars(value).get("__name__")) in self._packages:
                    spaces += [vars(value)] if id(vars(value)) not in map(id, spaces) else []
        return found


def _package(code: Any) -> str:
    return _top(getattr(code, "__module__", None))


def _top(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _items(table: Any) -> list[tuple[Any, Any]]:
    if isinstance(table, CellType):
        inside = content_of(table)
        return [] if inside is EMPTY else [("cell_contents", inside)]
    return list(vars(table).items()) if isinstance(table, type) else items_of(table)


def _put_back(table: Any, known: dict[Any, Any]) -> None:
    """Take what is of a trace from a table, and give it back what was there."""
    new = [(name, value) for name, value in _items(table) if known.get(name, _ABSENT) is not value]
    for name in [name for name, value in new if _is_traced(value)]:
        if isinstance(table, list | deque):
            table.clear()
            table.extend(known.values())
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


def _is_traced(value: Any) -> bool:
    """Whether something is of a trace, or holds that."""

    def inside(one: Any) -> Iterable[Any]:
        if issubclass(type(one), type | ModuleType | FunctionType):
            return ()
        found = one if issubclass(type(one), _CONTAINERS) else attributes_behind(one)
        return dict.values(found) if isinstance(found, dict) else found or ()

    return any(issubclass(type(one), _TRACED) for one in reached([value], inside, id))
