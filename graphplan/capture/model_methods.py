"""What a call of a model runs: ``forward``, or a method of one of its submodules."""

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
from graphplan.capture.changes.attribute_snapshots import put_back
from graphplan.errors import InputError, NoGraphError

_FEW = 3  # rounds with what has most parameters: over towers that share weights, say; more are a loop


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
    """The entry of what a caller writes as ``"decode"``, ``"vae.decode"`` or ``"text_model"``."""
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


def _run_method(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return method(*args, **kwargs)


def _place_of_call() -> tuple[tuple[CodeType, int], ...]:
    """Where in the code a method is, through all that it has called: twice the same in a loop alone."""
    found, frame = list[tuple[CodeType, int]](), sys._getframe(2)
    while frame.f_back is not None and frame.f_code is not _run_method.__code__:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _beside_recorders(changed: Sequence[str]) -> Sequence[str]:
    """Without the hooks by which transformers records hidden states: any call adds them that finds none."""
    return [one for one in changed if one not in RECORDERS] if RECORDERS[0] in changed else changed


def pure_method(module: nn.Module, name: str, *, loops: bool = False) -> Callable[..., Any]:
    """A method to trace as the ``forward`` of its module: what it does beside its result is not done.

    That holds for all but ``forward``. When called it raises :class:`RunAsItIs` where the method calls the
    module, or sets attributes, or, unless ``loops`` are to be traced, in a loop a submodule that has most of
    its parameters, as ``generate`` does.
    """
    method: Callable[..., Any] = getattr(module, name)
    if name == "forward":
        return method
    running = list[str]()
    whole = _count(module)
    inner = [part for part in list(module.modules())[1:] if 2 * _count(part) > whole and not loops]

    def in_few_rounds(part: nn.Module) -> Callable[..., Any]:
        """Its forward, which no place in the method may call again, or few times if it is not all of it."""
        forward, most, calls = part.forward, 1 if _count(part) == whole else _FEW, Counter[Any]()

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            place = _place_of_call()
            if calls[place] == most:
                raise RunAsItIs(f"{name!r} calls the same model in a loop: give its calls of the model")
            calls[place] += 1
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
                    stack.enter_context(with_forward(part, in_few_rounds(part)))
                result = _run_method(method, args, kwargs)
        finally:
            running.clear()
            changed = _beside_recorders(put_back(before))
        if changed:
            raise RunAsItIs(f"{name!r} changes {changed[0]!r}")
        return result

    return run
