"""Objects that a model's functions refer to: hooks, an instance's own ``forward``, lambdas in attributes.

A hook may store activations in a dict or an object that the model or other code reads::

    features = {}
    model.layer.register_forward_hook(lambda module, args, output: features.update(layer=output))

``copy.deepcopy`` does not copy functions, so those of a copied model would refer to the original. A trace
runs each hook once, and would leave tensors without values where the hook stores them.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from logging import Logger
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from graphplan.capture.changes.attribute_snapshots import (
    attributes_behind,
    contents_of,
    held_by,
    items_of,
    snapshot,
)
from graphplan.capture.changes.model_functions import EMPTY, content_of, function_of, hooks_of, names_in
from graphplan.capture.structure import CONTAINERS, reachable

_CODE = (FunctionType, MethodType, functools.partial)
_REFERRING: tuple[Any, ...] = (tuple, weakref.ref, *weakref.ProxyTypes)
_UNWATCHED = (ModuleType, type, Logger)  # a logger caches which levels are enabled

_STORES_OUTSIDE = (
    "{} stores something outside of the model. It runs only while the model is traced, not in forward passes "
    "of the placed model. To run it in each, remove it before placing, and register it on the placed model, "
    "whose modules then run one by one"
)


def shared_with_hooks(model: nn.Module) -> dict[int, Any]:
    """Return the global containers that hooks refer to, by id, as a memo for ``copy.deepcopy``.

    The copy shares them, unless they lead to modules or weights of the model: these it needs copied.
    """
    finder = _References({id(one): None for one in (*model.modules(), *model.parameters(), *model.buffers())})
    referenced = (
        one for part in model.modules() for hook in hooks_of(part) for one in _globals(function_of(hook))
    )
    containers = (one for one in referenced if issubclass(type(one), CONTAINERS))
    return {id(one): one for one in containers if not finder.reached_from(one)}


def proxies_of(parts: Iterable[nn.Module]) -> dict[int, Any]:
    """Return weak proxies of modules, by id, as a memo for ``copy.deepcopy``: it would copy their modules."""
    references = (one for part in parts for one in weakref.getweakrefs(part))
    return {id(one): one for one in references if issubclass(type(one), weakref.ProxyTypes)}


def refer_to_copies(model_copy: nn.Module, parts: Iterable[nn.Module], copies: dict[int, Any]) -> None:
    """Make functions and weak references in all copied objects refer to ``copies``.

    Args:
        model_copy: the copy of the model.
        parts: the modules that were copied.
        copies: id of the original -> copy, the memo of ``copy.deepcopy``.
    """
    # an object that is its own copy is shared with the caller's model
    copied = [one for key, one in copies.items() if key not in (id(one), id(copies))]
    for part in parts:
        part_copy = copies.get(id(part))
        if part_copy is None:  # its parent may rebuild it
            continue
        for one in weakref.getweakrefs(part):
            if type(one) is weakref.ref:
                copies[id(one)] = weakref.ref(part_copy)
            elif issubclass(type(one), weakref.ProxyTypes):
                copies[id(one)] = weakref.proxy(part_copy)
    references = _References(copies)
    for one in (*copied, *model_copy.modules()):
        is_container = issubclass(type(one), dict | list | deque)
        table: Any = one if is_container else None if type(one) in _CODE else attributes_behind(one)
        for key, value in [] if table is None else items_of(table):
            if type(value) in _CODE or issubclass(type(value), _REFERRING):
                referring = references.referring(value)
                if referring is not value:
                    table[key] = referring


@contextmanager
def untouched_by_hooks(model: nn.Module) -> Iterator[list[str]]:
    """Context manager that restores objects to which hooks refer; it yields a list for warnings at the exit.

    Attributes of the model are restored elsewhere.
    """
    hooks, cells, tables = list(_named_hooks(model)), list[Any](), dict[int, Any]()
    held = held_by(model) if hooks else set[int]()
    for label, hook in hooks:
        closure = getattr(function_of(hook), "__closure__", None) or ()
        cells += [(label, cell, content_of(cell)) for cell in closure]
        for value in _writable_objects(hook):
            table = value if issubclass(type(value), CONTAINERS) else attributes_behind(value)
            is_attribute = id(value) in held and (table is value or isinstance(value, nn.Module))
            if table is not None and not is_attribute and id(table) not in tables:
                tables[id(table)] = "" if id(value) in held else label, snapshot(table)
    warnings: list[str] = []
    try:
        yield warnings
    finally:
        changed = []
        for label, cell, before in cells:
            if content_of(cell) is not before:
                changed.append(label)
                del cell.cell_contents
                if before is not EMPTY:
                    cell.cell_contents = before
        for label, state in tables.values():
            if not state.matches(state.value):
                changed.append(label)
                state.restore()
        warnings += [_STORES_OUTSIDE.format(label) for label in dict.fromkeys(changed) if label]


def _named_hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in model.named_modules():
        for hook in hooks_of(part):
            name = getattr(function_of(hook), "__qualname__", type(hook).__name__)
            yield f"The hook {name} of {path or 'the model'!r}", hook


def _globals(function: Any) -> list[Any]:
    names = names_in(function) if isinstance(function, FunctionType) else ()
    return [function.__globals__[name] for name in names if name in function.__globals__]


def _writable_objects(hook: Any) -> Iterator[Any]:
    """Yield the objects that a hook could write to."""
    function = function_of(hook)
    objects = [function, *_globals(function)]
    if isinstance(function, FunctionType):
        objects += _references_in(function)
    while isinstance(hook, functools.partial):
        objects += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    for value in (*objects, hook):
        owner = value.__self__ if type(value) in (MethodType, BuiltinMethodType) else value
        if not issubclass(type(owner), _UNWATCHED):
            yield owner


class _References:
    """Finds objects that refer to an original, and makes versions of them that refer to its copy.

    Args:
        copies: id of the original -> copy.
    """

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._redirected: dict[int, Any] = {}  # by the id of the object that refers to an original
        self._unrelated: set[int] = set()  # ids of objects that refer to none

    def reached_from(self, value: Any) -> bool:
        """Whether ``value`` is, holds, or closes over an object that has a copy."""
        seen = set[int]()
        for one in reachable(
            [value], lambda one: () if id(one) in self._unrelated else _references_in(one), id
        ):
            if self._copies.get(id(one), one) is not one:
                return True
            if type(one) is MethodType and id(one.__self__) in self._copies:
                return True
            seen.add(id(one))
        self._unrelated |= seen
        return False

    def referring(self, value: Any) -> Any:
        """Return the copy of ``value``, or a version of it that refers to copies; else itself."""
        copied = self._copies.get(id(value), value)
        if copied is not value:
            return copied
        if id(value) not in self._redirected and self.reached_from(value):
            self._redirect(value)
        return self._redirected.get(id(value), value)

    def _redirect(self, value: Any) -> None:
        """Make a version that refers to copies; register one that may hold itself before its contents."""
        kind: Any = type(value)
        if kind is FunctionType:
            self._redirect_function(value)
        elif kind is functools.partial:
            named = {name: self.referring(one) for name, one in value.keywords.items()}
            func, *args = map(self.referring, (value.func, *value.args))
            self._redirected[id(value)] = functools.partial(func, *args, **named)
        elif kind is MethodType:  # one of a placed model stays bound to it: only ``get`` of a memo finds that
            owner, is_copied = value.__self__, id(value.__self__) in self._copies
            owner = self._copies[id(owner)] if is_copied else owner
            self._redirected[id(value)] = MethodType(self.referring(value.__func__), owner)
        elif kind in (tuple, set):
            self._redirected[id(value)] = kind(map(self.referring, value))
        elif issubclass(kind, tuple):
            self._redirected[id(value)] = kind._make(map(self.referring, value))
        else:
            container = self._redirected[id(value)] = copy.copy(value)
            container.clear()
            if kind is list:
                container += map(self.referring, value)
            else:
                container.update({self.referring(key): self.referring(one) for key, one in value.items()})

    def _redirect_function(self, value: FunctionType) -> None:
        closure = value.__closure__ or ()
        cells = tuple(CellType() for _ in closure)
        copied = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        self._redirected[id(value)] = copied
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(copied, name, getattr(value, name))
        vars(copied).update(vars(value))
        if value.__defaults__:
            copied.__defaults__ = tuple(map(self.referring, value.__defaults__))
        if value.__kwdefaults__:
            copied.__kwdefaults__ = {name: self.referring(one) for name, one in value.__kwdefaults__.items()}
        for cell, original in zip(cells, closure, strict=True):
            if (content := content_of(original)) is not EMPTY:
                cell.cell_contents = self.referring(content)


def _references_in(value: Any) -> list[Any]:
    if type(value) is FunctionType:
        defaults = value.__defaults__ or (), (value.__kwdefaults__ or {}).values()
        return [*map(content_of, value.__closure__ or ()), *chain(*defaults)]
    if type(value) is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) is MethodType:
        return [value.__func__]
    # how to construct other subclasses of tuple is unknown
    is_named = issubclass(type(value), tuple) and hasattr(type(value), "_make")
    return list(tuple.__iter__(value)) if is_named else contents_of(value)
