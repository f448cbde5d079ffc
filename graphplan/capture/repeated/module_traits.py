"""What the code of a module can read of it: of two modules with the same traits, one trace serves both.

Of a module and its submodules these are the classes, the attributes, and of the weights all but their values.
Integer attributes are apart: blocks of one stack often differ by their index alone, which a call need not
read.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    enum.Enum,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
)
"""What nobody changes in place."""

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class UnlikeError(Exception):
    """Something that no other is like as far as is known: it is traced whenever it is called."""


@dataclass(slots=True)
class ModuleTraits:
    """What code can read of a module and its submodules.

    Attributes:
        module: the module.
        parts: ``vars`` of each, once, in an order that all of one kind share. A trace calls modules through
            stand-ins, which share these.
        kind: all but the integers, and what other objects hold.
        places: the integer attributes: of which part, and the name.
        objects: other objects that attributes refer to.
        classes: of the parts.
    """

    module: nn.Module
    parts: list[dict[str, Any]] = field(default_factory=list)
    kind: tuple[Hashable, ...] = ()
    places: list[tuple[int, str]] = field(default_factory=list)
    objects: dict[int, Any] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)

    def integers(self) -> list[int]:
        """The values at ``places``, as they are now."""
        return [self.parts[part][name] for part, name in self.places]

    def weights(self) -> list[torch.Tensor]:
        """Parameters and buffers, as they are now."""
        return [
            tensor
            for part in self.parts
            for table in (part["_parameters"], part["_buffers"])
            for tensor in table.values()
            if tensor is not None
        ]

    def held(self) -> tuple[Hashable, ...]:
        """What the other objects, the classes and the files of the code hold, as they are now."""
        codes = (getattr(getattr(one, "forward", None), "__globals__", {}) for one in self.classes)
        files = {id(names): names for names in codes}.values()
        objects = (getattr(one, "__dict__", {}) for one in self.objects.values())
        each = (*objects, *map(vars, self.classes), *files)
        return tuple((name, id(value)) for names in each for name, value in names.items())

    def state(self) -> tuple[Hashable, ...]:
        """All of it, as it is now: a call that leaves it as it was has no effect on the module.

        Raises:
            UnlikeError: as in :func:`traits_of`.
        """
        now = traits_of(self.module)
        return now.kind, *now.integers(), *map(id, now.weights()), now.held()


def traits_of(module: nn.Module) -> ModuleTraits:
    """The traits of a module, as they are now.

    Raises:
        UnlikeError: it has hooks, or tensors that are no weights.
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
        elif name not in _TABLES:
            kind += (name, _value(value, found, met))
    for table in (own["_parameters"], own["_buffers"]):
        for name, tensor in table.items():
            kind += (name, None if tensor is None else _weight(tensor, met))
    for name, child in own["_modules"].items():
        kind += (name, None if child is None else tuple(_module(child, found, met)))
    return kind


def _weight(tensor: torch.Tensor, met: dict[int, int]) -> Hashable:
    number = met.setdefault(id(tensor), len(met))
    layout = None if tensor.layout is not torch.strided else tensor.stride()
    return number, type(tensor), tensor.shape, layout, tensor.dtype, tensor.device, tensor.requires_grad


def _value(value: Any, found: ModuleTraits, met: dict[int, int]) -> Hashable:
    """Something equal for equal values; other objects are equal to themselves alone."""
    if isinstance(value, CONSTANTS):
        return type(value), value
    if isinstance(value, torch.Tensor):
        raise UnlikeError("a tensor is among the attributes")
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), *(_value(one, found, met) for one in value)
    if isinstance(value, dict):
        return type(value), *((key, _value(one, found, met)) for key, one in value.items())
    if isinstance(value, functools.partial):
        return "partial", *(_value(one, found, met) for one in (value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        owner = met.get(id(getattr(value.__self__, "__dict__", None)))
        return value.__func__, _value(value.__self__, found, met) if owner is None else owner
    found.objects[id(value)] = value
    return "object", id(value)
