"""Classes made of a model's own, under its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import getattr_static
from threading import Lock
from types import MethodType
from typing import Any, cast
from weakref import WeakValueDictionary

from torch import nn

from graphplan.capture.model.shared_attributes import PATCHED, stands_for

# weak, since the class of a parametrized module holds the module
_made: WeakValueDictionary[tuple[type, type], type[nn.Module]] = WeakValueDictionary()
_making = Lock()


def made_class(
    original: type[nn.Module],
    base: type,
    body: Callable[[], Mapping[str, Any]],
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
        with _making, _unannounced(original):
            made = _made[key] = type(original.__name__, (original, base) if in_place else key, own)
    return made


@contextmanager
def _unannounced(original: type) -> Iterator[None]:
    """Classes that are made of this one are not told of to it or to its bases, which may ask for arguments.

    It is the class's own method that makes way, since any other base would give them another layout.
    """
    own = vars(original).get("__init_subclass__")
    type.__setattr__(original, "__init_subclass__", classmethod(lambda _: None))
    try:
        yield
    finally:
        if own is None:
            type.__delattr__(original, "__init_subclass__")
        else:
            type.__setattr__(original, "__init_subclass__", own)


def class_made(original: type[nn.Module], base: type) -> type[nn.Module] | None:
    """What :func:`made_class` has made of a class and a base, while there are modules of it."""
    return _made.get((base, original))


def original_class(module: nn.Module) -> type[nn.Module]:
    """A module's own class, also where :func:`made_class` has made another of it."""
    found: type[nn.Module] = getattr(type(module), "_graphplan_original", type(module))
    return found


def written_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module's copies have in common with it: each ``GraphModule`` has one of its own."""
    own = original_class(module)
    return next(cls for cls in own.__mro__ if not cls.__qualname__.endswith(".GraphModuleImpl"))


def unplaced(module: nn.Module, *, wrapped: bool = False) -> nn.Module:
    """The module as its own class, with the attributes and weights that it has now.

    ``wrapped``: with the ``forward`` that it has been given since it was placed, which may call the placed
    one; else with the one that its graphs are of.
    """
    plain, attributes = object.__new__(original_class(module)), dict(module.__dict__)
    if attributes.pop("_graphplan", None) is not None:
        patched, given = attributes.pop(PATCHED, None), attributes.pop("forward", None)
        forward = given if wrapped and given is not None else patched
        attributes |= {} if forward is None else {"forward": forward}
    for name, value in attributes.items():
        is_method = isinstance(value, MethodType) and isinstance(value.__self__, nn.Module)
        plain.__dict__[name] = _plain_method(value, module, plain) if is_method else value
    stands_for(plain, module)
    return plain


def patched_forward(module: nn.Module) -> Callable[..., Any]:
    """The ``forward`` of a model; of a placed module, the one that its graphs are of."""
    found: Callable[..., Any] = module.forward
    if "_graphplan" in vars(module):
        found = vars(module).get(PATCHED) or getattr_static(original_class(module), "forward").__get__(module)
    return found


def _plain_method(method: MethodType, module: nn.Module, plain: nn.Module) -> MethodType:
    """A method of the module or a submodule, as its own class has it; of ``plain`` in place of ``module``."""
    owner, function = cast(nn.Module, method.__self__), method.__func__
    made, original = type(owner), original_class(owner)
    if made is not original:
        name = next((name for name in dir(made) if getattr(made, name, None) is function), "")
        function = getattr(original, name, function)
    return MethodType(function, plain if owner is module else owner)
