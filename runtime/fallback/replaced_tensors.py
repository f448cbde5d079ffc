"""Arguments and results of modules with other tensors in them, such as copies on another device.

What is one object stays one, whether it is met in several places or in several values. Containers that can
change are looked into whatever their class is::

    arrived = Replacement(to_device_1, in_place=True)
    arrived.within(inputs)       {"h": on the CPU}  ->  the same dict, with a copy on device 1
    arrived.undo(to_the_cpu)     again as it was; but what was put into it meanwhile goes to the CPU
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from graphplan.capture.structure import node_of_class
from graphplan.capture.transformers.caches import is_cache

_TENSORS = (torch.Tensor, PackedSequence)

_PLAIN = frozenset({int, float, bool, str, type(None)})
_Put = Callable[[Any, Any, Any], None]


@dataclass
class Replacement:
    """Other tensors in the place of those in values.

    Attributes:
        replace: from a tensor, or a packed sequence, to what takes its place.
        in_place: whether a container that can change has others itself, or a copy of it where it changes.
        known: by its id, each tensor and container that was met, and what takes its place.
    """

    replace: Callable[[Any], Any]
    in_place: bool = False
    known: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def within(self, value: Any) -> Any:
        """The value with other tensors; what has none in it is the same object. Caches stay as they are."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self.known:
            return self.known[id(value)][1]
        if isinstance(value, _TENSORS):
            return self._note(value, self.replace(value))
        if isinstance(value, torch.Size | nn.Module) or is_cache(value):  # a size would become a tuple
            return value
        if _can_change(value):
            self._note(value, value)  # before its parts, which it may be among
            changes = self._changes(value)
            own = value if self.in_place or not changes else _copied(value)
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

    def _note(self, value: Any, other: Any) -> Any:
        self.known[id(value)] = value, other
        return other

    def _changes(self, container: Any) -> list[tuple[_Put, Any, Any]]:
        slots = ((put, key, part, self.within(part)) for put, key, part in _slots(container))
        return [(put, key, other) for put, key, part, other in slots if other is not part]


def _can_change(value: Any) -> bool:
    return isinstance(value, list | dict | deque) or _has_attributes(value)


def _has_attributes(value: Any) -> bool:
    return isinstance(value, UserDict) or dataclasses.is_dataclass(type(value))


def _slots(container: Any) -> list[tuple[_Put, Any, Any]]:
    """For each part of a container: how it is put there, its key, and the part."""
    found: list[tuple[_Put, Any, Any]] = []
    if isinstance(container, dict):
        found = [(operator.setitem, key, part) for key, part in container.items()]
    elif isinstance(container, list | deque):
        found = [
            (operator.setitem, index, part)
            for index, part in enumerate(container)
            if type(part) not in _PLAIN
        ]
    if _has_attributes(container):
        is_data = dataclasses.is_dataclass(container)  # one with slots has no __dict__
        fields = [one.name for one in dataclasses.fields(container)] if is_data else []
        names = dict.fromkeys((*fields, *getattr(container, "__dict__", ())))
        there = [name for name in names if hasattr(container, name)]
        put = object.__setattr__  # also into frozen ones
        found += [(put, name, getattr(container, name)) for name in there]
    return found


def _copied(container: Any) -> Any:
    """A copy; the container itself, where its class makes none."""
    with suppress(TypeError):
        return copy.copy(container)
    return container


def _changed(container: Any, changes: list[tuple[_Put, Any, Any]]) -> Any:
    for put, key, other in changes:
        put(container, key, other)
    return container


def sent(value: Any, device: torch.device) -> Any:
    """The value with its tensors on a device; caches as they are, sizes of packed sequences on the CPU."""
    return Replacement(lambda tensor: tensor.to(device)).within(value)
