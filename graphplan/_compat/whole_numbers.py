"""Support for ``int(...)`` of a data-dependent number in a trace.

``int`` cannot return a symbol: ``int(lengths.max())`` ends a trace, ``lengths.max().item()`` does not. Such
a module is traced again, with a replacement for ``int`` in the globals of the calling code. The replacement
behaves as ``int`` under ``isinstance`` and ``==``, but not under ``is``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphplan._compat import Replacement
from graphplan._compat.symbolic_numbers import SymbolicInt, is_torchs

_NAME = "int"


class WholeNumbers:
    """Globals of code that calls ``int`` on a data-dependent number."""

    def __init__(self) -> None:
        self._patched: list[dict[str, Any]] = []
        self._failed: list[dict[str, Any]] = []

    def replacements(self) -> list[Replacement]:
        """Return the patches that record where a trace fails at ``int``."""
        return [(owner, "__int__", self._noting) for owner in (torch.Tensor, torch.SymInt)]

    def _noting(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        def number(value: Any) -> int:
            try:
                return original(value)
            except GuardOnDataDependentSymNode:
                frame = sys._getframe(1)
                if _NAME not in frame.f_globals and not is_torchs(frame):
                    self._failed.append(frame.f_globals)
                raise

        return number

    def learn(self) -> bool:
        """Adopt the recorded failures; return whether there were any, so that another trace may succeed."""
        failed, self._failed = self._failed, []
        self._patched += failed
        return bool(failed)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager that replaces ``int`` in code with recorded failures by one that keeps symbols."""
        replacement = _symbolic_int()
        for namespace in self._patched:
            namespace[_NAME] = replacement
        try:
            yield
        finally:
            for namespace in self._patched:
                del namespace[_NAME]


def _symbolic_int() -> type:
    """Return an ``int`` that, in this thread, returns unbacked symbols unchanged and converts all else."""
    thread = threading.get_ident()

    class Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, int | SymbolicInt)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, int)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is int

        def __hash__(cls) -> int:
            return hash(int)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and threading.get_ident() == thread:
                number = args[0].item() if isinstance(args[0], torch.Tensor) else args[0]
                if isinstance(number, torch.SymInt) and not number.node.has_hint():
                    return number
            return int(*args, **kwargs)

    return Kind(_NAME, (int,), {})
