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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphplan.capture.structure import CONSTANTS, Given, keyed_parts, node_of_class
from graphplan.errors import NoGraphError

_PLAIN = (*CONSTANTS, type(None))
_DICTS = (dict, OrderedDict, defaultdict)


@dataclass(frozen=True, slots=True)
class _Held:
    """A container of the caller's.

    Attributes:
        place: where it is.
        is_found: whether an argument by name, and keys, lead to it.
        value: itself, in the trace.
        parts: what was in it before the call.
        context: what else makes it, as pytree has it.
    """

    place: Given
    is_found: bool
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
            self._hold(value, Given(f"args[{index}]"), is_found=False)
        for name, value in kwargs.items():
            self._hold(value, Given(name), is_found=True)

    def _hold(self, value: Any, place: Given, *, is_found: bool) -> None:
        if id(value) in self._places or id(value) in self._held or isinstance(value, _PLAIN):
            return
        if is_found:
            self._places[id(value)] = place
        node = node_of_class(type(value))
        if node is None:
            return
        parts, context = node.flatten_fn(value)
        self._held[id(value)] = _Held(place, is_found, value, list(parts), context)
        for key, part in keyed_parts(node, value):
            inside = Given(place.name, (*place.path, key))
            self._hold(part, inside, is_found=is_found and _leads_to(key, value, part))

    def changes(self) -> tuple[dict[str, list[tuple[Given, Any]]], dict[int, Given]]:
        """By changed argument, what became of the lists and dicts in it; and what stands for all in it."""
        changed = {key: held for key, held in self._held.items() if held.is_changed}
        found: dict[str, list[tuple[Given, Any]]] = {}
        for held in changed.values():
            if not (held.is_found and _can_be_changed(held.value)):
                raise NoGraphError(
                    f"it changes {held.place}, a {type(held.value).__name__}, which it is given: a graph "
                    "changes only lists and dicts, in arguments that forward has names for"
                )
            found[held.place.name] = []
        # those that keep what they have too: a changed one must not be another of them in a later call
        for key, held in self._held.items():
            if held.is_found and held.place.name in found and _can_be_changed(held.value):
                contents = _contents(held.value) if key in changed else held.value
                found[held.place.name].append((held.place, contents))
        return found, {key: place for key, place in self._places.items() if place.name in found}


def _leads_to(key: Any, value: Any, part: Any) -> bool:
    """Whether a key gets a part of a value: of a cache, and of other classes, parts have numbers alone."""
    try:
        return key.get(value) is part
    except Exception:  # the class of the caller's object may raise anything
        return False


def _contents(value: Any) -> Any:
    return list(value) if isinstance(value, list) else dict(value)


def _can_be_changed(value: Any) -> bool:
    return type(value) in (list, *_DICTS) or isinstance(value, UserDict)
