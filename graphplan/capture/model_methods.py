"""What a call of a model runs: ``forward``, or a method of one of its submodules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from graphplan.capture.attribute_snapshots import attributes_of, put_back
from graphplan.errors import InputError, NoGraphError

_FEW = 3  # calls of what has most parameters: of towers that share weights, say; more are a loop


class RunAsItIs(NoGraphError):  # noqa: N818  # said to the runtime, not to the caller
    """A method that no graph stands for: it calls the model itself, changes it, or computes nothing."""


class UntracedMethodError(NoGraphError):
    """A method that could not be traced, of a module without tensors of its own: its submodules compute."""


def method_of(model: nn.Module, entry: str) -> Callable[..., Any]:
    """What an entry calls: ``path``, ``:method`` or ``path:method`` of a model; the model itself if empty."""
    path, _, method = entry.partition(":")
    module = model.get_submodule(path)
    found: Callable[..., Any] = getattr(module, method) if method else module
    return found


def entry_named(model: nn.Module, name: str) -> str:
    """The entry of what a caller writes as ``"decode"``, ``"vae.decode"`` or ``"text_model"``.

    Raises:
        InputError: the model has neither such a submodule nor such a method.
    """
    parts = dict(model.named_modules())
    path, _, method = name.rpartition(".")
    if name in parts:
        return name
    if method == "forward" and path in parts:
        return path
    if path not in parts or not callable(getattr(parts[path], method, None)):
        raise InputError(f"{type(model).__name__} has no submodule and no method {name!r} to call")
    return f"{path}:{method}"


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


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def pure_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """A method to trace as the ``forward`` of its module: what it does beside its result is not done.

    When called it raises :class:`RunAsItIs` where the method calls the module, or again and again a submodule
    that has most of its parameters, as loops that generate do, or sets attributes.
    """
    method, running = getattr(module, name), list[str]()
    whole = _count(module)
    inner = [part for part in list(module.modules())[1:] if 2 * _count(part) > whole]

    def few(part: nn.Module) -> Callable[..., Any]:
        """Its forward: once where it has all parameters, so that a few calls may be those of towers."""
        forward, left = part.forward, [1 if _count(part) == whole else _FEW]

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                raise RunAsItIs(f"{name!r} calls the same model again: give its calls of the model")
            left[0] -= 1
            return forward(*args, **kwargs)

        return run

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if running:
            raise RunAsItIs(f"{name!r} calls the model itself: give its calls of the model")
        running.append(name)
        before = attributes_of(module)
        try:
            with ExitStack() as stack:
                for part in inner:
                    stack.enter_context(with_forward(part, few(part)))
                result = method(*args, **kwargs)
        finally:
            running.clear()
            changed = put_back(before)
        if changed:
            raise RunAsItIs(f"{name!r} changes {changed[0]!r}")
        return result

    return run
