"""One capture at a time in a process, whose patches no other thread sees.

What a thread replaces for a time, all others go on using as it is::

    with patched((functional, "relu", lambda own: traced_relu)):
        functional.relu(x)         here traced_relu; in any other thread torch's own
"""

from __future__ import annotations

import functools
import inspect
import threading
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
"""Held by the thread that captures, plans or lowers; calls of known structures do without.

Tracers keep what they do in globals of torch. A thread that holds it may take other locks, such as that of a
module's streamed runs, only of modules that no other thread knows. So nobody who waits for a capture is
waited for by it.
"""


def one_at_a_time(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """The function, under the capture lock."""

    @functools.wraps(function)
    def locked(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        with CAPTURE_LOCK:  # without a frame of contextlib, at which warnings would point
            return function(*args, **kwargs)

    return locked


def outside_inference_mode(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """The function, whose tensors can be traced and can require gradients wherever it is called."""

    @functools.wraps(function)
    def plain(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return plain


@dataclass(frozen=True, slots=True)
class Patch:
    """Something to replace by more than a :data:`~graphplan._compat.Replacement` says.

    Attributes:
        owner: a module, a class, or a mapping.
        name: of its attribute or entry: a function or a method.
        original: what other threads go on using.
        replacement: what this thread uses.
    """

    owner: Any
    name: str
    original: Any
    replacement: Any

    def install(self, stack: ExitStack) -> None:
        """Replace it until the stack is closed."""
        entry = isinstance(self.owner, MutableMapping)
        namespace = self.owner if entry else vars(self.owner)
        before = namespace.get(self.name, _ABSENT)
        by_thread = _ByThread(self.original, self.replacement)
        write = namespace.__setitem__ if entry else functools.partial(setattr, self.owner)
        remove = namespace.pop if entry else functools.partial(delattr, self.owner)

        def restore() -> None:
            by_thread.expire()
            if before is not _ABSENT:
                write(self.name, before)
            elif self.name in namespace:
                remove(self.name)

        stack.callback(restore)  # first, so that an interrupt finds what to do
        write(self.name, by_thread)


@compiled_as_constant  # another thread may compile what calls a function that is patched here
def _thread() -> int:
    return threading.get_ident()


class _ByThread:
    """A function, or a descriptor of a class, that is another one in the thread that has made this."""

    def __init__(self, original: Any, replacement: Any) -> None:
        functools.update_wrapper(self, original)
        self._original, self._replacement = original, replacement
        self._thread: int | None = _thread()

    def _here(self) -> Any:
        return self._replacement if _thread() == self._thread else self._original

    def expire(self) -> None:
        """Be the original for every thread: somebody may have kept this."""
        self._thread = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._here()(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        here = self._here()
        return here.__get__(instance, owner) if hasattr(type(here), "__get__") else here


@contextmanager
def patched(*patches: Patch | Replacement) -> Iterator[None]:
    """A block in which this thread has replacements; what was there is put back in reverse order."""
    with ExitStack() as stack:
        for patch in [one if isinstance(one, Patch) else _of_attribute(*one) for one in patches]:
            patch.install(stack)
        yield


def _of_attribute(owner: Any, name: str, factory: Callable[[Any], Any]) -> Patch:
    """A patch that other threads do not see of an attribute, by what ``factory`` makes of it."""
    return Patch(owner, name, inspect.getattr_static(owner, name), factory(getattr(owner, name)))


def unpatched(function: Any) -> Any:
    """What threads without patches use."""
    while isinstance(function, _ByThread):
        function = function._original
    return function
