"""The lock of captures, one at a time in a process, and patches that only one thread sees.

All other threads continue to use the original::

    with patched((functional, "relu", lambda own: traced_relu)):
        functional.relu(x)         traced_relu in this thread; torch's own in any other
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from graphplan._compat import Replacement
from graphplan._compat.torch import compiled_as_constant

_ABSENT = object()
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

CAPTURE_LOCK = threading.RLock()
"""Held by the thread that captures, plans or lowers; a call that has a plan does not need it.

Tracers keep their state in globals of torch. To exclude deadlocks, a thread that holds this lock may take
other locks, such as that of a module's streamed runs, only of modules that no other thread knows.
"""


def one_at_a_time(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Decorate a function to run under the capture lock."""

    @functools.wraps(function)
    def locked(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        with CAPTURE_LOCK:  # not a decorator of contextlib, to whose frame warnings would point
            return function(*args, **kwargs)

    return locked


def outside_inference_mode(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Decorate a function to run outside inference mode: its tensors can be traced, and require gradients."""

    @functools.wraps(function)
    def plain(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return plain


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch that, unlike :data:`~graphplan._compat.Replacement`, may be of a mapping, and has any original.

    Attributes:
        owner: a module, a class, or a mapping.
        name: the attribute or key of the function or method to replace.
        original: the function that other threads use.
        replacement: the function that this thread uses.
    """

    owner: Any
    name: str
    original: Any
    replacement: Any

    def install(self, stack: ExitStack) -> None:
        """Install the patch until the stack is closed."""
        is_mapping = isinstance(self.owner, MutableMapping)
        namespace = self.owner if is_mapping else vars(self.owner)
        before = namespace.get(self.name, _ABSENT)
        by_thread = _ByThread(self.original, self.replacement)
        write = namespace.__setitem__ if is_mapping else functools.partial(setattr, self.owner)
        remove = namespace.pop if is_mapping else functools.partial(delattr, self.owner)

        def restore() -> None:
            by_thread.expire()
            if before is not _ABSENT:
                write(self.name, before)
            elif self.name in namespace:
                remove(self.name)

        stack.callback(restore)  # first, so that it runs after an interrupt, too
        write(self.name, by_thread)


@compiled_as_constant  # another thread may compile what calls a function that is patched here
def _thread() -> int:
    return threading.get_ident()


class _ByThread:
    """A function, or a descriptor of a class, with a replacement for the thread that created it."""

    def __init__(self, original: Any, replacement: Any) -> None:
        functools.update_wrapper(self, original)
        self._original, self._replacement = original, replacement
        self._thread: int | None = _thread()

    def _current(self) -> Any:
        return self._replacement if _thread() == self._thread else self._original

    def expire(self) -> None:
        """Be the original in all threads: a reference to this object may outlive the patch."""
        self._thread = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._current()(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        current = self._current()
        return current.__get__(instance, owner) if hasattr(type(current), "__get__") else current


@contextmanager
def patched(*patches: Patch | Replacement) -> Iterator[None]:
    """Context manager that installs patches for this thread, and removes them in reverse order."""
    installed = [one if isinstance(one, Patch) else _of_attribute(*one) for one in patches]
    count = Counter((id(patch.owner), patch.name) for patch in installed)
    twice = [patch.name for patch in installed if count[id(patch.owner), patch.name] > 1]
    assert not twice, f"patched twice, so that only the last counts: {twice}"
    with ExitStack() as stack:
        for patch in installed:
            patch.install(stack)
        yield


def _of_attribute(owner: Any, name: str, factory: Callable[[Any], Any]) -> Patch:
    """Return the patch that replaces an attribute by the result of ``factory``, called with the original."""
    return Patch(owner, name, inspect.getattr_static(owner, name), factory(getattr(owner, name)))


def unpatched(function: Any) -> Any:
    """Return the original of a function that may be patched."""
    while isinstance(function, _ByThread):
        function = function._original
    return function
