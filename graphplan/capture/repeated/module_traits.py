"""The properties of a module that its code can read: one trace serves two modules with equal traits.

These are the classes and attributes of the module and its submodules, and all properties of the weights but
their values. Integer attributes are separate: blocks of a stack often differ only in their index, which a
call need not read.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import SERVED_BY
from graphplan.capture.changes.attribute_snapshots import items_of
from graphplan.capture.parameter_attributes import custom_attributes
from graphplan.capture.structure import CONSTANTS, CONTAINERS

UNCHANGING = (*CONSTANTS, torch.device)
_MAX_CONTAINERS = 1000  # whose items are read: a vocabulary may have a million, and no counter
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class NotComparableError(Exception):
    """A module or call that cannot be compared with others; it is traced at each call."""


class Identities:
    """Objects compared by identity. They are kept alive, so that no id is reused."""

    __slots__ = ("objects",)
    __hash__ = None  # type: ignore[assignment]  # as for other containers

    def __init__(self, objects: Iterable[Any]) -> None:
        self.objects = tuple(objects)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identities):
            return NotImplemented
        same = len(self.objects) == len(other.objects)
        return same and all(map(operator.is_, self.objects, other.objects))


AttributeRef = tuple[int, str]
"""An attribute: (index of the module in ``namespaces``, name)."""


@dataclass(slots=True)
class ModuleTraits:
    """The properties of a module and its submodules that code can read.

    Attributes:
        module: the module.
        namespaces: ``vars`` of each module, once, in an order that is equal for equal structures. A trace
            calls modules through proxies, which share these.
        structure: everything except the integers and the contents of other objects.
        integer_attributes: the integer attributes.
        objects: id -> other object to which an attribute refers.
        classes: the classes of the modules.
        containers: the containers among the attributes.
    """

    module: nn.Module
    namespaces: list[dict[str, Any]] = field(default_factory=list)
    structure: tuple[Hashable, ...] = ()
    integer_attributes: list[AttributeRef] = field(default_factory=list)
    objects: dict[int, Any] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    containers: list[Any] = field(default_factory=list)

    def integers(self, attributes: Iterable[AttributeRef]) -> list[int]:
        """Return the current values of integer attributes."""
        return [self.namespaces[index][name] for index, name in attributes]

    def weights(self) -> list[torch.Tensor]:
        """Return the current parameters and buffers."""
        return [
            tensor
            for namespace in self.namespaces
            for table in (namespace["_parameters"], namespace["_buffers"])
            for tensor in table.values()
            if tensor is not None
        ]

    def external_state(self) -> tuple[list[Any], Identities]:
        """Return the current names and values in other objects, in classes and in the globals of the code.

        The items of containers in them are included: code may count its calls there.
        """
        files = {id(names): names for names in map(_globals, self.classes)}.values()
        namespaces = (*map(vars, self.objects.values()), *map(vars, self.classes), *files)
        named = [item for namespace in namespaces for item in namespace.items()]
        seen, outer = set[int](), len(named)
        for index, (_, value) in enumerate(named):  # it grows
            if index >= outer and len(seen) > _MAX_CONTAINERS:
                break
            if isinstance(value, CONTAINERS) and id(value) not in seen:
                seen.add(id(value))
                named += items_of(value)
        return [name for name, _ in named], Identities(value for _, value in named)

    def state(self, varying: Container[AttributeRef] = ()) -> tuple[Any, ...]:
        """Return all that code can read now, except for the ``varying`` integer attributes."""
        fixed = self.integers(one for one in self.integer_attributes if one not in varying)
        return self.structure, fixed, self.external_state()


def traits_of(module: nn.Module) -> ModuleTraits:
    """Return the current traits of a module.

    Raises:
        NotComparableError: the module is compiled, or has hooks, tensor attributes, or opaque objects.
    """
    traits = ModuleTraits(module)
    traits.structure = tuple(_module(module, traits, {}))
    return traits


def _module(module: nn.Module, traits: ModuleTraits, numbers: dict[int, int]) -> list[Any]:
    """Return the structure of a module, and add to ``traits``; ``numbers``: id -> order of first use."""
    attributes = vars(module)
    if not attributes.keys() >= set(_MODULE_TABLES):
        raise NotComparableError(f"{type(module).__name__} is compiled")
    if id(attributes) in numbers:
        return [numbers[id(attributes)]]
    numbers[id(attributes)] = len(numbers)
    structure: list[Any] = [type(module)]
    index = len(traits.namespaces)
    traits.namespaces.append(attributes)
    traits.classes[type(module)] = None
    for name, value in attributes.items():
        if type(value) is int:
            traits.integer_attributes.append((index, name))
        elif name in _HOOKS:
            if value:
                raise NotComparableError(f"{type(module).__name__} has hooks")
        elif name not in (*_MODULE_TABLES, SERVED_BY):
            structure += (name, _value(value, traits, numbers))
    for table in (attributes["_parameters"], attributes["_buffers"]):
        for name, tensor in table.items():
            structure += (name, None if tensor is None else _weight(tensor, traits, numbers))
    for name, child in attributes["_modules"].items():
        structure += (name, None if child is None else tuple(_module(child, traits, numbers)))
    return structure


def _weight(tensor: torch.Tensor, traits: ModuleTraits, numbers: dict[int, int]) -> Hashable:
    number = numbers.setdefault(id(tensor), len(numbers))
    layout = None if tensor.layout is not torch.strided else tensor.stride()
    properties = type(tensor), tensor.shape, layout, tensor.dtype, tensor.device, tensor.requires_grad
    return (
        number,
        *properties,
        *((name, _value(value, traits, numbers)) for name, value in custom_attributes(tensor).items()),
    )


def _value(value: Any, traits: ModuleTraits, numbers: dict[int, int]) -> Hashable:
    """Return a key that is equal for equal values; other objects are equal only if identical."""
    if isinstance(value, UNCHANGING):
        return type(value), comparison_key(value)
    if isinstance(value, torch.Tensor):
        raise NotComparableError("a tensor is among the attributes")
    if isinstance(value, CONTAINERS):
        traits.containers.append(value)
        return type(value), *((key, _value(one, traits, numbers)) for key, one in items_of(value))
    if isinstance(value, functools.partial):
        return "partial", *(_value(one, traits, numbers) for one in (value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):
        owner = numbers.get(id(vars(value.__self__))) if hasattr(value.__self__, "__dict__") else None
        return value.__func__, _value(value.__self__, traits, numbers) if owner is None else owner
    if not hasattr(value, "__dict__"):
        raise NotComparableError(f"the contents of a {type(value).__name__} cannot be read")
    traits.objects[id(value)] = value
    return "object", id(value)


def comparison_key(constant: Any) -> Hashable:
    """Return a key that is equal for constants that code cannot distinguish; ``0.0`` and ``-0.0`` differ."""
    return repr(constant) if isinstance(constant, float | complex) else constant


def _globals(module: type) -> dict[str, Any]:
    """Return the globals of the ``forward`` of a module class."""
    forward = inspect.unwrap(module.forward)  # type: ignore[attr-defined]  # of a module's class
    if not isinstance(forward, types.FunctionType):
        raise NotComparableError(f"{module.__name__}.forward is not a function")
    return forward.__globals__
