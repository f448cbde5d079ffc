"""Suppression of tracers' warnings and logs in the tracing thread; other threads keep theirs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from graphplan.capture.thread_patches import Patch, patched
from graphplan.warnings import silenced, unwarned

_TALKATIVE = (
    "transformers",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.export",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that suppresses this thread's warnings, tracer logs and standard error.

    ``torch.export`` prints its whole graph to standard error when it fails.
    """
    stream = sys.stderr  # None without a console; ``print`` calls its ``write``
    printed = [Patch(stream, "write", stream.write, len)] if hasattr(stream, "__dict__") else []
    with silenced(*_TALKATIVE), unwarned(), patched(*printed):
        yield
