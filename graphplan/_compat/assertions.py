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
    code, places = _instructions(frame.f_code)
    at = max(index for offset, index in places.items() if offset <= frame.f_lasti)  # may be in its cache
    while code[at].opname in _TO_BOOL or code[at].argrepr.startswith(_COMPARE_TO_BOOL):
        at += 1
    return _truth_of(code, places, at)


@lru_cache(maxsize=64)
def _instructions(code: CodeType) -> tuple[Sequence[dis.Instruction], Mapping[int, int]]:
    """Return a function's instructions, and offset -> index; cached because a loop asks each round."""
    instructions = list(dis.get_instructions(code))
    return instructions, {one.offset: index for index, one in enumerate(instructions)}


def _truth_of(code: Sequence[dis.Instruction], places: Mapping[int, int], at: int) -> bool | None:
    name = code[at].opname
    if not (name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))):
        return None
    jumps = name.endswith("IF_TRUE")  # the truth value on which it jumps
    jumped, stayed = (_raises(code, places, one) for one in (places[code[at].argval], at + 1))
    if jumped != stayed:
        return jumps is stayed
    after = at + 1  # a or b: the test of b comes next, and jumps past the assertion to the same place
    while not code[after].opname.startswith((*_NO_CONDITION, "POP_JUMP")):
        after += 1
    if _truth_of(code, places, after) is None:
        return None
    return jumps if _is_same_code(code, *(places[code[one].argval] for one in (at, after))) else None


def _is_same_code(code: Sequence[dis.Instruction], one: int, other: int) -> bool:
    """Whether two places run the same code: Python duplicates the end of a function or loop body."""
    while one != other:
        name = code[one].opname
        if (name, code[one].argval) != (code[other].opname, code[other].argval):
            return False
        if name.startswith(("RETURN", "JUMP")):
            return True
        one, other = one + 1, other + 1
    return True


def _raises(code: Sequence[dis.Instruction], places: Mapping[int, int], at: int) -> bool:
    while code[at].opname in _BEFORE_RAISE or code[at].opname == "JUMP_FORWARD":
        at = places[code[at].argval] if code[at].opname == "JUMP_FORWARD" else at + 1
    return code[at].opname in _LOAD_ERROR and code[at].argrepr in ("", "AssertionError")
