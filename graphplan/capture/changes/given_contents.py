"""Lists and dicts among the arguments that a call changes: the graph returns their new contents, too.

A user's own cache is often such a list or dict, which grows in each call::

    def forward(self, x, past):                   def forward(x, past_0):
        past.append(self.k(x))                        k = linear(x, ...)
        return self.o(torch.cat(past, 1))             ...
                                                      return out, k

The placed model then sets the contents of the caller's ``past`` to ``[past[0], k]``. A model that changes
other objects (dataclasses, nested caches, objects that no pytree path leads to) runs without a graph.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphplan.capture.structure import CONSTANTS, Given, keyed_parts, node_of_class
from graphplan.errors import NoGraphError

_DICTS = (dict, OrderedDict, defaultdict)


@dataclass(frozen=True, slots=True)
class _Held:
    """A container of the caller's.

    Attributes:
        place: its path in the arguments.
        is_found: whether a named argument, and keys, lead to it.
        value: the container in the trace.
        parts: its contents before the call.
        context: its pytree context before the call.
    """

    place: Given
    is_found: bool
    value: Any
    parts: list[Any]
    context: Any

    @property
    def is_changed(self) -> bool:
        """Whether it holds other objects now."""
        parts, context = node_of_class(type(self.value)).flatten_fn(self.value)
        same = len(parts) == len(self.parts) and all(a is b for a, b in zip(parts, self.parts, strict=True))
        return not same or context != self.context


class GivenContents:
    """The containers in the arguments of a call, and their contents before the call.

    Args:
        args: positional arguments.
        kwargs: named arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._held: dict[int, _Held] = {}
        self._places: dict[int, Given] = {}  # by id, also of tensors and other objects
        for index, value in enumerate(args):
            self._hold(value, Given(f"args[{index}]"), is_found=False)
        for name, value in kwargs.items():
            self._hold(value, Given(name), is_found=True)

    def _hold(self, value: Any, place: Given, *, is_found: bool) -> None:
        if id(value) in self._places or id(value) in self._held or isinstance(value, CONSTANTS):
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
        """Return, by changed argument, the contents of its lists and dicts; and id -> place of all in it.

        Raises:
            NoGraphError: a container has changed that is neither a list nor a dict, or that no names lead to.
        """
        changed = {key: held for key, held in self._held.items() if held.is_changed}
        contents_of: dict[str, list[tuple[Given, Any]]] = {}
        for held in changed.values():
            if not (held.is_found and _can_be_changed(held.value)):
                raise NoGraphError(
                    f"forward changes {held.place}, a {type(held.value).__name__} in its arguments: a graph "
                    "can change only lists and dicts, in named arguments"
                )
            contents_of[held.place.name] = []
        # also the unchanged ones: in a later call, a changed one must not be the same object as one of these
        for key, held in self._held.items():
            if held.is_found and held.place.name in contents_of and _can_be_changed(held.value):
                contents = _contents(held.value) if key in changed else held.value
                contents_of[held.place.name].append((held.place, contents))
        return contents_of, {key: place for key, place in self._places.items() if place.name in contents_of}


def _leads_to(key: Any, value: Any, part: Any) -> bool:
    """Whether a key leads to a part of a value: parts of caches, and of some classes, are only numbered."""
    try:
        return key.get(value) is part
    except Exception:  # the class of the caller's object may raise anything
        return False


def _contents(value: Any) -> Any:
    return list(value) if isinstance(value, list) else dict(value)


def _can_be_changed(value: Any) -> bool:
    return type(value) in (list, *_DICTS) or isinstance(value, UserDict)
