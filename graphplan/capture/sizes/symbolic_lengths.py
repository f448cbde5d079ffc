"""Replacement of ``len(x)`` of a tensor by ``x.shape[0]`` in a model's code during a trace.

Python's ``len`` must return an int, so a trace specializes the first size, mostly the batch, to that of the
example. ``x.shape[0]`` may be a symbol::

    x.view(len(x), -1)      one graph for each batch size
    here                    one for all, as for x.view(x.shape[0], -1)

``len`` is replaced in the modules that define the model's classes, not in other code that these call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphplan.capture.thread_patches import Patch

_builtin_len = len


def symbolic_lengths(module: nn.Module) -> Iterator[Patch]:
    """Yield the patches to apply while a model is traced."""
    for namespace in _globals_of(module):
        if "len" not in namespace:
            yield Patch(namespace, "len", _builtin_len, _length)


def _length(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and type(value).__len__ is torch.Tensor.__len__
    return value.shape[0] if plain and value.dim() else _builtin_len(value)


def _globals_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the globals of the modules that define a model's classes, except torch's own."""
    seen = set[int]()
    for cls in dict.fromkeys(cls for part in module.modules() for cls in type(part).__mro__):
        for function in filter(inspect.isfunction, vars(cls).values()):
            namespace = inspect.unwrap(function).__globals__
            if id(namespace) not in seen and namespace.get("__name__", "").partition(".")[0] != "torch":
                seen.add(id(namespace))
                yield namespace
