"""Contents of attributes that a trace may have read: the items of a list, the attributes of an object.

An attribute is searched if it is *data* throughout: numbers, text, tensors, functions, and containers and
objects of these. Any other object, such as a tokenizer or a trainer that holds the model, is not searched.
"""

from __future__ import annotations

import argparse
import enum
import functools
import logging
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import ismethod, isroutine
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from graphplan.capture.changes.attribute_snapshots import Attributes, items_of, own_attributes, snapshot
from graphplan.capture.structure import CONTAINERS, PLAIN

_NOT_SEARCHED = (type, ModuleType, logging.Logger, torch.Generator)
_NAMESPACES = (SimpleNamespace, argparse.Namespace, nn.Module)
_LIBRARIES = {"numpy", "torch", *sys.stdlib_module_names} - {"__main__", "collections"}
_UNCHANGING = tuple(kind for kind in PLAIN if kind is not enum.Enum)  # a member may have attributes
_BYTE_CONTAINERS = (bytearray, array)
_IDENTITY_HASHES: tuple[Any, ...] = (None, object.__hash__)  # objects with such a hash, or none, may change


@dataclass(slots=True)
class Data:
    """The contents of attributes, each with a readable name.

    Attributes:
        searched: ids of the values that were searched before.
        model: ids of the model's modules.
        entries: items: the name, the dict or sequence that holds the item, its key.
        containers: containers of plain values, which are compared whole.
        tensors: tensors with a version counter.
        objects: objects with attributes.
        seen: ids of all values that were searched.
    """

    searched: set[int]
    model: set[int]
    entries: list[tuple[str, Any, Any]] = field(default_factory=list)
    containers: list[tuple[str, Any]] = field(default_factory=list)
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def add(self, name: str, value: Any, *, owned: bool = False) -> bool:
        """Add the contents of a value, ``owned`` by an object or not; return whether it is data."""
        if id(value) in self.model:
            return not owned
        if id(value) in self.searched or id(value) in self.seen or isinstance(value, _NOT_SEARCHED):
            return True
        self.seen.add(id(value))
        if _has_attributes(value):
            self.objects.append(value)
        if is_container(value):
            self.containers.append((name, value))
            return True
        if isinstance(value, torch.Tensor):
            if not value.is_inference():  # such tensors have no version counter
                self.tensors.append((name, value))
            return True
        if is_plain(value, classes=_UNCHANGING) or _is_configuration(value):
            return True
        if ismethod(value):
            return self.add(name, value.__self__)
        if isinstance(value, functools.partial):  # from Python 3.14 on a routine, too
            is_data = self.add(f"{name}.func", value.func, owned=owned)
            return is_data and self._add_items(name, value, owned=True)
        if isroutine(value) or type(value).__module__.partition(".")[0] == "numpy":
            return True
        if isinstance(value, set | frozenset):  # their items have no keys
            return all(self.add(f"an item of {name}", one, owned=owned) for one in value)
        if isinstance(value, CONTAINERS):
            return self._add_items(name, value, owned=owned)
        return self._add_items(name, value, owned=True) if _is_object(value) else _is_immutable(value)

    def _add_items(self, name: str, value: Any, *, owned: bool) -> bool:
        for inner, table, key in _items_in(name, value):
            self.entries.append((inner, table, key))
            if not self.add(inner, table[key], owned=owned):
                return False
        return True


def data_in(name: str, value: Any, searched: set[int], model: set[int]) -> Data:
    """Return the contents of an attribute; nothing if it is not data.

    Args:
        name: readable name of the attribute.
        value: the attribute.
        searched: ids of the values that were searched before.
        model: ids of the model's modules, which are searched separately.
    """
    data = Data(searched, model)
    return data if data.add(name, value) else Data(searched, model)


def plain_data(model: nn.Module) -> Iterator[tuple[Any, str, Data]]:
    """Yield owner, attribute name and contents of attributes that are not torch's; each value once."""
    parts = list(model.modules())
    module_ids, searched = set(map(id, parts)), set[int]()
    owners: list[nn.Module | torch.Tensor] = [*parts, *model.parameters()]
    for owner in owners:
        for name, value in own_attributes(owner).items():
            data = data_in(name, value, searched, module_ids)
            searched |= data.seen
            yield owner, name, data


def plain_tensors(model: nn.Module) -> Iterator[tuple[Any, str, str, torch.Tensor]]:
    """Yield tensors that are neither parameters nor buffers: owner, attribute name, full name, tensor."""
    for owner, name, data in plain_data(model):
        yield from ((owner, name, inner, tensor) for inner, tensor in data.tensors)


def objects_in(model: nn.Module) -> list[Any]:
    """Return the objects with attributes in the data of a model's attributes."""
    return [one for _, _, data in plain_data(model) for one in data.objects]


def attributes_of(model: nn.Module) -> Attributes:
    """Return snapshots of the attributes that are not torch's, for each module, parameter and object."""
    owners = [*model.modules(), *model.parameters(), *objects_in(model)]
    return [(one, {name: snapshot(value) for name, value in own_attributes(one).items()}) for one in owners]


def is_plain(value: Any, enclosing: tuple[int, ...] = (), classes: tuple[Any, ...] = PLAIN) -> bool:
    """Whether a value, in ``enclosing`` containers (ids), consists of values of these classes."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if not isinstance(value, CONTAINERS):
        return isinstance(value, classes)
    enclosing = (*enclosing, id(value))
    return all(
        id(item) not in enclosing and is_plain(item, enclosing, classes) for _, item in items_of(value)
    )


def is_container(value: Any) -> bool:
    """Whether a value is a container that is compared whole, since it may be changed in place."""
    return isinstance(value, _BYTE_CONTAINERS) or (isinstance(value, CONTAINERS) and is_plain(value))


def _is_configuration(value: Any) -> bool:
    """Whether a value is a configuration, whose values are modes."""
    return hasattr(type(value), "to_dict")


def _has_attributes(value: Any) -> bool:
    """Whether a call may assign attributes of a value."""
    if isinstance(value, CONTAINERS):
        return bool(getattr(value, "__dict__", None))
    return _is_object(value) and not isinstance(value, torch.Tensor) and not _is_configuration(value)


def _is_object(value: Any) -> bool:
    """Whether a value has attributes, and is a namespace or of a class that no library here defines."""
    library = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and (isinstance(value, _NAMESPACES) or library not in _LIBRARIES)


def _is_immutable(value: Any) -> bool:
    """Whether the class hashes by value, so that the value cannot change: a path, a range, a date."""
    return isinstance(value, slice) or type(value).__hash__ not in _IDENTITY_HASHES


def _items_in(name: str, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each item or attribute: its readable name, its container, the key there."""
    if isinstance(value, functools.partial):
        yield from ((f"{name}({key}=)", value.keywords, key) for key in value.keywords)
        value = value.args
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", value, key) for key in value)
    elif isinstance(value, CONTAINERS):
        yield from ((f"{name}[{index}]", value, index) for index, _ in enumerate(value))
    else:
        yield from ((f"{name}.{key}", vars(value), key) for key in vars(value))
