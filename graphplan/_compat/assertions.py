"""``assert`` of what only the data decides, which a trace passes over, as ``python -O`` does.

Python asks a tensor for its truth, and then jumps: one of the two ways begins with raising AssertionError.
The truth that leads the other way is the one by which the assertion holds. Of ``a or b``, the truth of ``a``
leads past it where that of ``b`` does. Instructions have the names of
CPython 3.11 to 3.14. Where another says nothing of an assertion, what asks is a branch: there is no graph.
So is ``all(... for ...)`` in 3.14, which writes the loop out.
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

_ASKS = ("CALL", "PRECALL", "TO_BOOL", "EXTENDED_ARG")  # of bool() or item()
_COMPARES_AND_ASKS = "bool("  # how the argument of COMPARE_OP is written then, from Python 3.13 on
_LOADS = ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")  # where code says AssertionError, LOAD_GLOBAL
_ON_THE_WAY = ("POP_TOP", "NOT_TAKEN", "EXTENDED_ARG", "NOP")  # of a < b < c
_NO_CONDITION = (
    "STORE",
    "DELETE",
    "IMPORT",
    "POP_TOP",
    "FOR_ITER",
    "JUMP",
    "RETURN",
    "RAISE",
)  # how names begin


def passed_assertions() -> list[Replacement]:
    """What to replace for assertions of a tensor's values to hold in a trace."""
    return [(torch.Tensor, "__bool__", _true_for), (torch.SymBool, "__bool__", _true_for)]


def _true_for(own: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def truth(value: Any) -> bool:
        if isinstance(value, torch.SymBool) and value.node.has_hint():
            return own(value)
        held = truth_that_passes(sys._getframe(1))
        return own(value) if held is None else held

    return truth


def truth_that_passes(frame: FrameType) -> bool | None:
    """What must be true or false for the assertion to hold that a frame is at; None where it is at none."""
    code, places = _instructions(frame.f_code)
    at = max(index for offset, index in places.items() if offset <= frame.f_lasti)  # or in its cache
    while code[at].opname in _ASKS or code[at].argrepr.startswith(_COMPARES_AND_ASKS):
        at += 1
    return _truth_of(code, places, at)


@lru_cache(maxsize=64)
def _instructions(code: CodeType) -> tuple[Sequence[dis.Instruction], Mapping[int, int]]:
    """Those of a function, and the index of each by its offset; a loop asks for them each time."""
    found = list(dis.get_instructions(code))
    return found, {one.offset: index for index, one in enumerate(found)}


def _truth_of(code: Sequence[dis.Instruction], places: Mapping[int, int], at: int) -> bool | None:
    name = code[at].opname
    if not (name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE"))):
        return None
    jumps = name.endswith("IF_TRUE")  # the truth that does
    jumped, stayed = (_raises(code, places, one) for one in (places[code[at].argval], at + 1))
    if jumped != stayed:
        return jumps is stayed
    after = at + 1  # of a or b, what asks for b next, and leads past the assertion to the same place
    while not code[after].opname.startswith((*_NO_CONDITION, "POP_JUMP")):
        after += 1
    if _truth_of(code, places, after) is None:
        return None
    return jumps if _is_same_way(code, *(places[code[one].argval] for one in (at, after))) else None


def _is_same_way(code: Sequence[dis.Instruction], one: int, other: int) -> bool:
    """Whether code goes on alike from two places: Python repeats how a function or a round of a loop ends."""
    while one != other:
        name = code[one].opname
        if (name, code[one].argval) != (code[other].opname, code[other].argval):
            return False
        if name.startswith(("RETURN", "JUMP")):
            return True
        one, other = one + 1, other + 1
    return True


def _raises(code: Sequence[dis.Instruction], places: Mapping[int, int], at: int) -> bool:
    while code[at].opname in _ON_THE_WAY or code[at].opname == "JUMP_FORWARD":
        at = places[code[at].argval] if code[at].opname == "JUMP_FORWARD" else at + 1
    return code[at].opname in _LOADS and code[at].argrepr in ("", "AssertionError")
