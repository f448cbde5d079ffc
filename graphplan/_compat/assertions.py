"""Skip an ``assert`` on data-dependent values in a trace, as ``python -O`` does.

Python calls the tensor's ``__bool__`` after it has evaluated an operand of the condition. The source tells
which operand that is, by the position of the instruction. Asked of an operand, the truth value that makes the
assertion hold is True, or False below a ``not``: in ``a or b`` the first operand decides, in ``a and b`` both
hold. Code without source, and ``all(... for ...)`` in Python 3.14, which is compiled to an inline loop, are
treated as data-dependent branches, which cannot be traced.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

import torch

from graphplan._compat import Replacement

Position = tuple[int | None, ...]
"""First and last line, first and last column."""

_JUMPS = {*dis.hasjrel, dis.EXTENDED_ARG}


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
    code, index = frame.f_code, frame.f_lasti // 2
    while code.co_code[2 * index] in _JUMPS:  # a jump on the operand, which the instruction before ends
        index -= 1
    operands = _asserted("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    return operands.get(next(islice(code.co_positions(), index, None)))


@lru_cache(maxsize=64)
def _asserted(source: str) -> Mapping[Position, bool]:
    """Return the position of each operand in an assertion -> the truth value with which it holds."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # such as a cell of a notebook with other commands
        return {}
    asserts = (node for node in ast.walk(tree) if isinstance(node, ast.Assert))
    return dict(pair for node in asserts for pair in _operands(node.test))


def _operands(test: ast.expr, *, truth: bool = True) -> Iterator[tuple[Position, bool]]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _operands(test.operand, truth=not truth)
    elif isinstance(test, ast.BoolOp | ast.IfExp):
        for value in test.values if isinstance(test, ast.BoolOp) else (test.body, test.orelse):
            yield from _operands(value, truth=truth)
    elif not (isinstance(test, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in test.ops)):
        # "in" asks the items, where True need not make it hold
        yield _position(test), truth
        if isinstance(test, ast.NamedExpr):  # Python 3.11 and 3.12 jump after the name is assigned
            yield _position(test.target), truth
        if isinstance(test, ast.Call) and isinstance(method := test.func, ast.Attribute):
            # its position starts at the method's name, if that is on another line than the object's start
            assert method.end_col_offset is not None
            start = method.end_col_offset - len(method.attr.encode())
            yield (method.end_lineno, test.end_lineno, start, test.end_col_offset), truth


def _position(node: ast.expr) -> Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
