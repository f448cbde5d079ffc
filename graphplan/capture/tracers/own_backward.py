"""What changes gradients and is in no graph: a trace has the forward pass, which autograd differentiates.

The backward pass of a ``torch.autograd.Function``, and hooks of gradients, would be lost without a word: a
model that has one is not traced where gradients are asked for. A reentrant checkpoint is such a function too;
its gradient is that of what it runs, which is traced in its place.
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
"""Modules whose functions are of an operation that is in the graph as a whole, or compute the derivative."""


class OwnBackward:
    """What a trace has left out.

    Attributes:
        beyond_inputs: whether that is a backward pass which inputs would reach if they required gradients.
        reached: whether it is a reentrant checkpoint that gradients reach, be it those of inputs alone.
    """

    beyond_inputs = False
    reached = False


@contextmanager
def refusing_own_backward(module: nn.Module) -> Iterator[OwnBackward]:
    """A block in which a call of a module is traced, whose gradients are asked for.

    Raises:
        NoGraphError: the graph would have other gradients.
    """
    left_out = OwnBackward()
    hooked = next((name for name, part in module.named_modules() if backward_hooks(part)), None)
    if hooked is not None:
        raise NoGraphError(f"{hooked!r} has backward hooks, which no graph calls")
    functions: list[Any] = []
    tensors: list[torch.Tensor] = []

    def noting(own: Callable[..., None]) -> Callable[..., None]:
        def init(function: Any, *args: Any) -> None:
            own(function, *args)
            if torch.is_grad_enabled():
                functions.append(function)

        return init

    def hooking(own: Callable[..., Any]) -> Callable[..., Any]:
        def register_hook(tensor: torch.Tensor, hook: Any) -> Any:
            tensors.append(tensor)
            return own(tensor, hook)

        return register_hook

    with patched(
        (BackwardCFunction, "__init__", noting),  # any ``apply`` makes one, a stored one too
        (torch.Tensor, "register_hook", hooking),
        (checkpoint.CheckpointFunction, "apply", partial(_without_checkpoint, left_out)),
    ):
        yield left_out
    for function in functions:
        of = function_of(function)
        if of.__module__.startswith(_KNOWN):
            continue
        if any(function.needs_input_grad):
            raise NoGraphError(
                f"{of.__qualname__} has a backward of its own, which is in no graph: write it in plain "
                "operations, or as a torch.library.custom_op"
            )
        left_out.beyond_inputs = True
    if tensors:
        raise NoGraphError("forward calls register_hook of a tensor, and no graph calls hooks of gradients")


def _without_checkpoint(left_out: OwnBackward, _own: Callable[..., Any]) -> Callable[..., Any]:
    """``CheckpointFunction.apply`` that runs the function, without gradients where none would reach it."""

    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        reached = any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
        if torch.is_grad_enabled():
            left_out.beyond_inputs |= not reached
            left_out.reached |= reached
        with torch.set_grad_enabled(reached and torch.is_grad_enabled()):
            return function(*args)

    return apply
