"""Arguments and results of modules with other tensors in them, such as copies on another device.

What is one object stays one, whether it is met in several places or in several values. Containers that can
change, and objects, are looked into whatever their class is. Others may refer to an object, so that no copy
takes its place::

    arrived = Replacement(to_device_1, in_place=True)
    arrived.within(inputs)       {"h": on the CPU}  ->  the same dict, with a copy on device 1
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

from graphplan.capture.structure import node_of_class
from graphplan.capture.transformers.caches import is_cache

_TENSORS = (torch.Tensor, PackedSequence)

_CLOSED = (*_TENSORS, nn.Module, type, ModuleType, logging.Logger)
_NOT_HELD = {*vars(nn.Module()), "_graphplan"}
PLAIN = frozenset({int, float, bool, str, type(None)})
_Put = Callable[[Any, Any, Any], None]


@dataclass
class Replacement:
    """Other tensors in the place of those in values.

    Attributes:
        replace: from a tensor, or a packed sequence, to what takes its place.
        in_place: whether a container that can change has others itself, or a copy of it where it changes.
            Objects that are no containers have others themselves.
        holder: whose results the values are, if they are: what it holds stays as it is, for its next call.
        known: by its id, each tensor and container that was met, and what takes its place.
    """

    replace: Callable[[Any], Any]
    in_place: bool = False
    holder: nn.Module | None = None
    known: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def within(self, value: Any) -> Any:
        """The value with other tensors; what has none in it is the same object. Caches stay as they are."""
        if type(value) in PLAIN:
            return value
        if id(value) in self.known:
            return self.known[id(value)][1]
        if isinstance(value, _TENSORS):
            return self._note(value, self.replace(value))
        if isinstance(value, torch.Size | nn.Module) or is_cache(value):  # a size would become a tuple
            return value
        if _can_change(value):
            self._note(value, value)  # before its parts, which it may be among
            changes, copied = self._changes(value), _is_container(value)
            if not changes or (not copied and id(value) in self._held):
                return value
            own = _copied(value) if copied and not self.in_place else value
            return self._note(value, _changed(own, changes))
        node = node_of_class(type(value))
        if node is None:
            return value
        parts, context = node.flatten_fn(value)
        others = [self.within(part) for part in parts]
        fresh = not isinstance(value, tuple) and any(
            map(_can_change, parts)
        )  # may be of the flattening alone
        same = not fresh and all(map(operator.is_, parts, others))
        return self._note(value, value if same else node.unflatten_fn(others, context))

    def undo(self, replace: Callable[[Any], Any]) -> Replacement:
        """Undo what was done in place; the way back, for other values.

        ``replace`` is for tensors that are not known: what modules have put into containers meanwhile.
        """
        back = Replacement(replace)
        for value, other in self.known.values():
            back._note(other, value)
            back._note(value, value)
        for value, _ in self.known.values():
            if _can_change(value):
                _changed(value, back._changes(value))
        return back

    @functools.cached_property
    def _held(self) -> Container[int]:
        """The ids of what the holder has in its attributes."""
        met = Replacement(lambda tensor: tensor)
        for part in () if self.holder is None else self.holder.modules():
            met.within([value for name, value in vars(part).items() if name not in _NOT_HELD])
        return met.known

    def _note(self, value: Any, other: Any) -> Any:
        self.known[id(value)] = value, other
        return other

    def _changes(self, container: Any) -> list[tuple[_Put, Any, Any]]:
        slots = ((put, key, part, self.within(part)) for put, key, part in _slots(container))
        return [(put, key, other) for put, key, part, other in slots if other is not part]


def _can_change(value: Any) -> bool:
    return _is_container(value) or _has_attributes(value)


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | deque | UserDict) or dataclasses.is_dataclass(type(value))


def _has_attributes(value: Any) -> bool:
    if isinstance(value, UserDict) or dataclasses.is_dataclass(type(value)):
        return True
    closed = isinstance(value, _CLOSED) or isroutine(value) or node_of_class(type(value)) is not None
    return not closed and hasattr(value, "__dict__")


def _slots(container: Any) -> list[tuple[_Put, Any, Any]]:
    """For each part of a container: how it is put there, its key, and the part."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(container, dict):
        items = container.items()
    elif isinstance(container, list | deque):
        items = enumerate(container)
    found: list[tuple[_Put, Any, Any]]
    found = [(operator.setitem, key, part) for key, part in items if type(part) not in PLAIN]
    if _has_attributes(container):
        table = getattr(container, "__dict__", {})  # a dataclass with slots has none
        slots = dataclasses.fields(container) if dataclasses.is_dataclass(container) else ()
        found += [(_put_attribute, name, part) for name, part in table.items() if type(part) not in PLAIN]
        names = [one.name for one in slots if one.name not in table and hasattr(container, one.name)]
        found += [(object.__setattr__, name, getattr(container, name)) for name in names]  # also if frozen
    return found


def _put_attribute(container: Any, name: str, value: Any) -> None:
    vars(container)[name] = value  # whatever its class makes of an assignment


def _copied(container: Any) -> Any:
    """A copy; the container itself, where its class makes none."""
    with suppress(TypeError):
        return copy.copy(container)
    return container


def _changed(container: Any, changes: list[tuple[_Put, Any, Any]]) -> Any:
    for put, key, other in changes:
        put(container, key, other)
    return container


def sent(value: Any, device: torch.device, holder: nn.Module | None = None) -> Any:
    """The value with its tensors on a device; caches as they are, sizes of packed sequences on the CPU.

    ``holder`` is as of :class:`Replacement`.
    """
    return Replacement(lambda tensor: tensor.to(device), holder=holder).within(value)


def tensors_in(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among leaves, and in objects among these."""
    met = Replacement(lambda tensor: tensor)
    met.within(list(leaves))
    return [value for value, _ in met.known.values() if isinstance(value, torch.Tensor)]
