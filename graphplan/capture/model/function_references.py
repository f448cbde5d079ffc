"""What the functions that a model holds refer to: hooks, a ``forward`` of an instance, lambdas in attributes.

A hook that looks into a model keeps what it sees in a dict or an object, for the model itself or for others::

    features = {}
    model.layer.register_forward_hook(lambda module, args, output: features.update(layer=output))

A deep copy copies no function: those of a copied model would refer to the original. And a trace, which runs a
hook once, would leave tensors without values where it stores them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from graphplan.capture.changes.attribute_snapshots import Snapshot, snapshot

_CALLED = ("_forward_pre_hooks", "_forward_hooks")
_CONTAINERS = (dict, list, set, deque)
_NOT_LOOKED_INTO = (nn.Module, ModuleType, FunctionType, MethodType, type)

_KEPT = (
    "{} stores something outside of the model. It runs in the trace alone, and in no call of the placed "
    "model: to have it run in each, remove it before, and add it to the placed model, whose modules then run "
    "one by one"
)


def shared_with_hooks(model: nn.Module) -> dict[int, Any]:
    """For ``copy.deepcopy``: the global containers that hooks know, which a copy has in common with them."""
    globs = (value for _, hook in _hooks(model) for value in _globals(_function(hook)))
    return {id(value): value for value in globs if isinstance(value, _CONTAINERS)}


def refer_to_copies(made: nn.Module, copies: Mapping[int, Any]) -> None:
    """Have the hooks of a copy, and the functions in its attributes, close over ``copies``.

    Args:
        made: the copy.
        copies: of what the model's functions close over, by the id of the original.
    """
    known, seen = dict[int, Any](), set[int]()
    for part in made.modules():
        _refer_in(vars(part), copies, known, seen)


@contextmanager
def untouched_by_hooks(model: nn.Module) -> Iterator[list[str]]:
    """A block after which what hooks refer to is as it was, with a list for what is to be said of it then."""
    own = {id(value) for part in model.modules() for value in (part, *vars(part).values())}
    known = [(said, *each) for said, hook in _hooks(model) for each in _referred(hook)]
    kept: list[str] = []
    try:
        yield kept
    finally:
        for said, owner, before, cell in known:
            now = before.value if cell is None else _content(cell)
            if before.is_of(now):
                continue
            before.put_back()
            if cell is not None:
                cell.cell_contents = before.value
            if now is not before.value or id(owner) not in own:
                kept.append(_KEPT.format(said))


def _hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in model.named_modules():
        for table in _CALLED:
            for hook in vars(part)[table].values():
                name = getattr(_function(hook), "__qualname__", type(hook).__name__)
                yield f"The hook {name} of {path or 'the model'!r}", hook


def _function(hook: Any) -> Any:
    while isinstance(hook, functools.partial | MethodType):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return hook if isinstance(hook, FunctionType) else vars(type(hook)).get("__call__")


def _globals(function: Any) -> list[Any]:
    names = function.__code__.co_names if isinstance(function, FunctionType) else ()
    return [function.__globals__[name] for name in names if name in function.__globals__]


def _referred(hook: Any) -> Iterator[tuple[Any, Snapshot, CellType | None]]:
    """What a hook could write to, as it is now, with the cell that holds it."""
    function = _function(hook)
    found = [*_globals(function), *(_defaults(function) if isinstance(function, FunctionType) else ())]
    for cell in getattr(function, "__closure__", None) or ():
        found.append(_content(cell))
        yield found[-1], snapshot(found[-1]), cell
    while isinstance(hook, functools.partial):
        found += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    found.append(hook.__self__ if isinstance(hook, MethodType) else hook)
    for value in found:
        if isinstance(value, _CONTAINERS):
            yield value, snapshot(value), None
        elif hasattr(value, "__dict__") and not isinstance(value, _NOT_LOOKED_INTO):
            yield value, snapshot(vars(value)), None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _refer_in(
    table: dict[Any, Any] | list[Any], copies: Mapping[int, Any], known: dict[int, Any], seen: set[int]
) -> None:
    """``known``: the functions that were made, by the ids of the original ones; ``seen``: containers."""
    seen.add(id(table))
    for key, value in list(table.items() if isinstance(table, dict) else enumerate(table)):
        if isinstance(value, dict | list):
            if id(value) not in seen:
                _refer_in(value, copies, known, seen)
        elif isinstance(value, FunctionType | functools.partial) and _reaches(value, copies, set()):
            table[key] = _referring(value, copies, known)


def _reaches(value: Any, copies: Mapping[int, Any], seen: set[int]) -> bool:
    """Whether something closes over what has a copy."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, functools.partial):
        return _reaches(value.func, copies, seen)
    if isinstance(value, MethodType):  # that of a placed model, for which its plain one stands, stays its own
        return id(value.__self__) in copies
    if not isinstance(value, FunctionType):
        return copies.get(id(value), value) is not value
    closed = [_content(cell) for cell in value.__closure__ or ()]
    return any(_reaches(one, copies, seen) for one in (*closed, *_defaults(value)))


def _defaults(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _referring(value: Any, copies: Mapping[int, Any], known: dict[int, Any]) -> Any:
    if isinstance(value, functools.partial):
        return functools.partial(_referring(value.func, copies, known), *value.args, **value.keywords)
    if isinstance(value, MethodType):
        owner = value.__self__
        return MethodType(value.__func__, copies[id(owner)]) if id(owner) in copies else value
    if not isinstance(value, FunctionType) or not _reaches(value, copies, set()):
        return copies.get(id(value), value)
    if id(value) not in known:
        closed = value.__closure__ or ()
        cells = tuple(CellType() for _ in closed)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        known[id(value)] = made  # it may refer to itself
        made.__qualname__, made.__module__, made.__doc__ = value.__qualname__, value.__module__, value.__doc__
        vars(made).update(vars(value))
        made.__defaults__ = tuple(_referring(one, copies, known) for one in value.__defaults__ or ())
        named = value.__kwdefaults__ or {}
        made.__kwdefaults__ = {name: _referring(one, copies, known) for name, one in named.items()}
        for cell, own in zip(cells, closed, strict=True):
            cell.cell_contents = _referring(_content(own), copies, known)
    return known[id(value)]
