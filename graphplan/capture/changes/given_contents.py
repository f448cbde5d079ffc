"""What a call changes of the lists and dicts that it is given, which a graph returns beside its result.

A cache of a user's own is often such a list or dict, with more in it after each call::

    def forward(self, x, past):                   def forward(x, past_0):
        past.append(self.k(x))                        k = linear(x, ...)
        return self.o(torch.cat(past, 1))             ...
                                                      return out, k

The placed model then gives the caller's ``past`` the contents ``[past[0], k]``. Other objects (dataclasses,
nested caches, what pytree cannot lead to) do not change so: a model that changes them runs without a graph.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from graphplan.capture.structure import CONSTANTS, Given, node_of_class
from graphplan.errors import NoGraphError

_PLAIN = (*CONSTANTS, type(None))
_DICTS = (dict, OrderedDict, defaultdict)


@dataclass(frozen=True, slots=True)
class _Held:
    """A container of the caller's.

    Attributes:
        label: how people write it: ``past['k']``.
        place: where it is; None where no argument by name leads to it.
        value: itself, in the trace.
        parts: what was in it before the call.
        context: what else makes it, as pytree has it.
    """

    label: str
    place: Given | None
    value: Any
    parts: list[Any]
    context: Any

    @property
    def is_changed(self) -> bool:
        """Whether other objects are in it now."""
        parts, context = node_of_class(type(self.value)).flatten_fn(self.value)
        same = len(parts) == len(self.parts) and all(a is b for a, b in zip(parts, self.parts, strict=True))
        return not same or context != self.context


class GivenContents:
    """The containers of a call's arguments, and what is in them before the call.

    Args:
        args: arguments without a name.
        kwargs: those by name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._held: dict[int, _Held] = {}
        self._places: dict[int, Given] = {}  # by identity, also of tensors and objects
        for index, value in enumerate(args):
            self._hold(value, f"args[{index}]", None)
        for name, value in kwargs.items():
            self._hold(value, name, Given(name))

    def _hold(self, value: Any, label: str, place: Given | None) -> None:
        if id(value) in self._places or id(value) in self._held or isinstance(value, _PLAIN):
            return
        if place is not None:
            self._places[id(value)] = place
        node = node_of_class(type(value))
        if node is None:
            return
        parts, context = node.flatten_fn(value)
        self._held[id(value)] = _Held(label, place, value, list(parts), context)
        for key, step, part in _steps(node, value):
            self._hold(
                part,
                f"{label}{key}",
                None if place is None or step is None else Given(place.name, (*place.path, step)),
            )

    def changes(self) -> tuple[dict[str, list[tuple[Given, Any]]], dict[int, Given]]:
        """By changed argument, what became of the lists and dicts in it; and what stands for all in it."""
        changed = {key: held for key, held in self._held.items() if held.is_changed}
        found: dict[str, list[tuple[Given, Any]]] = {}
        for held in changed.values():
            if held.place is None or not _can_be_changed(held.value):
                raise NoGraphError(
                    f"it changes {held.label}, a {type(held.value).__name__}, which it is given: a graph "
                    "changes only lists and dicts, in arguments that forward has names for"
                )
            found[held.place.name] = []
        # those that keep what they have too: a changed one must not be another of them in a later call
        for key, held in self._held.items():
            if held.place is not None and held.place.name in found and _can_be_changed(held.value):
                contents = _contents(held.value) if key in changed else held.value
                found[held.place.name].append((held.place, contents))
        return found, {key: place for key, place in self._places.items() if place.name in found}


def _contents(value: Any) -> Any:
    return list(value) if isinstance(value, list) else dict(value)


def _can_be_changed(value: Any) -> bool:
    return type(value) in (list, *_DICTS) or isinstance(value, UserDict)


def _steps(node: pytree.NodeDef, value: Any) -> Iterator[tuple[str, tuple[bool, Any] | None, Any]]:
    """The parts of a container: each with how people write its key, and the step that leads to it."""
    if node.flatten_with_keys_fn is None:
        for part in node.flatten_fn(value)[0]:
            yield "[...]", None, part
        return
    for key, part in node.flatten_with_keys_fn(value)[0]:
        yield str(key), _step(key), part


def _step(key: Any) -> tuple[bool, Any]:
    if isinstance(key, pytree.GetAttrKey):
        return True, key.name
    return False, key.key if isinstance(key, pytree.MappingKey) else key.idx
