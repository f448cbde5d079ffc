"""Replacements of ``len`` and ``isinstance`` in a model's code during a trace, which accept symbols.

Python's ``len`` must return an int, so a trace specializes the first size, mostly the batch, to that of the
example. ``x.shape[0]`` may be a symbol::

    x.view(len(x), -1)      one graph for each batch size
    here                    one for all, as for x.view(x.shape[0], -1)

A symbol is not an int, so that a trace would take the other branch than eager mode of ::

    size = (x.shape[-1] if isinstance(x.shape[-1], int) else ...)

The names are replaced in the files of the functions that the model's code reaches in its own packages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from graphplan._compat.symbolic_numbers import PLAIN_TYPES
from graphplan.capture.thread_patches import Patch

_builtin_len, _builtin_isinstance = len, isinstance


def symbolic_builtins(namespaces: Iterable[dict[str, Any]]) -> Iterator[Patch]:
    """Yield the patches of these globals to apply while a model is traced."""
    for namespace in namespaces:
        for original, replacement in ((_builtin_len, _length), (_builtin_isinstance, _is_instance)):
            if original.__name__ not in namespace:
                yield Patch(namespace, original.__name__, original, replacement)


def _length(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and type(value).__len__ is torch.Tensor.__len__
    return value.shape[0] if plain and value.dim() else _builtin_len(value)


def _is_instance(value: Any, classes: Any) -> bool:
    plain = PLAIN_TYPES.get(type(value))
    return _builtin_isinstance(value, classes) or (
        plain is not None and _builtin_isinstance(plain(), classes)
    )
