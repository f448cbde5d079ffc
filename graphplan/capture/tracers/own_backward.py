"""Detection of custom backward passes and gradient hooks, which a trace would lose.

A trace contains the forward pass only, which autograd differentiates. A model with the backward pass of a
``torch.autograd.Function``, or with gradient hooks, is not traced where gradients are required. A reentrant
checkpoint is such a function too; the function that it runs has the same gradient, and is traced instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from graphplan._compat.torch import backward_hooks, function_of
from graphplan.capture.thread_patches import patched
from graphplan.errors import NoGraphError

_KNOWN = ("torch._", "torch.utils.checkpoint", "transformers.models.bloom.", "transformers.models.sew_d.")
"""Modules whose autograd functions are one operation in the graph, or have the true derivative."""


@contextmanager
def refusing_own_backward(module: nn.Module) -> Iterator[list[type]]:
    """Context manager that refuses a trace of a module if it would lose a custom backward pass or hook.

    It yields a list of the autograd functions that the trace omits, complete at the exit: their gradients
    depend on which inputs require gradients.

    Raises:
        NoGraphError: the graph would have other gradients.
    """
    omitted: list[type] = []
    hooked = next((name for name, part in module.named_modules() if backward_hooks(part)), None)
    if hooked is not None:
        raise NoGraphError(f"{hooked!r} has backward hooks, which a graph does not call")
    functions: list[Any] = []
    tensors: list[torch.Tensor] = []

    def recording_init(original: Callable[..., None]) -> Callable[..., None]:
        def init(function: Any, *args: Any) -> None:
            original(function, *args)
            if torch.is_grad_enabled():
                functions.append(function)

        return init

    def recording_hook(original: Callable[..., Any]) -> Callable[..., Any]:
        def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
            tensors.append(tensor)
            return original(tensor, hook)

        return register_hook

    with patched(
        (BackwardCFunction, "__init__", recording_init),  # ``apply`` makes one, also if it was stored before
        (torch.Tensor, "register_hook", recording_hook),
        (checkpoint.CheckpointFunction, "apply", partial(_without_checkpoint, omitted)),
    ):
        yield omitted
    for function in functions:
        cls = function_of(function)
        if cls.__module__.startswith(_KNOWN):
            continue
        if any(function.needs_input_grad):
            raise NoGraphError(
                f"{cls.__qualname__} has a backward of its own, which cannot be traced: write it in plain "
                "operations, or as a torch.library.custom_op"
            )
        omitted.append(cls)
    if tensors:
        raise NoGraphError("forward calls register_hook of a tensor: a graph calls no gradient hooks")


def _without_checkpoint(omitted: list[type], _original: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``CheckpointFunction.apply`` run its function, with gradients only if an argument has them."""

    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        has_gradients = any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
        if torch.is_grad_enabled():
            omitted.append(checkpoint.CheckpointFunction)
        with torch.set_grad_enabled(has_gradients and torch.is_grad_enabled()):
            return function(*args)

    return apply
