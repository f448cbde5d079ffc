"""Classes that are derived from a model's class and keep its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import getattr_static
from threading import Lock
from types import MethodType
from typing import Any, cast
from weakref import WeakValueDictionary

from torch import nn

from graphplan.capture.model.shared_attributes import PATCHED, register_placed

# weak, since the class of a parametrized module refers to the module
_classes: WeakValueDictionary[tuple[type, type], type[nn.Module]] = WeakValueDictionary()
_class_lock = Lock()


def derive_class(
    original: type[nn.Module], base: type, body: Callable[[], Mapping[str, Any]], *, in_place: bool = False
) -> type[nn.Module]:
    """Return the class that derives from ``base`` and a model's class, with the latter's name and docstring.

    Args:
        original: the model's class.
        base: the class that adds graphplan's behaviour.
        body: further attributes.
        in_place: whether the class is assigned to ``__class__`` of existing modules. The original is then the
            first base: Python allows the assignment with abstract base classes only so.
    """
    key = base, original
    derived = _classes.get(key)
    if derived is None:
        attributes = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        attributes |= {"_graphplan_original": original, **body()}
        if in_place:
            attributes |= {
                name: value
                for name, value in vars(base).items()
                if name not in attributes and callable(value)
            }
        with _class_lock, _without_init_subclass(original):
            derived = _classes[key] = type(
                original.__name__, (original, base) if in_place else key, attributes
            )
    return derived


@contextmanager
def _without_init_subclass(original: type) -> Iterator[None]:
    """Context manager that disables a class's ``__init_subclass__``, which may require arguments.

    The attribute itself is replaced: a further base that overrides it would change the layout of instances.
    """
    method = vars(original).get("__init_subclass__")
    type.__setattr__(original, "__init_subclass__", classmethod(lambda _: None))
    try:
        yield
    finally:
        if method is None:
            type.__delattr__(original, "__init_subclass__")
        else:
            type.__setattr__(original, "__init_subclass__", method)


def derived_class(original: type[nn.Module], base: type) -> type[nn.Module] | None:
    """Return the class that :func:`derive_class` derived; None if no module has it."""
    return _classes.get((base, original))


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before :func:`derive_class` derived another from it."""
    original: type[nn.Module] = getattr(type(module), "_graphplan_original", type(module))
    return original


def written_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module shares with its copies: torch generates one for each ``GraphModule``."""
    original = original_class(module)
    return next(cls for cls in original.__mro__ if not cls.__qualname__.endswith(".GraphModuleImpl"))


def unplaced(module: nn.Module, *, wrapped: bool = False) -> nn.Module:
    """Return the module as an object of its original class, with its present attributes and weights.

    If ``wrapped``, it has the ``forward`` that was assigned to it since it was placed, which may call the
    placed one; else the one that its graphs were traced from.
    """
    plain, attributes = object.__new__(original_class(module)), dict(module.__dict__)
    if attributes.pop("_graphplan", None) is not None:
        patched, assigned = attributes.pop(PATCHED, None), attributes.pop("forward", None)
        forward = assigned if wrapped and assigned is not None else patched
        attributes |= {} if forward is None else {"forward": forward}
    for name, value in attributes.items():
        is_method = isinstance(value, MethodType) and isinstance(value.__self__, nn.Module)
        plain.__dict__[name] = _unplaced_method(value, module, plain) if is_method else value
    register_placed(plain, module)
    return plain


def patched_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` of a model; of a placed module, the one that its graphs were traced from."""
    run: Callable[..., Any] = module.forward
    if "_graphplan" in vars(module):
        run = vars(module).get(PATCHED) or getattr_static(original_class(module), "forward").__get__(module)
    return run


def _unplaced_method(method: MethodType, module: nn.Module, plain: nn.Module) -> MethodType:
    """Return the method as the original class of its owner defines it, bound to ``plain`` for ``module``."""
    owner, function = cast(nn.Module, method.__self__), method.__func__
    derived, original = type(owner), original_class(owner)
    if derived is not original:
        name = next((name for name in dir(derived) if getattr(derived, name, None) is function), "")
        function = getattr(original, name, function)
    return MethodType(function, plain if owner is module else owner)
