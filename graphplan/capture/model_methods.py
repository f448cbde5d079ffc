"""Entries of a model: ``forward``, or a method of the model or of one of its submodules."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

from torch import nn

from graphplan._compat.transformers import RECORDERS
from graphplan.capture.changes.attribute_data import attributes_of
from graphplan.capture.changes.attribute_snapshots import restore_attributes
from graphplan.errors import InputError, NoGraphError

_MAX_CALLS = 3  # calls of a large submodule from one place, as for towers that share weights; more are a loop


class RunAsItIs(NoGraphError):  # noqa: N818  # said to the runtime, not to the caller
    """No graph can replace a method: it calls the model itself, changes it, or computes nothing."""


class UntracedMethodError(NoGraphError):
    """A method cannot be traced; its module has no tensors of its own, so its submodules may be traced."""


def method_of(model: nn.Module, entry: str) -> Callable[..., Any]:
    """Return the callable of an entry ``path``, ``:method`` or ``path:method``; the model if it is empty."""
    path, _, method = entry.partition(":")
    module = model.get_submodule(path)
    target: Callable[..., Any] = getattr(module, method) if method else module
    return target


def entry_named(model: nn.Module, name: str) -> str:
    """Return the entry of a user's name: ``"decode"``, ``"vae.decode"`` or ``"text_model"``."""
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
    """Context manager in which this module, but not its class, has another ``forward``."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        vars(module).pop("forward", None)  # a patch in the model may have removed it
        if own is not None:
            module.forward = own


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _run_method(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return method(*args, **kwargs)


def _call_position() -> tuple[tuple[CodeType, int], ...]:
    """Return the positions of the frames from the method to here: they repeat only in a loop."""
    positions, frame = list[tuple[CodeType, int]](), sys._getframe(2)
    while frame.f_back is not None and frame.f_code is not _run_method.__code__:
        positions.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(positions)


def _without_recorders(changed: Sequence[str]) -> Sequence[str]:
    """Drop transformers' hooks that record hidden states: any call adds them if there are none."""
    return [one for one in changed if one not in RECORDERS] if RECORDERS[0] in changed else changed


def pure_method(module: nn.Module, name: str, *, loops: bool) -> Callable[..., Any]:
    """Return a method to trace as the ``forward`` of its module, without side effects on attributes.

    ``forward`` itself is returned unchanged. Any other raises :class:`RunAsItIs` when it calls the module or
    sets attributes. Unless ``loops`` are to be traced, it also does so when it calls a submodule with most of
    the parameters in a loop, as ``generate`` does.
    """
    method: Callable[..., Any] = getattr(module, name)
    if name == "forward":
        return method
    running = list[str]()
    total = _parameter_count(module)
    inner = [part for part in list(module.modules())[1:] if 2 * _parameter_count(part) > total and not loops]

    def limited_forward(part: nn.Module) -> Callable[..., Any]:
        """Return the part's forward, which refuses a loop: one place may call it ``max_calls`` times."""
        forward, calls = part.forward, Counter[Any]()
        max_calls = 1 if _parameter_count(part) == total else _MAX_CALLS

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            position = _call_position()
            if calls[position] == max_calls:
                raise RunAsItIs(
                    f"{name!r} calls the same model in a loop: give the calls of the model in its place"
                )
            calls[position] += 1
            return forward(*args, **kwargs)

        return run

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if running:
            raise RunAsItIs(f"{name!r} calls the model itself: give the calls of the model in its place")
        running.append(name)
        before = attributes_of(module)
        try:
            with ExitStack() as stack:
                for part in inner:
                    stack.enter_context(with_forward(part, limited_forward(part)))
                result = _run_method(method, args, kwargs)
        finally:
            running.clear()
            changed = _without_recorders(restore_attributes(before))
        if changed:
            raise RunAsItIs(
                f"{name!r} changes {changed[0]!r}, so its own code runs, over the placed weights: leave it "
                "out of calls="
            )
        return result

    return run
