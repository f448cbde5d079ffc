"""Skip an ``assert`` on data-dependent values in a trace, as ``python -O`` does.

Python calls the tensor's ``__bool__`` and then jumps: one of the two paths starts by raising AssertionError.
The truth value that takes the other path makes the assertion hold. In ``a or b``, ``a`` must jump to where
``b`` jumps when the assertion holds. The bytecode names are those of CPython 3.11 to 3.14. Unrecognized
bytecode is treated as a data-dependent branch, which cannot be traced. This includes ``all(... for ...)``
in 3.14, which is compiled to an inline loop.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch

from graphplan._compat import Replacement

_TO_BOOL = ("CALL", "PRECALL", "TO_BOOL", "EXTENDED_ARG")  # of bool() or item()
_COMPARE_TO_BOOL = "bool("  # start of the argrepr of a COMPARE_OP that also converts to bool, since 3.13
_LOAD_ERROR = ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")  # in "raise", LOAD_GLOBAL
_BEFORE_RAISE = ("POP_TOP", "NOT_TAKEN", "EXTENDED_ARG", "NOP")  # of a < b < c
_NO_CONDITION = ("STORE", "DELETE", "IMPORT", "POP_TOP", "FOR_ITER", "JUMP", "RETURN", "RAISE")
"""Prefixes of opcodes that never occur while a condition is evaluated."""


def passed_assertions() -> list[Replacement]:
    """Return the patches that make assertions on tensor values hold in a trace."""
    return [(torch.Tensor, "__bool__", _true_for), (torch.SymBool, "__bool__", _true_for)]


def _true_for(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def truth(value: Any) -> bool:
        if isinstance(value, torch.SymBool) and value.node.has_hint():
            return original(value)
        passing = truth_that_passes(sys._getframe(1))
        return original(value) if passing is None else passing

    return truth


def truth_that_passes(frame: FrameType) -> bool | None:
    """Return the truth value that makes the frame's current assertion hold; None if it is at no assertion."""
    code, indices = _instructions(frame.f_code)
    index = max(i for offset, i in indices.items() if offset <= frame.f_lasti)  # f_lasti may be in its cache
    while code[index].opname in _TO_BOOL or code[index].argrepr.startswith(_COMPARE_TO_BOOL):
        index += 1
    return _truth_of(code, indices, index)


@lru_cache(maxsize=64)
def _instructions(code: CodeType) -> tuple[Sequence[dis.Instruction], Mapping[int, int]]:
    """Return a function's instructions, and offset -> index; cached for loops."""
    instructions = list(dis.get_instructions(code))
    return instructions, {one.offset: index for index, one in enumerate(instructions)}


def _truth_of(code: Sequence[dis.Instruction], indices: Mapping[int, int], index: int) -> bool | None:
    name = code[index].opname
    if not (name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))):
        return None
    jumps = name.endswith("IF_TRUE")  # the truth value on which it jumps
    jump_raises, next_raises = (
        _raises(code, indices, target) for target in (indices[code[index].argval], index + 1)
    )
    if jump_raises != next_raises:
        return jumps is next_raises
    following = index + 1  # a or b: the test of b comes next, and jumps past the assertion to the same place
    while not code[following].opname.startswith((*_NO_CONDITION, "POP_JUMP")):
        following += 1
    if _truth_of(code, indices, following) is None:
        return None
    return (
        jumps
        if _is_same_code(code, *(indices[code[target].argval] for target in (index, following)))
        else None
    )


def _is_same_code(code: Sequence[dis.Instruction], first: int, second: int) -> bool:
    """Whether the code after two indices is the same: Python duplicates the end of a function or loop."""
    while first != second:
        name = code[first].opname
        if (name, code[first].argval) != (code[second].opname, code[second].argval):
            return False
        if name.startswith(("RETURN", "JUMP")):
            return True
        first, second = first + 1, second + 1
    return True


def _raises(code: Sequence[dis.Instruction], indices: Mapping[int, int], index: int) -> bool:
    while code[index].opname in _BEFORE_RAISE or code[index].opname == "JUMP_FORWARD":
        index = indices[code[index].argval] if code[index].opname == "JUMP_FORWARD" else index + 1
    return code[index].opname in _LOAD_ERROR and code[index].argrepr in ("", "AssertionError")
