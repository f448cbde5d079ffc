"""Results rebuilt by generated code, instead of by a walk over their structure at each call.

For a model that returns a dict and a tuple in it, the code is::

    lambda r: {'logits': r[0], 'hidden': (r[1], None)}

Classes that the structure knows nothing about are made by the function that pytree has for them. The caches
of transformers are made without it, which interprets a description of each object and imports its class by
name at each call: their attributes are laid out once, and each call fills in its tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["is_described", "make", "rebuilder"]

Rebuild = Callable[[Sequence[Any]], Any]


def rebuilder(spec: pytree.TreeSpec) -> Rebuild:
    """A function from the flat results to what the model returns: what ``tree_unflatten`` makes of them."""
    return _Writer().function(spec)


class _Leaf:
    """Stands for one of the flat results in an object that is laid out."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Writer:
    def __init__(self) -> None:
        self.names: dict[str, Any] = {"make": make}
        self.leaves = itertools.count()

    def function(self, spec: pytree.TreeSpec) -> Rebuild:
        code = f"lambda r: {self._structure(spec)}"
        made: Rebuild = eval(code, self.names)  # the text is ours: indices, and names of objects
        return made

    def _name(self, value: Any) -> str:
        name = f"n{len(self.names)}"
        self.names[name] = value
        return name

    def _structure(self, spec: pytree.TreeSpec) -> str:
        if spec.is_leaf():
            return f"r[{next(self.leaves)}]"
        node = pytree.SUPPORTED_NODES[spec.type]
        if is_described(node):
            leaves = [_Leaf(next(self.leaves)) for _ in spec.children()]
            return self._object(node.unflatten_fn(leaves, spec.context))
        parts = [self._structure(child) for child in spec.children()]
        if spec.type is tuple:
            return _tuple(parts)
        if spec.type is dict:
            return self._dict(list(spec.context), parts)
        joined = f"[{', '.join(parts)}]"
        if spec.type is list:
            return joined
        return f"{self._name(node.unflatten_fn)}({joined}, {self._name(spec.context)})"

    def _dict(self, keys: Sequence[Any], parts: Sequence[str]) -> str:
        items = (f"{self._name(key)}: {part}" for key, part in zip(keys, parts, strict=True))
        return f"{{{', '.join(items)}}}"

    def _object(self, value: Any) -> str:
        """The code for an object that has leaves in it; what cannot change is shared by all calls."""
        if isinstance(value, _Leaf):
            return f"r[{value.index}]"
        if value is None or isinstance(value, _CONSTANT):
            return self._name(value)
        if type(value) is dict:
            return self._dict(list(value), [self._object(v) for v in value.values()])
        parts = [self._object(v) for v in value] if isinstance(value, list | tuple | set | frozenset) else []
        if type(value) is tuple:
            return _tuple(parts)
        joined = f"[{', '.join(parts)}]"
        if type(value) is list:
            return joined
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._name(type(value))}(*{joined})"
        if parts or isinstance(value, list | tuple | set | frozenset):
            return f"{self._name(type(value))}({joined})"
        if isinstance(value, dict):
            items = self._dict(list(value), [self._object(v) for v in value.values()])
            return f"{self._name(type(value))}({items})"
        state = self._dict(list(vars(value)), [self._object(v) for v in vars(value).values()])
        return f"make({self._name(type(value))}, {state})"


_CONSTANT = (bool, int, float, str, type, torch.device, torch.dtype, torch.layout, torch.Size)


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)},)" if parts else "()"


def is_described(node: Any) -> bool:
    """Whether transformers' exporter describes objects of this class: by attributes, leaves as they are."""
    module = getattr(node.unflatten_fn, "__module__", None) or ""
    return module.startswith("transformers.exporters.")


def make(cls: Any, state: dict[str, Any]) -> Any:
    """An object with these attributes, which nothing has initialised."""
    made = cls.__new__(cls)
    made.__dict__.update(state)
    return made
