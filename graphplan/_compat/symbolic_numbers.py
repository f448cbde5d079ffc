"""Make ``torch.export`` trace Python numbers as symbols.

On its own it makes symbols of non-negative ints only, never of floats. Its symbols fail a model's
``isinstance(n, int)``; those made here pass. Its result of ``n > 4`` is neither ``True`` nor equal to 1; here
the model's own code gets a bool. Comparisons stay symbolic where users declare which sizes vary and their
bounds: a guard on a size could contradict these bounds.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import DimDynamic

from graphplan._compat import Replacement, private
from graphplan._compat.assertions import truth_that_passes
from graphplan._compat.export import export_tracer

_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_LARGEST = 1 << 48  # elements: no tensor has more, and a float represents each such integer exactly
_SQUEEZES = (torch.ops.aten.squeeze, torch.ops.aten.squeeze_, torch.ops.aten.squeeze_copy)


def plain_comparisons() -> list[Replacement]:
    """Return the patches that make comparisons of sizes return bools and record their results as guards.

    ``squeeze`` compares, too: otherwise a trace assumes that no dynamic size is 1.
    """
    owners: tuple[Any, ...] = (torch.SymInt, torch.SymFloat)
    compared = [(owner, name, _compared) for owner in owners for name in _COMPARISONS]
    return [*compared, (export_tracer(), "create_node", _comparing_with_one)]


def plain_flags() -> list[Replacement]:
    """Return the patches that make ``flag.item()`` a data-dependent branch, as ``if flag:`` is."""
    return [(torch.Tensor, "item", _read_flag)]


def plain_texts(has_value: Callable[[Any], bool]) -> list[Replacement]:
    """Return the patches that convert a symbolic number to text by its value if ``has_value(number)``.

    Otherwise the text is that of the symbol, as ``"u0"`` for ``f"{flag.item()}"``. The value of a size fixes
    it at that of the example: ``heads[f"{length}"]`` must find its key. Texts that ``logging`` makes do not.
    """
    names, classes = ("__repr__", "__format__"), (torch.SymInt, torch.SymFloat, torch.SymBool)
    return [(cls, name, partial(_as_text, has_value, PLAIN_TYPES[cls])) for cls in classes for name in names]


def exact_bounds() -> list[Replacement]:
    """Return the patches that bound data-dependent sizes by a number with which torch computes exactly.

    Torch divides bounds as floats. With its own 63-bit bound, ``torch._check(x[mask].numel() == 8 * batch)``
    raised an error.
    """
    private(symbolic_shapes, "_constrain_range_for_size", "torch")
    return [(symbolic_shapes, "_constrain_range_for_size", _bounded)]


def _bounded(original: Callable[..., None]) -> Callable[..., None]:
    def constrain(size: Any, min: int | None = None, max: int | None = None) -> None:
        original(size, min, _LARGEST if max is None or max > _LARGEST else max)

    return constrain


def _compared(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare(a: Any, b: Any) -> Any:
        result = original(a, b)
        plain = isinstance(result, torch.SymBool) and result.node.has_hint()  # others may be for torch._check
        return bool(result) if plain and not is_library_frame(sys._getframe(1)) else result

    return compare


def _as_text(has_value: Callable[[Any], bool], cls: type, original: Callable[..., str]) -> Callable[..., str]:
    def text(number: Any, *form: str) -> str:
        frame = sys._getframe(1)
        if is_library_frame(frame) or _is_of_message(frame) or not has_value(number):
            return original(number, *form)
        return format(cls(number), *form) if form else repr(cls(number))

    return text


def _is_of_message(frame: Any) -> bool:
    """Whether a frame makes the text of a message for people."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("logging", "warnings", "traceback")


def _comparing_with_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``create_node``, which runs before every operation, to compare sizes with 1 before ``squeeze``."""

    def create_node(tracer: Any, op: str, target: Any, args: Any, *others: Any, **options: Any) -> Any:
        if getattr(target, "overloadpacket", None) in _SQUEEZES:
            shape = args[0].meta["val"].shape
            dims = args[1] if len(args) > 1 else range(len(shape))
            for dim in [dims] if isinstance(dims, int) else dims:
                size = shape[dim] if shape else None  # squeeze takes dim 0 and -1 of a 0-dim tensor
                if isinstance(size, torch.SymInt) and size.node.has_hint():
                    bool(size == 1)
        return original(tracer, op, target, args, *others, **options)

    return create_node


def _read_flag(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def item(tensor: Any) -> Any:
        flag = original(tensor)
        if not isinstance(flag, torch.SymBool) or is_library_frame(frame := sys._getframe(1)):
            return flag  # torch._check_tensor_all needs the symbol for its check in the graph
        passing = truth_that_passes(frame)
        return bool(flag) if passing is None else passing

    return item


def is_library_frame(frame: Any) -> bool:
    """Whether a frame runs code of torch or graphplan, rather than of a model."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "graphplan")


def _class_for_models(plain: type, symbolic: type) -> Any:
    """Return a ``__class__`` property: ``symbolic`` to torch and graphplan, ``plain`` to other code."""

    def read(_number: Any) -> type:
        return symbolic if is_library_frame(sys._getframe(1)) else plain

    return property(read)


class SymbolicInt(torch.SymInt):
    """An int argument in a trace."""

    __class__ = _class_for_models(int, torch.SymInt)


class SymbolicFloat(torch.SymFloat):
    """A float argument in a trace."""

    __class__ = _class_for_models(float, torch.SymFloat)


PLAIN_TYPES: dict[type, type] = {
    torch.SymInt: int,
    SymbolicInt: int,
    torch.SymFloat: float,
    SymbolicFloat: float,
    torch.SymBool: bool,
}
"""The class of a symbol -> that of the number in eager mode."""


def symbolic_numbers() -> list[Replacement]:
    """Return the patches that make ``torch.export`` trace every int and float argument as a symbol."""
    utils: Any = importlib.import_module("torch._export.non_strict_utils")  # here because it is slow
    for name in ("fakify", "_is_constant_argument", "_IntWrapper", "TrackedFake", "key_path_to_source"):
        private(utils, name, "torch")
    fakes: Any = importlib.import_module("torch._subclasses.fake_impls")
    private(fakes, "_compute_slice_index", "torch")
    return [
        (utils, "fakify", partial(_made_symbol, utils)),
        (utils, "_is_constant_argument", _needs_no_range),
        (fakes, "_compute_slice_index", _of_known_sign),
    ]


def _made_symbol(utils: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``fakify``, which makes the traced value of an input leaf, to make symbols of finite numbers."""

    def fakify(mode: Any, path: Any, leaf: Any, *args: Any, sourced_prefixes: Any = None) -> Any:
        number = leaf.val if type(leaf) is utils._IntWrapper else leaf
        if type(number) not in (int, float) or not math.isfinite(number):
            return original(mode, path, leaf, *args, sourced_prefixes=sourced_prefixes)
        source, env = utils.key_path_to_source(path, sourced_prefixes=sourced_prefixes), mode.shape_env
        symbol = env.create_unspecified_symbol(number, source, DimDynamic.DYNAMIC)
        is_int = isinstance(number, int)
        create = env.create_symintnode if is_int else env.create_symfloatnode
        cls: Any = SymbolicInt if is_int else SymbolicFloat
        traced = cls(create(symbol, hint=number, source=source).node)
        env.tracked_fakes.append(utils.TrackedFake(traced, source, None))
        return traced

    return fakify


def _of_known_sign(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap the computation of a slice bound: one of unknown sign would make the size data-dependent."""

    def index(size: Any, bound: Any) -> Any:
        if isinstance(bound, torch.SymInt) and bound.node.has_hint():
            bool(bound >= 0)  # adds a guard
        return original(size, bound)

    return index


def _needs_no_range(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: original(value) or isinstance(value, torch.SymInt | torch.SymFloat | torch.Generator)
