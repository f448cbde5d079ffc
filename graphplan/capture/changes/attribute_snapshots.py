"""Snapshots of the attributes of modules, and of the contents of containers there, to compare and restore.

A trace or a trial runs ``forward``, which may count its calls or set flags, and must leave the model as it
was::

    before = attributes_of(model)
    model(x)                           self.calls["train"] += 1
    restore_attributes(before)         returns ["calls"]
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import isroutine
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import nn

from graphplan.capture.parameter_attributes import custom_attributes
from graphplan.capture.structure import CONTAINERS, PLAIN, reachable

MODULE_INTERNALS = {*(name for name in vars(nn.Module()) if "hooks" not in name), "forward"} - {"training"}
"""Attributes that every ``nn.Module`` has, and ``forward``, which a trace replaces. Hooks and ``training``
are not among them: a model may add hooks at its first call, and ``forward`` may call ``self.norm.eval()``."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A value, and its contents when the snapshot was made.

    Attributes:
        value: the object itself.
        keys: the keys or indices of the items, or the names of the attributes.
        parts: snapshots of the items of a container, or of the attributes of an expanded object; a copy of an
            array; None for any other value.
    """

    value: Any
    keys: tuple[Any, ...] = ()
    parts: tuple[Snapshot, ...] | np.ndarray | None = None

    def matches(self, value: Any) -> bool:
        """Whether ``value`` is the object of this snapshot, with unchanged contents."""
        if value is not self.value:
            return False
        if self.parts is None:
            return True
        if isinstance(self.parts, np.ndarray):
            return bool(np.array_equal(self.parts, value, equal_nan=self.parts.dtype.kind in "fc"))
        items = items_of(value)
        return len(items) == len(self.parts) and all(
            _is_key(key, known) and part.matches(item)
            for (key, item), known, part in zip(items, self.keys, self.parts, strict=True)
        )

    def restore(self) -> Any:
        """Restore the contents of the object, and return it."""
        if isinstance(self.parts, np.ndarray):
            self.value[...] = self.parts
        elif self.parts is not None and not self.matches(self.value):
            items = [part.restore() for part in self.parts]
            if isinstance(self.value, dict):
                self.value.clear()
                self.value.update(zip(self.keys, items, strict=True))
            elif not isinstance(self.value, tuple | frozenset):
                self.value.clear()
                self.value.update(items) if isinstance(self.value, set) else self.value.extend(items)
        return self.value

    def expanded(self, objects: dict[int, Any]) -> Snapshot:
        """Return the snapshot with the current attributes of these objects expanded.

        Each object is expanded once, and removed from ``objects``.
        """
        if self.parts is None and id(self.value) in objects:
            own = own_attributes(objects.pop(id(self.value)))
            return Snapshot(self.value, tuple(own), tuple(map(snapshot, own.values()))).expanded(objects)
        if not isinstance(self.parts, tuple):
            return self
        return replace(self, parts=tuple(part.expanded(objects) for part in self.parts))

    def leaves(self) -> Iterator[Any]:
        """Yield the values in the snapshot that have no parts."""
        yield from (value for _, value in self.places())

    def places(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield these values with their places: the keys, as texts, that lead to them."""
        if isinstance(self.parts, tuple):
            for key, part in zip(self.keys, self.parts, strict=True):
                yield from part.places((*path, repr(key)))
        else:
            yield path, self.value

    def plain(self) -> Any:
        """Return the plain values, functions, classes and modules in a form to compare by ``==``."""
        if isinstance(self.parts, np.ndarray):
            return str(self.parts.dtype), self.parts.shape, self.parts.tobytes()
        if self.parts is not None:
            values = [part.plain() for part in self.parts]
            is_set = isinstance(self.value, set | frozenset)
            return list(map(repr, self.keys)), sorted(values, key=repr) if is_set else values
        if isinstance(self.value, (*PLAIN, slice)):
            return type(self.value), repr(self.value)
        return self.value if isinstance(self.value, type | nn.Module) or isroutine(self.value) else None


def snapshot(value: Any, enclosing: frozenset[int] = frozenset()) -> Snapshot:
    """Return a snapshot of a value; ``enclosing``: ids of the containers that enclose it."""
    if type(value) is np.ndarray and value.dtype != object:
        return Snapshot(value, (), value.copy())
    if not isinstance(value, CONTAINERS) or id(value) in enclosing:  # a container may hold itself
        return Snapshot(value)
    items, enclosing = items_of(value), enclosing | {id(value)}
    return Snapshot(
        value, tuple(key for key, _ in items), tuple(snapshot(item, enclosing) for _, item in items)
    )


def _is_key(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and bool(one == other))


def attributes_behind(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object itself, not of one that it is a proxy of; None if it has none."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes


def contents_of(value: Any) -> list[Any]:
    """Return the contents of a container; none of a derived class, which may compute them on access."""
    if type(value) in (dict, OrderedDict, defaultdict):
        return [*value, *value.values()]
    return list(value) if type(value) in (list, tuple, set) else []


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """Return the stored keys, or indices, and items of a container, without methods of a derived class.

    The methods of transformers' lazy mappings import the modules that they name. The items of a set are in a
    stable order.
    """
    kind: Any = type(container)
    if kind not in CONTAINERS:
        kind = next(base for base in CONTAINERS if issubclass(kind, base))
    if issubclass(kind, dict):
        return list(kind.items(container))
    items = kind.__iter__(container)
    return list(enumerate(sorted(items, key=id) if kind in (set, frozenset) else items))


def held_by(model: nn.Module) -> set[int]:
    """Return the ids of a model's modules, of their attributes except hooks, and of containers' contents."""

    def inside(value: Any) -> list[Any]:
        attributes = own_attributes(value) if isinstance(value, nn.Module) else {}
        return [one for name, one in attributes.items() if "hooks" not in name] + contents_of(value)

    return set(map(id, reachable(model.modules(), inside, id)))


Attributes = list[tuple[Any, dict[str, Snapshot]]]


def own_attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of a module, a parameter or another object, without torch's own."""
    if isinstance(owner, torch.Tensor):
        return custom_attributes(owner)
    internals = MODULE_INTERNALS if isinstance(owner, nn.Module) else ()
    return {name: value for name, value in vars(owner).items() if name not in internals}


def is_iterator(value: Any) -> bool:
    """Whether a value is a built-in iterator, such as ``itertools.cycle(...)``: a call may advance it."""
    return isinstance(value, Iterator) and not hasattr(value, "__dict__")


def restore_attributes(before: Attributes) -> list[str]:
    """Undo changes of attributes, and return their names."""
    changed = []
    for owner, known in before:
        table: dict[str, Any] = owner.__dict__
        for name in own_attributes(owner).keys() - known.keys():
            changed.append(name)
            del table[name]
        for name, original in known.items():
            if name not in table or not original.matches(table[name]):
                changed.append(name)
                table[name] = original.restore()
    return changed


@contextmanager
def restored(tables: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Context manager that restores the entries of tables, and their order, at its exit."""
    before = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, entries in before:
            if list(table) != list(entries) or any(map(is_not, table.values(), entries.values())):
                table.clear()
                table.update(entries)
