"""Python numbers that ``torch.export`` traces as symbols.

Of itself it makes symbols of ints that are not negative, and never of floats. What it makes of an int is no
``int`` to a model that asks for its type; what is made here is. And what it makes of ``n > 4`` is neither
``True`` nor equal to 1: a model's own code gets a bool. Not so where users say which sizes vary, and in what
bounds: what is taken for granted of a size could pass these.
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
_LARGEST = 1 << 48  # elements: no tensor has more, and each such number is a float
_SQUEEZES = (torch.ops.aten.squeeze, torch.ops.aten.squeeze_, torch.ops.aten.squeeze_copy)


def plain_comparisons() -> list[Replacement]:
    """What to replace for comparisons of sizes to be bools, whose answers become conditions of the trace.

    ``squeeze`` compares too: without that, a trace takes sizes that may vary to be other than 1.
    """
    owners: tuple[Any, ...] = (torch.SymInt, torch.SymFloat)
    compared = [(owner, name, _compared) for owner in owners for name in _COMPARISONS]
    return [*compared, (export_tracer(), "create_node", _asking_for_ones)]


def plain_flags() -> list[Replacement]:
    """What to replace for a flag that is read from a tensor to be an error, as ``if flag:`` is."""
    return [(torch.Tensor, "item", _read_flag)]


def plain_texts(has_value: Callable[[Any], bool]) -> list[Replacement]:
    """What to replace for the text of a number that ``has_value`` to be asked for, as ``int(...)`` is.

    Of itself it is that of a symbol: ``f"{flag.item()}"`` is ``"u0"``. So are those of sizes and of what
    inputs decide, which are mostly in messages: they go on varying.
    """
    plain = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    names = ("__repr__", "__format__")
    return [(kind, name, partial(_written, has_value, plain[kind])) for kind in plain for name in names]


def exact_bounds() -> list[Replacement]:
    """What to replace for sizes that the data decides to have bounds with which torch computes exactly.

    It divides them as floats: with its own, of 63 bits, ``torch._check(x[mask].numel() == 8 * batch)`` was an
    error.
    """
    private(symbolic_shapes, "_constrain_range_for_size", "torch")
    return [(symbolic_shapes, "_constrain_range_for_size", _bounded)]


def _bounded(own: Callable[..., None]) -> Callable[..., None]:
    def constrain(size: Any, min: int | None = None, max: int | None = None) -> None:
        own(size, min, _LARGEST if max is None or max > _LARGEST else max)

    return constrain


def _compared(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare(a: Any, b: Any) -> Any:
        found = own(a, b)
        plain = isinstance(found, torch.SymBool) and found.node.has_hint()  # others may be for torch._check
        return bool(found) if plain and not is_torchs(sys._getframe(1)) else found

    return compare


def _written(has_value: Callable[[Any], bool], plain: type, own: Callable[..., str]) -> Callable[..., str]:
    def text(number: Any, *form: str) -> str:
        if is_torchs(sys._getframe(1)) or not has_value(number):
            return own(number, *form)
        return format(plain(number), *form) if form else repr(plain(number))

    return text


def _asking_for_ones(own: Callable[..., Any]) -> Callable[..., Any]:
    """``create_node``, which is called before the operation runs, however the model calls that."""

    def create_node(tracer: Any, kind: str, target: Any, args: Any, *others: Any, **options: Any) -> Any:
        if getattr(target, "overloadpacket", None) in _SQUEEZES:
            shape = args[0].meta["val"].shape
            dims = args[1] if len(args) > 1 else range(len(shape))
            for dim in [dims] if isinstance(dims, int) else dims:
                size = shape[dim] if shape else None  # a number has axes 0 and -1, to squeeze
                if isinstance(size, torch.SymInt) and size.node.has_hint():
                    bool(size == 1)
        return own(tracer, kind, target, args, *others, **options)

    return create_node


def _read_flag(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def item(tensor: Any) -> Any:
        found = own(tensor)
        if not isinstance(found, torch.SymBool) or is_torchs(frame := sys._getframe(1)):
            return found  # torch._check_tensor_all leaves a check in the graph
        held = truth_that_passes(frame)
        return bool(found) if held is None else held

    return item


def is_torchs(frame: Any) -> bool:
    """Whether code is torch's or ours, not a model's."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "graphplan")


def _class_for_models(plain: type, symbolic: type) -> Any:
    """A ``__class__`` that is the plain number's to all code but torch's own."""

    def read(_number: Any) -> type:
        return symbolic if is_torchs(sys._getframe(1)) else plain

    return property(read)


class SymbolicInt(torch.SymInt):
    """An int argument while it is traced."""

    __class__ = _class_for_models(int, torch.SymInt)


class SymbolicFloat(torch.SymFloat):
    """A float argument while it is traced."""

    __class__ = _class_for_models(float, torch.SymFloat)


def symbolic_numbers() -> list[Replacement]:
    """What to replace for ``torch.export`` to trace each int and each float as a symbol."""
    utils: Any = importlib.import_module("torch._export.non_strict_utils")  # late: it takes time
    for name in ("fakify", "_is_constant_argument", "_IntWrapper", "TrackedFake", "key_path_to_source"):
        private(utils, name, "torch")
    fakes: Any = importlib.import_module("torch._subclasses.fake_impls")
    private(fakes, "_compute_slice_index", "torch")
    return [
        (utils, "fakify", partial(_made_symbol, utils)),
        (utils, "_is_constant_argument", _needs_no_range),
        (fakes, "_compute_slice_index", _of_known_sign),
    ]


def _made_symbol(utils: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """``fakify``, which makes what is traced of each leaf of the inputs."""

    def fakify(mode: Any, path: Any, leaf: Any, *args: Any, sourced_prefixes: Any = None) -> Any:
        number = leaf.val if type(leaf) is utils._IntWrapper else leaf
        if type(number) not in (int, float) or not math.isfinite(number):
            return own(mode, path, leaf, *args, sourced_prefixes=sourced_prefixes)
        source, env = utils.key_path_to_source(path, sourced_prefixes=sourced_prefixes), mode.shape_env
        symbol = env.create_unspecified_symbol(number, source, DimDynamic.DYNAMIC)
        is_int = isinstance(number, int)
        create = env.create_symintnode if is_int else env.create_symfloatnode
        kind: Any = SymbolicInt if is_int else SymbolicFloat
        made = kind(create(symbol, hint=number, source=source).node)
        env.tracked_fakes.append(utils.TrackedFake(made, source, None))
        return made

    return fakify


def _of_known_sign(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Where a slice begins or ends: to a number of unknown sign, its size would be one that data decides."""

    def index(size: Any, at: Any) -> Any:
        if isinstance(at, torch.SymInt) and at.node.has_hint():
            bool(at >= 0)  # a condition of the trace
        return own(size, at)

    return index


def _needs_no_range(own: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: own(value) or isinstance(value, torch.SymInt | torch.SymFloat | torch.Generator)
