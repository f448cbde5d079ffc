"""What tracers say to a user who did not call them is not heard; what other threads say is."""

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
    """Keep this thread's warnings, log lines of tracers, and standard error from the user.

    ``torch.export`` prints all of the graph that it has when it cannot go on, to the standard error.
    """
    stream = sys.stderr  # None without a console; ``print`` calls its ``write``
    printed = [Patch(stream, "write", stream.write, len)] if hasattr(stream, "__dict__") else []
    with silenced(*_TALKATIVE), unwarned(), patched(*printed):
        yield
