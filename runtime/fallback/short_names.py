"""Classes made of a model's own, under its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, cast
from weakref import WeakValueDictionary

from torch import nn

# weak, since the class of a parametrized module holds the module
_made: WeakValueDictionary[tuple[type, type], type[nn.Module]] = WeakValueDictionary()


def made_class(
    original: type[nn.Module],
    base: type,
    body: Callable[[], Mapping[str, Any]] = dict,
    *,
    in_place: bool = False,
) -> type[nn.Module]:
    """The one class of ``base`` and a model's own class, whose name and documentation it has.

    Args:
        original: the model's own.
        base: what it is made into.
        body: further attributes.
        in_place: whether modules that are there become of this class. Python allows that for those with an
            abstract base class too where the original is the first base.
    """
    key = base, original
    made = _made.get(key)
    if made is None:
        own = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        own |= {"_graphplan_original": original, **body()}
        if in_place:
            own |= {name: value for name, value in vars(base).items() if name not in own and callable(value)}
        made = _made[key] = type(original.__name__, (original, base) if in_place else key, own)
    return made


def class_made(original: type[nn.Module], base: type) -> type[nn.Module] | None:
    """What :func:`made_class` has made of a class and a base, while there are modules of it."""
    return _made.get((base, original))


def original_class(module: nn.Module) -> type[nn.Module]:
    """A module's own class, also where :func:`made_class` has made another of it."""
    found: type[nn.Module] = getattr(type(module), "_graphplan_original", type(module))
    return found


def unplaced(module: nn.Module) -> nn.Module:
    """The module as its own class, with the attributes and weights that it has now."""
    plain = object.__new__(original_class(module))
    for name, value in module.__dict__.items():
        if name != "_graphplan":
            is_method = isinstance(value, MethodType) and isinstance(value.__self__, nn.Module)
            plain.__dict__[name] = _plain_method(value, module, plain) if is_method else value
    return plain


def _plain_method(method: MethodType, module: nn.Module, plain: nn.Module) -> MethodType:
    """A method of the module or a submodule, as its own class has it; of ``plain`` in place of ``module``."""
    owner, function = cast(nn.Module, method.__self__), method.__func__
    if getattr(type(owner), function.__name__, None) is function:  # of the class that was made, it may be
        function = getattr(original_class(owner), function.__name__)
    return MethodType(function, plain if owner is module else owner)
