"""What tracers say to a user who did not call them is not heard; what other threads say is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from graphplan.warnings import silenced, unwarned

_TALKATIVE = (
    "transformers",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.export",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep this thread's warnings, log lines of tracers, and standard error from the user.

    ``torch.export`` prints all of the graph that it has when it cannot go on, to the standard error.
    """
    with silenced(*_TALKATIVE), unwarned(), _unprinted():
        yield


@contextmanager
def _unprinted() -> Iterator[None]:
    before = sys.stderr
    stream: Any = _WithoutThread(before)
    sys.stderr = stream
    try:
        yield
    finally:
        stream.ident = None
        if sys.stderr is stream:  # another thread may have put its own there
            sys.stderr = before


class _WithoutThread:
    """A stream that drops what one thread writes to it by ``write``, as ``print`` does."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.ident = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.ident else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
