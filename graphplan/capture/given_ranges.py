"""Sizes of a call against the ranges that the caller's ``dynamic_shapes`` give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphplan.capture.signature import BoundCall
from graphplan.errors import InputError


def require_in_range(call: BoundCall, shapes: Any) -> None:
    """Raise InputError where a size is outside of its range, with the names of the argument and the axis.

    Args:
        call: the arguments.
        shapes: as ``torch.export`` takes them for this call: by position, or by name.
    """
    given = call.kwargs if isinstance(shapes, Mapping) else call.args
    for name, axis, size, dim in _sizes("", given, shapes):
        low, high = getattr(dim, "min", None), getattr(dim, "max", None)
        if (low is not None and size < low) or (high is not None and size > high):
            label = getattr(dim, "__name__", "")
            raise InputError(
                f"{name} has size {size} along dimension {axis}, outside of {low} to {high}, the range that "
                f"dynamic_shapes gives it{f' as {label!r}' if label else ''}"
            )


def _sizes(name: str, value: Any, shapes: Any) -> Iterator[tuple[str, int, int, Any]]:
    """Argument, axis, size, and what is given for it."""
    entries: Any = shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes or ())
    for key, entry in entries:
        if isinstance(value, torch.Tensor):
            yield name, key, value.shape[key], entry
        elif isinstance(value, list | tuple) or (isinstance(value, Mapping) and key in value):
            inner = f"{name or 'args'}[{key!r}]" if name or isinstance(key, int) else key
            yield from _sizes(inner, value[key], entry)
