"""What the code of a module can read of it: of two modules with the same traits, one trace serves both.

Of a module and its submodules these are the classes, the attributes, and of the weights all but their values.
Integer attributes are apart: blocks of one stack often differ by their index alone, which a call need not
read.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import SERVED_BY
from graphplan.capture.changes.attribute_snapshots import items_of
from graphplan.capture.parameter_notes import notes_of
from graphplan.capture.structure import CONSTANTS

UNCHANGING = (*CONSTANTS, type(None), torch.device)
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UnlikeError(Exception):
    """Something that no other is like as far as is known: it is traced whenever it is called."""


class Identities:
    """Objects, equal to the very same ones; they stay alive, so that no other takes the place of one."""

    __slots__ = ("objects",)
    __hash__ = None  # type: ignore[assignment]  # as for other containers

    def __init__(self, objects: Iterable[Any]) -> None:
        self.objects = tuple(objects)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identities):
            return NotImplemented
        same = len(self.objects) == len(other.objects)
        return same and all(map(operator.is_, self.objects, other.objects))


Place = tuple[int, str]
"""An attribute: of which part of a module, and its name."""


@dataclass(slots=True)
class ModuleTraits:
    """What code can read of a module and its submodules.

    Attributes:
        module: the module.
        parts: ``vars`` of each, once, in an order that all of one kind share. A trace calls modules through
            stand-ins, which share these.
        kind: all but the integers, and what other objects hold.
        places: the integer attributes.
        objects: other objects that attributes refer to.
        classes: of the parts.
        containers: the lists and dicts among the attributes.
    """

    module: nn.Module
    parts: list[dict[str, Any]] = field(default_factory=list)
    kind: tuple[Hashable, ...] = ()
    places: list[Place] = field(default_factory=list)
    objects: dict[int, Any] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    containers: list[Any] = field(default_factory=list)

    def integers(self, places: Iterable[Place]) -> list[int]:
        """The values of some integer attributes, as they are now."""
        return [self.parts[part][name] for part, name in places]

    def weights(self) -> list[torch.Tensor]:
        """Parameters and buffers, as they are now."""
        return [
            tensor
            for part in self.parts
            for table in (part["_parameters"], part["_buffers"])
            for tensor in table.values()
            if tensor is not None
        ]

    def held(self) -> tuple[list[Any], Identities]:
        """What the other objects, the classes and the files of the code hold, as they are now.

        What is in the lists and dicts among that is part of it: code may count its calls there.
        """
        files = {id(names): names for one in self.classes for names in [_globals(one)]}.values()
        each = (*map(vars, self.objects.values()), *map(vars, self.classes), *files)
        named = [item for names in each for item in names.items()]
        inside = [items_of(value) for _, value in named if isinstance(value, list | dict)]
        named += chain.from_iterable(inside)
        return [name for name, _ in named], Identities(value for _, value in named)

    def state(self, varying: Container[Place] = ()) -> tuple[Any, ...]:
        """All that code can read, as it is now, but for integers at places that are ``varying``."""
        fixed = self.integers(place for place in self.places if place not in varying)
        return self.kind, fixed, self.held()


def traits_of(module: nn.Module) -> ModuleTraits:
    """The traits of a module, as they are now.

    Raises:
        UnlikeError: it has hooks, tensors that are no weights, or objects that cannot be looked into.
    """
    found = ModuleTraits(module)
    found.kind = tuple(_module(module, found, {}))
    return found


def _module(module: nn.Module, found: ModuleTraits, met: dict[int, int]) -> list[Any]:
    """``met`` has a number for each submodule and weight, in the order in which they were met first."""
    own = vars(module)
    if not own.keys() >= set(_TABLES):
        raise UnlikeError(f"{type(module).__name__} is compiled")
    if id(own) in met:
        return [met[id(own)]]
    met[id(own)] = len(met)
    kind: list[Any] = [type(module)]
    part = len(found.parts)
    found.parts.append(own)
    found.classes[type(module)] = None
    for name, value in own.items():
        if type(value) is int:
            found.places.append((part, name))
        elif name in _HOOKS:
            if value:
                raise UnlikeError(f"{type(module).__name__} has hooks")
        elif name not in (*_TABLES, SERVED_BY):
            kind += (name, _value(value, found, met))
    for table in (own["_parameters"], own["_buffers"]):
        for name, tensor in table.items():
            kind += (name, None if tensor is None else _weight(tensor, found, met))
    for name, child in own["_modules"].items():
        kind += (name, None if child is None else tuple(_module(child, found, met)))
    return kind


def _weight(tensor: torch.Tensor, found: ModuleTraits, met: dict[int, int]) -> Hashable:
    number = met.setdefault(id(tensor), len(met))
    layout = None if tensor.layout is not torch.strided else tensor.stride()
    form = type(tensor), tensor.shape, layout, tensor.dtype, tensor.device, tensor.requires_grad
    return number, *form, *((name, _value(note, found, met)) for name, note in notes_of(tensor).items())


def _value(value: Any, found: ModuleTraits, met: dict[int, int]) -> Hashable:
    """Something equal for equal values; other objects are equal to themselves alone."""
    if isinstance(value, UNCHANGING):
        return type(value), told(value)
    if isinstance(value, torch.Tensor):
        raise UnlikeError("a tensor is among the attributes")
    if isinstance(value, list | dict):
        found.containers.append(value)
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), *(_value(one, found, met) for one in value)
    if isinstance(value, dict):
        return type(value), *((key, _value(one, found, met)) for key, one in value.items())
    if isinstance(value, functools.partial):
        return "partial", *(_value(one, found, met) for one in (value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        owner = met.get(id(vars(value.__self__))) if hasattr(value.__self__, "__dict__") else None
        return value.__func__, _value(value.__self__, found, met) if owner is None else owner
    if not hasattr(value, "__dict__"):
        raise UnlikeError(f"what a {type(value).__name__} holds cannot be seen")
    found.objects[id(value)] = value
    return "object", id(value)


def told(constant: Any) -> Hashable:
    """Equal for constants between which code cannot tell: ``0.0`` and ``-0.0`` are two."""
    return repr(constant) if isinstance(constant, float | complex) else constant


def _globals(module: type) -> dict[str, Any]:
    """The names of the file in which the code of a class's forward is."""
    forward = inspect.unwrap(module.forward)  # type: ignore[attr-defined]  # of a module's class
    if not isinstance(forward, types.FunctionType):
        raise UnlikeError(f"{module.__name__}.forward is no function")
    return forward.__globals__
