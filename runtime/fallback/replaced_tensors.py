"""Replace the tensors in arguments and results of modules, for example by copies on another device.

One object stays one object, even if several values contain it. Mutable containers and objects of any class
are searched. Objects that are not containers are changed in place, since others may refer to them::

    arrived = Replacement(to_device_1, in_place=True)
    arrived.apply(inputs)        {"h": on the CPU}  ->  the same dict, with a copy on device 1
    arrived.undo(to_the_cpu)     again as it was; but what was put into it meanwhile goes to the CPU
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import operator
from collections import UserDict, deque
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import isroutine
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from graphplan.capture.changes.attribute_snapshots import items_of
from graphplan.capture.structure import PLAIN_TYPES, node_of_class
from graphplan.capture.transformers.caches import is_cache

_TENSORS = (torch.Tensor, PackedSequence)

_NOT_SEARCHED = (*_TENSORS, nn.Module, type, ModuleType, logging.Logger)
_TORCH_ATTRIBUTES = {*vars(nn.Module()), "_graphplan"}
_Put = Callable[[Any, Any, Any], None]


@dataclass
class Replacement:
    """A replacement of the tensors in values.

    Attributes:
        replace: returns the replacement of a tensor or packed sequence.
        in_place: whether a mutable container itself is changed; else a copy with the changes replaces it.
            Objects that are not containers are always changed in place.
        holder: the module whose results the values are, if any: objects in its attributes stay as they are,
            for its next call.
        replacements: id -> (tensor or container, its replacement), of all that were met.
    """

    replace: Callable[[Any], Any]
    in_place: bool = False
    holder: nn.Module | None = None
    replacements: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def apply(self, value: Any) -> Any:
        """Return the value with its tensors replaced; the same object if it has none. Caches stay as is."""
        if type(value) in PLAIN_TYPES:
            return value
        if id(value) in self.replacements:
            return self.replacements[id(value)][1]
        if isinstance(value, _TENSORS):
            return self._record(value, self.replace(value))
        if isinstance(value, torch.Size | nn.Module) or is_cache(value):  # a size would become a tuple
            return value
        if _can_change(value):
            self._record(value, value)  # before its parts: it may contain itself
            changes, is_container = self._changes(value), _is_container(value)
            if not changes or (not is_container and id(value) in self._held):
                return value
            target = _shallow_copy(value) if is_container and not self.in_place else value
            return self._record(value, _apply_changes(target, changes))
        node = node_of_class(type(value))
        if node is None:
            return value
        parts, context = node.flatten_fn(value)
        replaced = [self.apply(part) for part in parts]
        fresh = not isinstance(value, tuple) and any(
            map(_can_change, parts)
        )  # flatten_fn may have made these containers, so that changes of them would be lost
        unchanged = not fresh and all(map(operator.is_, parts, replaced))
        return self._record(value, value if unchanged else node.unflatten_fn(replaced, context))

    def undo(self, replace: Callable[[Any], Any]) -> Replacement:
        """Undo changes in place, and return the inverse replacement.

        The inverse uses ``replace`` for unknown tensors, which modules have put into containers meanwhile.
        """
        inverse = Replacement(replace)
        for value, other in self.replacements.values():
            inverse._record(other, value)
            inverse._record(value, value)
        for value, _ in self.replacements.values():
            if _can_change(value):
                _apply_changes(value, inverse._changes(value))
        return inverse

    @functools.cached_property
    def _held(self) -> Container[int]:
        """The ids of tensors and containers in attributes of the holder."""
        search = Replacement(lambda tensor: tensor)
        if self.holder is None:
            return search.replacements
        for part in self.holder.modules():
            search.apply([value for name, value in vars(part).items() if name not in _TORCH_ATTRIBUTES])
        return search.replacements

    def _record(self, value: Any, other: Any) -> Any:
        self.replacements[id(value)] = value, other
        return other

    def _changes(self, container: Any) -> list[tuple[_Put, Any, Any]]:
        entries = ((put, key, part, self.apply(part)) for put, key, part in _entries(container))
        return [(put, key, other) for put, key, part, other in entries if other is not part]


def _can_change(value: Any) -> bool:
    return _is_container(value) or _has_attributes(value)


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | deque | UserDict) or dataclasses.is_dataclass(type(value))


def _has_attributes(value: Any) -> bool:
    if isinstance(value, UserDict) or dataclasses.is_dataclass(type(value)):
        return True
    closed = isinstance(value, _NOT_SEARCHED) or isroutine(value) or node_of_class(type(value)) is not None
    return not closed and hasattr(value, "__dict__")


def _entries(container: Any) -> list[tuple[_Put, Any, Any]]:
    """Return (setter, key, part) of each part of a container that is not plain."""
    items = items_of(container) if isinstance(container, list | dict | deque) else ()
    entries: list[tuple[_Put, Any, Any]] = [(operator.setitem, key, part) for key, part in items]
    if _has_attributes(container):
        table = getattr(container, "__dict__", {})  # a dataclass with slots has none
        fields = dataclasses.fields(container) if dataclasses.is_dataclass(container) else ()
        entries += [(_put_attribute, name, part) for name, part in table.items()]
        names = [slot.name for slot in fields if slot.name not in table and hasattr(container, slot.name)]
        entries += [(object.__setattr__, name, getattr(container, name)) for name in names]  # also if frozen
    return [entry for entry in entries if type(entry[2]) not in PLAIN_TYPES]


def _put_attribute(container: Any, name: str, value: Any) -> None:
    vars(container)[name] = value  # bypasses __setattr__ of the class


def _shallow_copy(container: Any) -> Any:
    """Return a copy of the container; the container itself if its class cannot be copied."""
    with suppress(TypeError):
        return copy.copy(container)
    return container


def _apply_changes(container: Any, changes: list[tuple[_Put, Any, Any]]) -> Any:
    for put, key, other in changes:
        put(container, key, other)
    return container


def to_device(value: Any, device: torch.device, holder: nn.Module | None = None) -> Any:
    """Return the value with its tensors on a device; caches as is, sizes of packed sequences on the CPU.

    ``holder`` is as in :class:`Replacement`.
    """
    return Replacement(lambda tensor: tensor.to(device), holder=holder).apply(value)


def tensors_in(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among leaves, and in objects among these."""
    search = Replacement(lambda tensor: tensor)
    search.apply(list(leaves))
    return [value for value, _ in search.replacements.values() if isinstance(value, torch.Tensor)]
