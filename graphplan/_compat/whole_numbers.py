"""Support for ``int(...)`` of a data-dependent number in a trace.

``int`` cannot return a symbol: ``int(lengths.max())`` ends a trace, ``lengths.max().item()`` does not. Such
a module is retraced with a replacement for ``int`` in the globals of the calling code. The replacement
behaves as ``int`` under ``isinstance`` and ``==``, but not under ``is``. It also returns ``size // 4`` for
``int(size / 4)``, for which the trace would otherwise fix the size at its value in the example.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no types
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._sympy import functions

from graphplan._compat import Replacement, private
from graphplan._compat.symbolic_numbers import SymbolicInt, is_library_frame

aten = torch.ops.aten

_NAME = "int"
_DIVISIONS = tuple(private(functions, name, "torch") for name in ("FloatTrueDiv", "IntTrueDiv"))


class WholeNumbers:
    """Globals of code that calls ``int`` on a data-dependent number."""

    def __init__(self) -> None:
        self._patched: list[dict[str, Any]] = []
        self._failed: list[dict[str, Any]] = []

    def replacements(self) -> list[Replacement]:
        """Return the patches that record where a trace fails at ``int``."""
        return [(owner, "__int__", self._recording) for owner in (torch.Tensor, torch.SymInt, torch.SymFloat)]

    def _recording(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        def number(value: Any) -> int:
            frame = sys._getframe(1)
            is_unpatched = _NAME not in frame.f_globals and not is_library_frame(frame)
            if is_unpatched and _quotient(value) is not None:
                self._failed.append(frame.f_globals)
                raise DataDependentOutputException(aten._local_scalar_dense.default)  # ends this trace
            try:
                return original(value)
            except GuardOnDataDependentSymNode:
                if is_unpatched:
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


def _quotient(number: Any) -> Any:
    """Return ``size // n`` if ``number`` is ``size / n`` with a constant integer ``n``; else None."""
    if not isinstance(number, torch.SymFloat) or not isinstance(number.node.expr, _DIVISIONS):
        return None
    size, divisor = number.node.expr.args
    size = size.args[0] if isinstance(size, functions.ToFloat) else size
    if not (size.is_integer and size.is_nonnegative and divisor.is_number and divisor > 0):
        return None
    if not float(divisor).is_integer():
        return None
    floor = functions.FloorDiv(size, sympy.Integer(int(divisor)))
    return number.node.shape_env.create_symintnode(floor, hint=None)


def _symbolic_int() -> type:
    """Return an ``int`` that, in this thread, returns unbacked symbols unchanged and converts all else."""
    thread = threading.get_ident()

    class Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, int | SymbolicInt)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, int)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is int

        def __hash__(cls) -> int:
            return hash(int)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and threading.get_ident() == thread:
                number = args[0].item() if isinstance(args[0], torch.Tensor) else args[0]
                if isinstance(number, torch.SymInt) and not number.node.has_hint():
                    return number
                if (quotient := _quotient(number)) is not None:
                    return quotient
            return int(*args, **kwargs)

    return Kind(_NAME, (int,), {})
