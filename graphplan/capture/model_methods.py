"""What a call of a model runs: ``forward``, or a method of one of its submodules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["method_of", "with_forward"]


def method_of(model: nn.Module, entry: str) -> Callable[..., Any]:
    """What an entry calls: ``path``, ``:method`` or ``path:method`` of a model; the model itself if empty."""
    path, _, method = entry.partition(":")
    module = model.get_submodule(path)
    found: Callable[..., Any] = getattr(module, method) if method else module
    return found


@contextmanager
def with_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """A block in which this module alone, not its class, has another ``forward``."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        vars(module).pop("forward", None)  # a patch of the model may have taken it away
        if own is not None:
            module.forward = own
