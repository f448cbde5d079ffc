"""Conversion of symbolic sizes, with their ranges and hints, to plain data and back.

``torch.export.load`` also rebuilds sizes, by parsing text; here an expression is a list::

    s0 * 2        ["Mul", 2, ["Symbol", "s0"]]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no types
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions, numbers
from torch.utils._sympy.printers import PythonPrinter

from graphplan._compat import private
from graphplan.errors import NoGraphError

_INFINITY = private(numbers, "int_oo", "torch")
_ASSUMPTIONS = ("integer", "positive", "nonnegative", "real")


def original_expression(size: Any) -> Any:
    """Return the size's original expression, before symbols were replaced by equal ones."""
    if not isinstance(size, torch.SymInt):
        return sympy.sympify(size)
    return sympy.sympify(private(size.node, "_expr", "torch"))


def plain_expression(expression: Any) -> Any:
    """Return an expression as lists, numbers and strings.

    Raises:
        KeyError: the expression has a function that is neither in sympy nor in torch.
    """
    if expression == _INFINITY or expression == -_INFINITY:
        return ["infinity", 1 if expression == _INFINITY else -1]
    if isinstance(expression, bool | int | float):
        return expression
    if expression.is_Boolean and not expression.args:
        return bool(expression)
    if expression.is_Symbol:
        return ["Symbol", expression.name]
    if expression.is_Integer:
        return int(expression)
    if expression.is_Rational:
        return ["Rational", int(expression.p), int(expression.q)]
    if expression.is_Float:
        return float(expression)
    name = type(expression).__name__
    _class_named(name)
    return [name, *map(plain_expression, expression.args)]


def _class_named(name: str) -> Any:
    cls = getattr(functions, name, None) or getattr(sympy, name, None)
    if not (isinstance(cls, type) and issubclass(cls, sympy.Basic)):
        raise KeyError(f"{name!r} is not a function of sizes")
    return cls


def expression_from_plain(plain: Any, symbols: Mapping[str, Any]) -> Any:
    """Return the expression that :func:`plain_expression` has converted to lists."""
    if not isinstance(plain, list):
        return sympy.sympify(plain)
    kind, *arguments = plain
    if kind == "infinity":
        return arguments[0] * _INFINITY
    if kind == "Symbol":
        return symbols[arguments[0]]
    if kind == "Rational":
        return sympy.Rational(*arguments)
    return _class_named(kind)(*(expression_from_plain(one, symbols) for one in arguments))


def plain_symbol(symbol: Any, env: ShapeEnv) -> list[Any]:
    """Return a symbol's name, assumptions, value in the example (None if unbacked) and range."""
    hints: Any = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    bounds = env.var_to_range.get(symbol)
    value = hints.get(symbol)
    return [
        symbol.name,
        [name for name in _ASSUMPTIONS if getattr(symbol, f"is_{name}")],
        None if value is None else plain_expression(value),
        None if bounds is None else [plain_expression(bounds.lower), plain_expression(bounds.upper)],
    ]


def conditions_since(env: ShapeEnv, count: int, codes: Mapping[Any, str]) -> list[str]:
    """Return the guards of a trace after the first ``count``, as Python code.

    ``codes`` maps a symbol to its code. Raise ``NoGraphError`` if a guard has another symbol.
    """
    code_of = {symbol: sympy.Symbol(text, integer=True) for symbol, text in codes.items()}
    conditions = [guard.expr for guard in env.guards[count:]]
    for symbol in set[Any]().union(*(one.free_symbols for one in conditions)):
        if symbol not in code_of:
            raise NoGraphError(f"the backward pass depends on {symbol}, which is not a size of an input")
    return [PythonPrinter().doprint(one.xreplace(code_of)) for one in dict.fromkeys(conditions)]


class SizeMaker:
    """Rebuilds the symbols and sizes of one trace.

    Attributes:
        symbols: symbols by name.
        mode: the mode of fake tensors with these sizes.
    """

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.symbols: dict[str, Any] = {}

    def symbol(self, plain: list[Any]) -> None:
        """Add a symbol that :func:`plain_symbol` describes."""
        name, assumptions, value, bounds = plain
        symbol = sympy.Symbol(name, **dict.fromkeys(assumptions, True))
        self.symbols[name] = symbol
        if value is not None:
            modern = hasattr(self.env, "add_backed_var_to_val")
            add = self.env.add_backed_var_to_val if modern else self.env.add_var_to_val
            add(symbol, expression_from_plain(value, {}))
        if bounds is not None:
            low, high = (expression_from_plain(bound, {}) for bound in bounds)
            self.env.constrain_symbol_range(symbol, compiler_min=low, compiler_max=high)

    def size(self, kind: str, plain: Any) -> Any:
        """Return a symbolic number of kind ``"int"``, ``"float"`` or ``"bool"``; torch computes its hint."""
        expression = expression_from_plain(plain, self.symbols)
        if kind == "int":
            return self.env.create_symintnode(expression, hint=None)
        if kind == "float":
            return self.env.create_symfloatnode(expression, hint=None)
        return self.env.create_symboolnode(expression)
