"""What lies in an attribute that a trace may have read: the items of a list, the attributes of an object.

An attribute is looked into if it is *data* through and through: numbers, text, tensors, functions, and
containers and objects of these. Any other object, such as a tokenizer or a trainer that holds the model, is
one thing.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import ismethod, isroutine
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from graphplan.capture.changes.attribute_snapshots import Attributes, own_attributes, snapshot

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_ONE_THING = (type, ModuleType, logging.Logger, torch.Generator)
_NAMESPACES = (SimpleNamespace, argparse.Namespace, nn.Module)
_LIBRARIES = {"numpy", "torch", *sys.stdlib_module_names} - {"__main__", "collections"}
_SEQUENCES = (list, tuple, deque)
_CONTAINERS = (*_SEQUENCES, dict, set, frozenset)
_OF_BYTES = (bytearray, array)
_BY_IDENTITY: tuple[Any, ...] = (None, object.__hash__)  # or not at all: what has such a hash may change


@dataclass(slots=True)
class Data:
    """What was found, each with its name for people.

    Attributes:
        entries: dictionaries and sequences, and a key there.
        containers: plain ones, which are compared whole.
        tensors: of which writes are counted.
        objects: what else has attributes.
        seen: ids of all that was looked into.
    """

    entries: list[tuple[str, Any, Any]] = field(default_factory=list)
    containers: list[tuple[str, Any]] = field(default_factory=list)
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)


def data_in(name: str, value: Any, known: set[int], model: set[int]) -> Data:
    """What is in an attribute; nothing where it is not data.

    Args:
        name: of the attribute, for people.
        value: the attribute.
        known: ids of what was found before.
        model: ids of the modules of the model, which are read otherwise.
    """
    found = Data()
    return found if _add(name, value, found, known, model, owned=False) else Data()


def plain_data(model: nn.Module) -> Iterator[tuple[Any, str, Data]]:
    """What is in attributes that are not torch's: the owner, the attribute, what was not found before."""
    parts = list(model.modules())
    ids, known = set(map(id, parts)), set[int]()
    owners: list[nn.Module | torch.Tensor] = [*parts, *model.parameters()]
    for owner in owners:
        for name, value in own_attributes(owner).items():
            found = data_in(name, value, known, ids)
            known |= found.seen
            yield owner, name, found


def plain_tensors(model: nn.Module) -> Iterator[tuple[Any, str, str, torch.Tensor]]:
    """The tensors in attributes that are neither parameters nor buffers: owner, attribute, name, tensor."""
    for part, name, found in plain_data(model):
        yield from ((part, name, inner, tensor) for inner, tensor in found.tensors)


def objects_in(model: nn.Module) -> list[Any]:
    """The objects in attributes, and in what lies there, that are data and have attributes themselves."""
    return [one for _, _, found in plain_data(model) for one in found.objects]


def attributes_of(model: nn.Module) -> Attributes:
    """For each module, parameter and object of a tree, the attributes that are not torch's."""
    owners = [*model.modules(), *model.parameters(), *objects_in(model)]
    return [(one, {name: snapshot(value) for name, value in own_attributes(one).items()}) for one in owners]


def is_plain(value: Any, around: tuple[int, ...] = ()) -> bool:
    """Whether it is of numbers, text and containers of these; ``around`` has the ids of those it is in."""
    if not isinstance(value, _CONTAINERS):
        return isinstance(value, _PLAIN)
    items = value.values() if isinstance(value, dict) else value
    around = (*around, id(value))
    return all(id(item) not in around and is_plain(item, around) for item in items)


def is_container(value: Any) -> bool:
    """Whether it can be compared whole, and something in it may be changed in place."""
    return isinstance(value, _OF_BYTES) or (isinstance(value, _CONTAINERS) and is_plain(value))


def _add(name: str, value: Any, found: Data, known: set[int], model: set[int], *, owned: bool) -> bool:
    """Add what is in a value; whether it is data. ``owned``: by an object, as a trainer owns its model."""
    if id(value) in model:
        return not owned
    if id(value) in known or id(value) in found.seen or isinstance(value, _ONE_THING):
        return True
    found.seen.add(id(value))
    if _has_attributes(value):
        found.objects.append(value)
    if is_container(value):
        found.containers.append((name, value))
    elif isinstance(value, torch.Tensor):
        if not value.is_inference():  # which do not count
            found.tensors.append((name, value))
    elif not is_plain(value) and not _is_configuration(value):
        if ismethod(value):
            return _add(name, value.__self__, found, known, model, owned=False)
        partial = isinstance(value, functools.partial)  # for Python 3.14 a routine too
        if (isroutine(value) and not partial) or type(value).__module__.partition(".")[0] == "numpy":
            return True
        if not isinstance(value, _CONTAINERS) and not partial and not _is_object(value):
            return _is_immutable(value)
        is_object = owned or not isinstance(value, _CONTAINERS)
        if isinstance(value, set | frozenset):  # whose items have no keys
            return all(_add(f"an item of {name}", one, found, known, model, owned=owned) for one in value)
        of_partial = (value.func,) if partial else ()
        if not all(_add(f"{name}.func", one, found, known, model, owned=owned) for one in of_partial):
            return False
        for inner, table, key in _inside(name, value):
            found.entries.append((inner, table, key))
            if not _add(inner, table[key], found, known, model, owned=is_object):
                return False
    return True


def _is_configuration(value: Any) -> bool:
    """Whether it has what are modes of the model, or of other code."""
    return hasattr(type(value), "to_dict")


def _has_attributes(value: Any) -> bool:
    """Whether a call may assign to it."""
    if isinstance(value, _CONTAINERS):
        return bool(getattr(value, "__dict__", None))
    return _is_object(value) and not isinstance(value, torch.Tensor) and not _is_configuration(value)


def _is_object(value: Any) -> bool:
    """Whether it is of a class of the user's, or only has attributes."""
    library = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and (isinstance(value, _NAMESPACES) or library not in _LIBRARIES)


def _is_immutable(value: Any) -> bool:
    """Whether a library says that its value stays: a path, a range, a date."""
    return isinstance(value, slice) or type(value).__hash__ not in _BY_IDENTITY


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each item or attribute: its name, what holds it, and the key there."""
    if isinstance(value, functools.partial):
        yield from ((f"{name}({key}=)", value.keywords, key) for key in value.keywords)
        value = value.args
    if isinstance(value, _SEQUENCES):
        yield from ((f"{name}[{index}]", value, index) for index, _ in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", value, key) for key in value)
    else:
        yield from ((f"{name}.{key}", vars(value), key) for key in vars(value))
