"""Conversion of a graph's values to JSON and back: numbers, text, containers, torch constants, pytree specs.

Classes are looked up among those that this process has imported, operators among the registered ones, and
functions among those of numbers. Nothing else that a file names is called.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphplan.capture.captured_graph import TrainingStep
from graphplan.capture.signature import CounterLeaf, FloatLeaf, TensorLeaf
from graphplan.capture.structure import Given, StoredAttribute, register_class
from graphplan.capture.transformers.caches import LayoutPart

_FUNCTIONS = {
    "_operator": "abs add and_ eq floordiv ge getitem gt index invert le lshift lt mod mul ne neg not_ or_ "
    "pow rshift sub truediv xor",
    "builtins": "abs bool float int len max min pow round sum",
    "math": " ".join(name for name in vars(math) if not name.startswith("_")),
}
"""Module -> its functions of numbers. Others, such as ``eval``, are not called whatever a file contains."""
_KEYS = (pytree.GetAttrKey, pytree.MappingKey, pytree.SequenceKey)
_DATACLASSES = (
    *(CounterLeaf, FloatLeaf, TensorLeaf, TrainingStep, Given, StoredAttribute, LayoutPart),
    *_KEYS,
)
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class NotSavedError(Exception):
    """Something cannot be saved, or cannot be rebuilt in this process; the message names it."""


def _refuse(value: Any) -> NoReturn:
    raise NotSavedError(f"a graph with a {type(value).__name__} in it is not saved")


def to_plain(value: Any, convert_other: Callable[[Any], Any] = _refuse) -> Any:
    """Return a value as JSON; tagged lists distinguish tuples. ``convert_other`` is for other types.

    Raises:
        NotSavedError: the value cannot be saved.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if isinstance(value, torch.Size):
        return ["size", *map(to_plain, value)]
    if type(value) in (list, fx.immutable_collections.immutable_list):
        return ["list", *(to_plain(one, convert_other) for one in value)]
    if type(value) is tuple:
        return ["tuple", *(to_plain(one, convert_other) for one in value)]
    if type(value) in (dict, fx.immutable_collections.immutable_dict):
        return ["dict", *([to_plain(key), to_plain(one)] for key, one in value.items())]
    if isinstance(value, _CONSTANTS):
        return ["torch", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, slice):
        return ["slice", *map(to_plain, (value.start, value.stop, value.step))]
    if value is ...:
        return ["..."]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if value is type(None):
        return ["none type"]
    if isinstance(value, type):
        return ["class", value.__module__, value.__qualname__]
    if isinstance(value, pytree.TreeSpec):
        return ["spec", *map(to_plain, (value.type, value.context, value.children()))]
    if type(value) in _DATACLASSES:
        parts = (to_plain(getattr(value, field.name)) for field in fields(value))
        return [type(value).__name__, *parts]
    if isinstance(value, frozenset):
        return ["frozenset", *map(to_plain, sorted(value))]
    return convert_other(value)


def from_plain(plain: Any, tables: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return the value; ``tables`` maps a tag to the table to which it refers, such as nodes by name.

    Raises:
        NotSavedError: this process has not imported a class, or pytree cannot flatten it.
    """
    if not isinstance(plain, list):
        return plain
    kind, *parts = plain
    if kind in tables:
        return tables[kind][parts[0]]
    if kind == "class":
        return _class(*parts)
    if kind == "dict":
        return {from_plain(key, tables): from_plain(one, tables) for key, one in parts}
    return _CONSTRUCTORS[kind](*(from_plain(part, tables) for part in parts))


def _class(module: str, name: str) -> type:
    cls: Any = sys.modules.get(module)
    for part in name.split("."):
        cls = getattr(cls, part, None)
    if not isinstance(cls, type):
        raise NotSavedError(f"the class {module}.{name} of its results is not imported")
    return cls


def _spec(cls: Any, context: Any, children: list[Any]) -> pytree.TreeSpec:
    if cls is None:
        return pytree.treespec_leaf()
    if not register_class(cls):
        raise NotSavedError(f"the class {cls.__qualname__} of its results is not known to torch's pytree")
    return pytree.TreeSpec(cls, context, children)


def _torch(name: str) -> Any:
    constant = getattr(torch, name)
    if not isinstance(constant, _CONSTANTS):
        raise NotSavedError(f"torch.{name} is not a constant")
    return constant


def _layout_part(kind: str, cls: Any, *values: Any) -> LayoutPart:
    bases: Any = {"sequence": (list, tuple, set, frozenset), "mapping": dict}.get(kind, object)
    if cls is not None and not issubclass(cls, bases):
        raise NotSavedError(f"a {cls.__qualname__} is not a {kind}")
    return LayoutPart(kind, cls, *values)


_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "none type": lambda: type(None),
    "size": lambda *sizes: torch.Size(sizes),
    "list": lambda *parts: list(parts),
    "tuple": lambda *parts: parts,
    "torch": _torch,
    "device": torch.device,
    "slice": slice,
    "...": lambda: ...,
    "complex": complex,
    "spec": _spec,
    "frozenset": lambda *parts: frozenset(parts),
    **{cls.__name__: cls for cls in _DATACLASSES},
    LayoutPart.__name__: _layout_part,
}


def plain_target(target: Any) -> Any:
    """Return the target of a node as JSON."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        packet = target._overloadpacket.__name__
        return ["operator", target.namespace, packet, target._overloadname]
    if isinstance(target, torch._ops.HigherOrderOperator):
        return ["higher_order", target.name()]
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if _is_of_numbers(module, name):
        return ["function", module, name]
    raise NotSavedError(f"a graph that calls {target!r} is not saved")


def _is_of_numbers(module: str, name: str) -> bool:
    if module == "torch":
        return name.lstrip("_").startswith("sym_")
    return name in _FUNCTIONS.get(module, "").split()


def checked_name(name: str) -> str:
    """Return the name of a node or attribute; raise NotSavedError if it cannot be written into code."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise NotSavedError(f"{name!r} is not a name")
    return name


def target_from_plain(plain: Any) -> Any:
    """Return the target that :func:`plain_target` has converted."""
    if isinstance(plain, str):
        return checked_name(plain)
    kind, *names = plain
    if kind == "function" and not _is_of_numbers(*names):
        raise NotSavedError(f"{'.'.join(names)} is not a function of numbers")
    roots = {"operator": torch.ops, "higher_order": torch.ops.higher_order, "function": sys.modules}
    target: Any = roots[kind]
    if kind == "function":
        target = target.get(names.pop(0))
    for name in names:
        try:
            target = getattr(target, name)
        except AttributeError as error:
            raise NotSavedError(f"the operator {'.'.join(names)} is not registered") from error
    return target
