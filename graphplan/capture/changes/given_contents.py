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
class _Container:
    """A container among the caller's arguments.

    Attributes:
        path: its path in the arguments.
        is_reachable: whether a named argument and keys lead to it.
        value: the container in the trace.
        parts: its contents before the call.
        context: its pytree context before the call.
    """

    path: Given
    is_reachable: bool
    value: Any
    parts: list[Any]
    context: Any

    @property
    def is_changed(self) -> bool:
        """Whether the container holds other objects now."""
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
        self._containers: dict[int, _Container] = {}
        self._paths: dict[int, Given] = {}  # by id; also for tensors and other objects
        for index, value in enumerate(args):
            self._add(value, Given(f"args[{index}]"), is_reachable=False)
        for name, value in kwargs.items():
            self._add(value, Given(name), is_reachable=True)

    def _add(self, value: Any, path: Given, *, is_reachable: bool) -> None:
        if id(value) in self._paths or id(value) in self._containers or isinstance(value, CONSTANTS):
            return
        if is_reachable:
            self._paths[id(value)] = path
        node = node_of_class(type(value))
        if node is None:
            return
        parts, context = node.flatten_fn(value)
        self._containers[id(value)] = _Container(path, is_reachable, value, list(parts), context)
        for key, part in keyed_parts(node, value):
            inside = Given(path.name, (*path.path, key))
            self._add(part, inside, is_reachable=is_reachable and _has_key(key, value, part))

    def changes(self) -> tuple[dict[str, list[tuple[Given, Any]]], dict[int, Given]]:
        """Return changed argument -> contents of its lists and dicts, and id -> path of all objects in it.

        Raises:
            NoGraphError: a container has changed that is neither a list nor a dict, or that no names lead to.
        """
        changed = {key: container for key, container in self._containers.items() if container.is_changed}
        contents_of: dict[str, list[tuple[Given, Any]]] = {}
        for container in changed.values():
            if not (container.is_reachable and _can_be_changed(container.value)):
                raise NoGraphError(
                    f"forward changes {container.path}, a {type(container.value).__name__} in its arguments: "
                    "a graph can change only lists and dicts, in named arguments"
                )
            contents_of[container.path.name] = []
        # also the unchanged ones: in a later call, a changed one must not be the same object as one of these
        for key, container in self._containers.items():
            if (
                container.is_reachable
                and container.path.name in contents_of
                and _can_be_changed(container.value)
            ):
                contents = _contents(container.value) if key in changed else container.value
                contents_of[container.path.name].append((container.path, contents))
        return contents_of, {key: path for key, path in self._paths.items() if path.name in contents_of}


def _has_key(key: Any, value: Any, part: Any) -> bool:
    """Whether a key leads to a part of a value: parts of caches, and of some classes, are only numbered."""
    try:
        return key.get(value) is part
    except Exception:  # the class of the caller's object may raise anything
        return False


def _contents(value: Any) -> Any:
    return list(value) if isinstance(value, list) else dict(value)


def _can_be_changed(value: Any) -> bool:
    return type(value) in (list, *_DICTS) or isinstance(value, UserDict)
