"""The caches of transformers as pytree nodes: how pytree flattens and rebuilds them.

A cache is an object of objects: layers with tensors, flags and counters. Its tensors are leaves, and so are
the Python integers that count tokens, which a trace must not treat as constants. The rest is the *layout*,
which is equal for calls of one structure. It does not include the device that a layer stores, which is that
of the layer's tensors. For a cache of one layer::

    DynamicCache(layers=[DynamicLayer(keys=k, values=v, device=cuda:1, is_initialized=True)])

    leaves   k, v
    layout   DynamicCache(layers=[DynamicLayer(keys=*, values=*, device=that of keys, is_initialized=True)])
"""

from __future__ import annotations

import sys
import types
from collections import UserDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphplan._compat.torch import hide_tracer
from graphplan.capture.changes.given_contents import GivenContents
from graphplan.capture.structure import (
    CONSTANTS,
    Given,
    Returned,
    flatten,
    leaves_of,
    map_leaves,
    reachable,
    register_containers,
    register_node,
    register_with_torch,
)
from graphplan.errors import NoGraphError

# Parts of caches are recognized by these names; for a class with other names, only this list changes.
COUNTERS = frozenset({"cumulative_length", "cumulative_length_int", "_seen_tokens"})
"""Attributes that count tokens, whose values a trace must not treat as constants."""

_TOKEN_AXIS = {(name, 4): 2 for name in ("keys", "values", "_quantized_keys", "_quantized_values")}
"""(name, number of dimensions) of a tensor -> the axis along which it grows with the tokens.

The name is that of the attribute, also for items of a list or tuple; in a dict it is the key.
"""

_FULL_SIZE = "max_cache_len"
"""An object with this attribute has its full size from the start, so nothing in it grows."""

OWN_ENDINGS = ("Cache",)
"""Endings of names of cache classes that do not derive from transformers' ``Cache``.

Such a class is found if a file that defines one of the model's module classes defines or imports it.
"""

_OTHER_CLASSES = (nn.Module, torch.Tensor, Enum, dict, UserDict, list, tuple, set, frozenset)
"""Classes whose subclasses have state outside ``__dict__``, and so are not caches, whatever their names."""

_CONSTANTS = (*CONSTANTS, types.MethodType, torch.Generator, torch.Stream, torch.Event)


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """One part of a layout.

    Attributes:
        kind: ``"leaf"``, ``"device"``, ``"constant"``, ``"sequence"``, ``"mapping"``, ``"object"``, or
            ``"opaque"`` for an object that cannot be flattened.
        cls: the class of a sequence, a mapping, an object, a constant, or an opaque object.
        keys: the keys of a mapping, or the attribute names of an object.
        parts: the inner parts, in order.
        value: the value of a constant; the name and class of an opaque object; for a leaf, the axes along
            which it grows with the length, or None for a counter.
        held: the opaque object itself, so that it can be rebuilt where no graph is captured.
    """

    kind: str
    cls: Any = None
    keys: tuple[Any, ...] = ()
    parts: tuple[LayoutPart, ...] = ()
    value: Any = None
    held: Any = field(default=None, compare=False, repr=False)

    def walk(self, name: Any = "") -> Iterator[tuple[Any, LayoutPart]]:
        """Yield (name, part) for this part and all inner ones, in order; items have their sequence's name."""
        yield name, self
        for key, part in zip(self.keys or (name,) * len(self.parts), self.parts, strict=True):
            yield from part.walk(key)

    @property
    def has_leaves(self) -> bool:
        """Whether the part has a leaf."""
        return any(part.kind == "leaf" for _, part in self.walk())


_cache_classes: set[type] = set()


def register_caches(module: nn.Module) -> None:
    """Register the cache classes of a model as pytree nodes, before a call that has one is bound."""
    for cls in (*transformers_caches(), *_own_caches(map(type, module.modules()))):
        if cls not in _cache_classes:
            register_node(cls, _flatten, _unflatten)
            _cache_classes.add(cls)


def transformers_caches() -> tuple[type[Any], ...]:
    """Return transformers' ``Cache`` and its subclasses; none if transformers was not imported."""
    cache: Any = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return () if cache is None else tuple(reachable([cache], type.__subclasses__))


def _own_caches(classes: Iterable[type]) -> Iterator[type]:
    """Yield the classes with names of caches that a model's files define or import."""
    for name in {cls.__module__ for cls in classes}:
        if name in sys.modules and name.partition(".")[0] != "torch":
            for value in list(vars(sys.modules[name]).values()):
                # not isinstance: it would read __class__, which makes a lazy proxy load its object
                named = issubclass(type(value), type) and value.__name__.endswith(OWN_ENDINGS)
                if named and not issubclass(value, _OTHER_CLASSES):
                    yield value


def is_cache(value: Any) -> bool:
    """Whether this is a cache of a class that :func:`register_caches` has registered."""
    return is_cache_class(type(value))


def is_cache_class(cls: Any) -> bool:
    """Whether :func:`register_caches` has registered this class."""
    return cls in _cache_classes


def caches_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the named arguments that are caches."""
    return {name: value for name, value in arguments.items() if is_cache(value)}


def with_changes(original: Callable[..., Any], owned: Container[str]) -> Callable[..., Any]:
    """Return the ``forward`` to trace: it marks the caller's objects in the result, and adds their changes.

    Args:
        original: the model's ``forward``.
        owned: names of the arguments that belong to the caller.
    """

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        hide_tracer()
        caches = caches_in(kwargs)
        others = {name: kwargs[name] for name in kwargs if name in owned and name not in caches}
        contents = GivenContents(args, others)
        result = original(*args, **kwargs)
        changes, marks = contents.changes()
        register_containers((result, changes))
        register_with_torch()
        for _, returned in caches_at(flatten(result)[1]):
            refuse_opaque("a cache that forward returns", layout_of(returned))
        if not caches and not changes:
            return result
        for name, cache in caches.items():
            refuse_opaque(name, layout_of(flatten(cache)[1]))
        marks |= {id(cache): Given(name) for name, cache in caches.items()}

        def with_marks(tree: Any) -> Any:
            return map_leaves(lambda leaf: marks.get(id(leaf), leaf), tree, lambda value: id(value) in marks)

        return Returned(with_marks(result), {**caches, **with_marks(changes)})

    return forward


def layout_of(spec: pytree.TreeSpec) -> LayoutPart:
    """Return the layout of a cache from its pytree structure."""
    layout: LayoutPart = spec.context
    return layout


def tensors_in(part: LayoutPart, name: Any = "") -> list[bool]:
    """Return for each leaf of the layout of this name, in order, whether it is a tensor, not a counter."""
    return [key not in COUNTERS for key, inner in part.walk(name) if inner.kind == "leaf"]


def caches_at(spec: pytree.TreeSpec, start: int = 0) -> Iterator[tuple[int, pytree.TreeSpec]]:
    """Yield the caches in a structure, each with the index of its first leaf."""
    if is_cache_class(spec.type):
        yield start, spec
        return
    for child in spec.children():
        yield from caches_at(child, start)
        start += child.num_leaves


def states_on_one_device(spec: pytree.TreeSpec) -> Iterator[list[int]]:
    """Yield the leaf indices of each cache layer in a result; a layer expects its tensors on one device."""
    for start, cache in caches_at(spec):
        yield from _states(layout_of(cache), start)


def _states(part: LayoutPart, start: int) -> Iterator[list[int]]:
    same_device: list[int] = []
    has_device = any(inner.kind == "device" for inner in part.parts)
    for name, inner in zip(part.keys or ("",) * len(part.parts), part.parts, strict=True):
        tensors = tensors_in(inner, name)
        if has_device and inner.kind in ("leaf", "mapping"):
            same_device += [start + index for index, is_tensor in enumerate(tensors) if is_tensor]
        yield from _states(inner, start)
        start += len(tensors)
    if len(same_device) > 1:
        yield same_device


def _flatten(cache: Any) -> tuple[list[Any], LayoutPart]:
    leaves: list[Any] = []
    return leaves, _describe(cache, leaves)


def _unflatten(leaves: Iterable[Any], layout: LayoutPart) -> Any:
    return _rebuild(layout, iter(leaves))


def _describe(
    value: Any, leaves: list[Any], name: str = "", *, fixed: bool = False, enclosing: tuple[int, ...] = ()
) -> LayoutPart:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        axis = None if fixed else _TOKEN_AXIS.get((name, value.dim()))
        return LayoutPart("leaf", value=() if axis is None else (axis,))
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        constant = _fixed_value(value)
        if constant is None:
            leaves.append(value)
            return LayoutPart("leaf")
        value = constant
    if name in COUNTERS and not (value is None or (type(value) is int and value <= 1)):
        leaves.append(value)  # 0 and 1 are part of the layout, as a trace specializes them
        return LayoutPart("leaf")
    if isinstance(value, _CONSTANTS):
        return LayoutPart("constant", type(value), value=value)
    if isinstance(value, torch.device):
        return LayoutPart("device")
    cls = type(value)
    if id(value) in enclosing or not can_be_rebuilt(value):
        return LayoutPart("opaque", cls, value=f"{name!r}, a {cls.__qualname__}", held=value)
    enclosing = (*enclosing, id(value))
    if isinstance(value, dict):
        parts = (_describe(v, leaves, str(k), fixed=fixed, enclosing=enclosing) for k, v in value.items())
        return LayoutPart("mapping", cls, tuple(value), tuple(parts))
    if isinstance(value, list | tuple | set | frozenset):
        inside = (_describe(v, leaves, name, fixed=fixed, enclosing=enclosing) for v in value)
        return LayoutPart("sequence", cls, (), tuple(inside))
    state = vars(value)
    if "prefetch_stream" in state:  # the plan offloads instead: copies on CUDA streams cannot be traced
        state = {key: key != "offloading" and v for key, v in state.items() if key != "prefetch_stream"}
    fixed = fixed or _FULL_SIZE in state
    parts = (_describe(v, leaves, k, fixed=fixed, enclosing=enclosing) for k, v in state.items())
    return LayoutPart("object", cls, tuple(state), tuple(parts))


def can_be_rebuilt(value: Any) -> bool:
    """Whether an object can be rebuilt from its items or its ``__dict__`` alone."""
    if isinstance(value, dict | list | tuple | set | frozenset):
        return not isinstance(value, defaultdict)
    # an object with slots, or of a subclass of ``deque`` or the like, is larger than a plain object
    return hasattr(value, "__dict__") and type(value).__basicsize__ <= _Plain.__basicsize__


class _Plain:
    """An object with a ``__dict__`` and nothing else."""


def refuse_opaque(name: str, layout: LayoutPart) -> None:
    """Raise NoGraphError if a cache of this name is, or contains, an opaque object."""
    opaque = next((part for _, part in layout.walk() if part.kind == "opaque"), None)
    if opaque is not None:
        has = f"is a {layout.cls.__qualname__}" if opaque is layout else f"has an attribute {opaque.value}"
        raise NoGraphError(
            f"{name} {has}, which may hold tensors that a graph does not see: keep them in attributes, "
            "lists, tuples or dicts, not in slots"
        )


def _fixed_value(symbol: Any) -> Any:
    """Return the value of a symbol that the trace has fixed; None if it may vary."""
    node = symbol.node
    if isinstance(symbol, torch.SymBool):
        return node.maybe_as_bool()
    return node.maybe_as_float() if isinstance(symbol, torch.SymFloat) else node.maybe_as_int()


def _rebuild(part: LayoutPart, leaves: Iterator[Any]) -> Any:
    if part.kind == "leaf":
        return next(leaves)
    if part.kind == "constant":
        return part.value
    if part.kind == "opaque":
        return part.held
    if part.kind == "device":
        return torch.device("cpu")  # replaced by the device of the tensors in the same object
    values = [_rebuild(p, leaves) for p in part.parts]
    if part.kind == "mapping":
        return part.cls(zip(part.keys, values, strict=True))
    if part.kind == "sequence":
        return part.cls(*values) if hasattr(part.cls, "_fields") else part.cls(values)
    state = dict(zip(part.keys, values, strict=True))
    inside = (leaf for value in state.values() for leaf in leaves_of(value))
    device = next((leaf.device for leaf in inside if isinstance(leaf, torch.Tensor)), None)
    if device is not None:
        state |= {name: device for name, value in state.items() if isinstance(value, torch.device)}
    result = part.cls.__new__(part.cls)
    result.__dict__.update(state)
    return result
