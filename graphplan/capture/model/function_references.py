"""What the functions that a model holds refer to: hooks, a ``forward`` of an instance, lambdas in attributes.

A hook that looks into a model keeps what it sees in a dict or an object, for the model itself or for others::

    features = {}
    model.layer.register_forward_hook(lambda module, args, output: features.update(layer=output))

A deep copy copies no function: those of a copied model would refer to the original. And a trace, which runs a
hook once, would leave tensors without values where it stores them.
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
from graphplan.capture.structure import reached

_CONTAINERS = (dict, list, set, deque)
_CODE = (FunctionType, MethodType, functools.partial)
_REFERRING: tuple[Any, ...] = (tuple, weakref.ref, *weakref.ProxyTypes)
_UNWATCHED = (ModuleType, type, Logger)  # a logger keeps for itself which levels are on

_KEPT = (
    "{} stores something outside of the model. It runs in the trace alone, and in no call of the placed "
    "model: to have it run in each, remove it before, and add it to the placed model, whose modules then run "
    "one by one"
)


def shared_with_hooks(model: nn.Module) -> dict[int, Any]:
    """For ``copy.deepcopy``: the global containers that hooks know, which a copy has in common with them.

    Not those with modules or weights of the model, which the copy has in it as its own.
    """
    own = _References({id(one): None for one in (*model.modules(), *model.parameters(), *model.buffers())})
    known = (
        one for part in model.modules() for hook in hooks_of(part) for one in _globals(function_of(hook))
    )
    containers = (one for one in known if issubclass(type(one), _CONTAINERS))
    return {id(one): one for one in containers if not own.reached_from(one)}


def proxies_of(parts: Iterable[nn.Module]) -> dict[int, Any]:
    """For ``copy.deepcopy``, which would copy once more what they stand for: weak proxies of modules."""
    found = (one for part in parts for one in weakref.getweakrefs(part))
    return {id(one): one for one in found if issubclass(type(one), weakref.ProxyTypes)}


def refer_to_copies(made: nn.Module, parts: Iterable[nn.Module], copies: dict[int, Any]) -> None:
    """Have functions and weak references, in all that was copied, refer to ``copies``.

    Args:
        made: the copy.
        parts: the modules that were copied.
        copies: of everything, by the id of the original: what ``copy.deepcopy`` has noted.
    """
    # others are the caller's, too
    copied = [one for known, one in copies.items() if known not in (id(one), id(copies))]
    for part in parts:
        mine = copies.get(id(part))
        for one in weakref.getweakrefs(part) if mine is not None else ():  # it may make its parts anew
            if type(one) is weakref.ref:
                copies[id(one)] = weakref.ref(mine)
            elif issubclass(type(one), weakref.ProxyTypes):
                copies[id(one)] = weakref.proxy(mine)
    references = _References(copies)
    for one in (*copied, *made.modules()):
        in_it = issubclass(type(one), dict | list | deque)
        table: Any = one if in_it else None if type(one) in _CODE else attributes_behind(one)
        for key, value in [] if table is None else items_of(table):
            if type(value) in _CODE or issubclass(type(value), _REFERRING):
                referring = references.referring(value)
                if referring is not value:
                    table[key] = referring


@contextmanager
def untouched_by_hooks(model: nn.Module) -> Iterator[list[str]]:
    """A block after which what hooks refer to is as it was, with a list for what is to be said of it then.

    Attributes of the model are left to others.
    """
    hooks, cells, tables = list(_named_hooks(model)), list[Any](), dict[int, Any]()
    own = held_by(model) if hooks else set[int]()
    for said, hook in hooks:
        closed = getattr(function_of(hook), "__closure__", None) or ()
        cells += [(said, cell, content_of(cell)) for cell in closed]
        for value in _referred(hook):
            table = value if issubclass(type(value), _CONTAINERS) else attributes_behind(value)
            is_attribute = id(value) in own and (table is value or isinstance(value, nn.Module))
            if table is not None and not is_attribute and id(table) not in tables:
                tables[id(table)] = "" if id(value) in own else said, snapshot(table)
    kept: list[str] = []
    try:
        yield kept
    finally:
        told = []
        for said, cell, before in cells:
            if content_of(cell) is not before:
                told.append(said)
                del cell.cell_contents
                if before is not EMPTY:
                    cell.cell_contents = before
        for said, known in tables.values():
            if not known.is_of(known.value):
                told.append(said)
                known.put_back()
        kept += [_KEPT.format(said) for said in dict.fromkeys(told) if said]


def _named_hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in model.named_modules():
        for hook in hooks_of(part):
            name = getattr(function_of(hook), "__qualname__", type(hook).__name__)
            yield f"The hook {name} of {path or 'the model'!r}", hook


def _globals(function: Any) -> list[Any]:
    names = names_in(function) if isinstance(function, FunctionType) else ()
    return [function.__globals__[name] for name in names if name in function.__globals__]


def _referred(hook: Any) -> Iterator[Any]:
    """What a hook could write to."""
    function = function_of(hook)
    found = [function, *_globals(function)]
    if isinstance(function, FunctionType):
        found += _inside(function)
    while isinstance(hook, functools.partial):
        found += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    for value in (*found, hook):
        owner = value.__self__ if type(value) in (MethodType, BuiltinMethodType) else value
        if not issubclass(type(owner), _UNWATCHED):
            yield owner


class _References:
    """What refers to something that has a copy, and the same referring to the copy.

    Args:
        copies: by the id of the original.
    """

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._made: dict[int, Any] = {}  # by the id of what refers to an original
        self._apart: set[int] = set()  # what refers to none

    def reached_from(self, value: Any) -> bool:
        """Whether something is, holds, or closes over what has a copy."""
        seen = set[int]()
        for one in reached([value], lambda one: () if id(one) in self._apart else _inside(one), id):
            if self._copies.get(id(one), one) is not one:
                return True
            if type(one) is MethodType and id(one.__self__) in self._copies:
                return True
            seen.add(id(one))
        self._apart |= seen
        return False

    def referring(self, value: Any) -> Any:
        """The copy of something, or what refers to copies in its place; else itself."""
        copied = self._copies.get(id(value), value)
        if copied is not value:
            return copied
        if id(value) not in self._made and self.reached_from(value):
            self._make(value)
        return self._made.get(id(value), value)

    def _make(self, value: Any) -> None:
        """What may refer to itself is known before what is in it is made."""
        kind: Any = type(value)
        if kind is FunctionType:
            self._make_function(value)
        elif kind is functools.partial:
            named = {name: self.referring(one) for name, one in value.keywords.items()}
            func, *args = map(self.referring, (value.func, *value.args))
            self._made[id(value)] = functools.partial(func, *args, **named)
        elif kind is MethodType:  # that of a placed model, for which its plain one stands, stays its own
            owner, known = value.__self__, id(value.__self__) in self._copies
            owner = self._copies[id(owner)] if known else owner
            self._made[id(value)] = MethodType(self.referring(value.__func__), owner)
        elif kind in (tuple, set):
            self._made[id(value)] = kind(map(self.referring, value))
        elif issubclass(kind, tuple):
            self._made[id(value)] = kind._make(map(self.referring, value))
        else:
            made = self._made[id(value)] = copy.copy(value)
            made.clear()
            if kind is list:
                made += map(self.referring, value)
            else:
                made.update({self.referring(key): self.referring(one) for key, one in value.items()})

    def _make_function(self, value: FunctionType) -> None:
        closed = value.__closure__ or ()
        cells = tuple(CellType() for _ in closed)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        self._made[id(value)] = made
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(made, name, getattr(value, name))
        vars(made).update(vars(value))
        if value.__defaults__:
            made.__defaults__ = tuple(map(self.referring, value.__defaults__))
        if value.__kwdefaults__:
            made.__kwdefaults__ = {name: self.referring(one) for name, one in value.__kwdefaults__.items()}
        for cell, own in zip(cells, closed, strict=True):
            if (inside := content_of(own)) is not EMPTY:
                cell.cell_contents = self.referring(inside)


def _inside(value: Any) -> list[Any]:
    if type(value) is FunctionType:
        defaults = value.__defaults__ or (), (value.__kwdefaults__ or {}).values()
        return [*map(content_of, value.__closure__ or ()), *chain(*defaults)]
    if type(value) is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) is MethodType:
        return [value.__func__]
    # of tuples of other classes, nobody knows how they are made
    named = issubclass(type(value), tuple) and hasattr(type(value), "_make")
    return list(tuple.__iter__(value)) if named else contents_of(value)
