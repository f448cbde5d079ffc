"""``int(...)`` of a number that only the data decides, while it is traced.

``int`` returns an ``int``, which a symbol is not: ``int(lengths.max())`` ends a trace where
``lengths.max().item()`` does not. A module that asks so is traced again, with another ``int`` among the
globals of the code that does, which is ``int`` to ``isinstance`` and ``==``, and not to ``is``.
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
    """Globals of code that asks for ``int`` of what only the data decides."""

    def __init__(self) -> None:
        self._known: list[dict[str, Any]] = []
        self._asked: list[dict[str, Any]] = []

    def replacements(self) -> list[Replacement]:
        """What to replace for a trace that fails at ``int`` to say so."""
        return [(owner, "__int__", self._noting) for owner in (torch.Tensor, torch.SymInt)]

    def _noting(self, own: Callable[[Any], int]) -> Callable[[Any], int]:
        def number(value: Any) -> int:
            try:
                return own(value)
            except GuardOnDataDependentSymNode:
                frame = sys._getframe(1)
                if _NAME not in frame.f_globals and not is_torchs(frame):
                    self._asked.append(frame.f_globals)
                raise

        return number

    def learn(self) -> bool:
        """Whether a trace has failed for want of an ``int`` that the next has."""
        asked, self._asked = self._asked, []
        self._known += asked
        return bool(asked)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which code that has asked has an ``int`` that returns symbols as they are."""
        made = _made_int()
        for namespace in self._known:
            namespace[_NAME] = made
        try:
            yield
        finally:
            for namespace in self._known:
                del namespace[_NAME]


def _made_int() -> type:
    """An ``int`` that returns symbols as they are in this thread; a symbol that has a value is settled."""
    here = threading.get_ident()

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
            if len(args) == 1 and threading.get_ident() == here:
                number = args[0].item() if isinstance(args[0], torch.Tensor) else args[0]
                if isinstance(number, torch.SymInt) and not number.node.has_hint():
                    return number
            return int(*args, **kwargs)

    return Kind(_NAME, (int,), {})
