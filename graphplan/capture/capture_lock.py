"""One capture at a time in a process: tracers keep what they do in globals of torch.

A thread that holds :data:`CAPTURE_LOCK` may take others, such as that of a module's streamed runs, only of
modules that no other thread knows. So nobody who waits for a capture is waited for by it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")

CAPTURE_LOCK = threading.RLock()
"""Held by the thread that captures, plans or lowers; calls of known structures do without."""


def one_at_a_time(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """The function, under the capture lock."""

    @functools.wraps(function)
    def locked(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        with CAPTURE_LOCK:
            return function(*args, **kwargs)

    return locked
