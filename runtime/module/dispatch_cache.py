"""Routes: a call of a known form is passed directly to its program.

Binding a call to the names of ``forward`` and flattening it by pytree takes longer than many a layer. A route
records one form: the number of positional arguments, the keywords in their order, and the structure of each
argument. A call of exactly this form takes the route; its tensors are checked as for any call. Other calls
are bound and flattened. For ``model(ids, mask=None)`` a route is::

    (tensor,) {mask: None}   ->   inputs of the code: tensor 0
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch

from graphplan.capture.signature import (
    CounterLeaf,
    FloatLeaf,
    Guard,
    InputSignature,
    TensorLeaf,
    bind_call,
    same_constant,
)
from graphplan.capture.transformers.caches import COUNTERS, can_be_rebuilt, is_cache
from graphplan.runtime.module.result_structure import make

Match = Callable[[Any, list[Any]], bool]
"""Whether a value has the form; its tensors are appended to the list, in order."""


class _NoRoute(Exception):  # noqa: N818  # no error: callers catch it
    """Raised for a value that no route can contain."""


@dataclass(frozen=True, slots=True)
class Same:
    """A check of a number that is a constant of the graph."""

    number: Any

    def fits(self, leaf: Any) -> bool:
        """Whether the leaf is that number."""
        return same_constant(leaf, self.number)


Check = TensorLeaf | CounterLeaf | FloatLeaf | Same


@dataclass(frozen=True, slots=True)
class Route:
    """One form of a call.

    Attributes:
        count: number of positional arguments.
        names: the keywords, in the order in which they are given.
        matches: test of the form of each argument.
        checks: condition for each tensor, counter or number, in the order of the arguments.
        guards: further conditions, on all leaves.
        positions: for each leaf, the index of its tensor, or None for a constant.
        constants: the leaves that are not tensors; None for tensors.
        first: index of the tensor whose device is the caller's.
    """

    count: int
    names: tuple[str, ...]
    matches: tuple[Match, ...]
    checks: tuple[Check | None, ...]
    guards: tuple[Guard, ...]
    positions: tuple[int | None, ...]
    constants: tuple[Any, ...]
    first: int | None

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any], host: torch.device) -> list[Any] | None:
        """Return the leaves of a call of this form that the program serves; None for any other call."""
        if len(args) != self.count or tuple(kwargs) != self.names:
            return None
        tensors: list[Any] = []
        values = (*args, *kwargs.values()) if kwargs else args
        for match, value in zip(self.matches, values, strict=True):
            if not match(value, tensors):
                return None
        for check, tensor in zip(self.checks, tensors, strict=True):
            if check is not None and not check.fits(tensor):
                return None
        if self.guards:
            checked = [None if position is None else tensors[position] for position in self.positions]
            if not all(guard.holds(checked) for guard in self.guards):
                return None
        if self.first is not None and tensors[self.first].device != host:
            return None
        return [
            constant if index is None else tensors[index]
            for index, constant in zip(self.positions, self.constants, strict=True)
        ]


def find_route(
    forward: inspect.Signature, signature: InputSignature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Route | None:
    """Return the route of a call that was bound and served; None if no route can test its form.

    ``forward`` is the signature of the model's own ``forward``, ``signature`` that of the program.
    """
    if signature.prepared is not None:
        return None  # the inputs are computed from the arguments
    if any(isinstance(p.default, torch.Tensor) for p in forward.parameters.values()):
        return None
    route = _route_of(_FormReader(), forward, signature, args, kwargs)
    return route or _route_of(_FormReader(numbers=True), forward, signature, args, kwargs)


def _route_of(
    form: _FormReader,
    forward: inspect.Signature,
    signature: InputSignature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Route | None:
    values = (*args, *kwargs.values())
    try:
        matches, marked = form.read_all(values)
    except _NoRoute:
        return None
    call = bind_call(forward, marked[: len(args)], dict(zip(kwargs, marked[len(args) :], strict=True)))
    if call.spec != signature.spec:
        return None
    checks: list[Check | None] = [None] * len(form.marks)
    positions = [form.index_of(leaf) for leaf in call.leaves]
    for position, leaf in zip(positions, signature.leaves, strict=True):
        varies = isinstance(leaf, TensorLeaf | CounterLeaf | FloatLeaf)
        if position is None and varies:
            return None
        if position is not None:
            checks[position] = leaf if varies else Same(leaf)
    if None in checks:
        return None  # a tensor of the arguments is not a leaf of the bound call
    constants = tuple(
        leaf if position is None else None for position, leaf in zip(positions, call.leaves, strict=True)
    )
    tensors = (p for p, leaf in zip(positions, signature.leaves, strict=True) if isinstance(leaf, TensorLeaf))
    first = next(tensors, None)  # in the order of forward's arguments, as :attr:`BoundCall.device`
    checked = (tuple(checks), signature.guards, tuple(positions))
    return Route(len(args), tuple(kwargs), tuple(matches), *checked, constants=constants, first=first)


_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)


class _FormReader:
    """Reads the form of arguments, and replaces their tensors by marks; also numbers, if ``numbers``."""

    def __init__(self, *, numbers: bool = False) -> None:
        self.marks: list[Any] = []
        self.numbers = numbers
        self.objects = False  # whether the reader is inside an object that is read by its attributes

    def index_of(self, leaf: Any) -> int | None:
        """Return the index of the mark that a leaf is; None for a constant."""
        return next((index for index, mark in enumerate(self.marks) if mark is leaf), None)

    def read(self, value: Any) -> tuple[Match, Any]:
        """Return the test for values of this form, and the value with marks in place of its tensors."""
        kind: Any = type(value)
        if isinstance(value, torch.Tensor):
            return _is_tensor, self._mark(torch.empty((0,) * value.dim()))
        if self.numbers and kind in (int, float):
            return _number(kind), self._mark(object())
        by_name = isinstance(value, Enum) or (self.objects and isinstance(value, type))
        if value is None or kind in _CONSTANTS or by_name:
            return _constant(value), value
        if isinstance(value, torch.Generator):
            return _is_generator, value
        if kind is list or kind is tuple:
            matches, marked = self.read_all(value)
            return _sequence(kind, matches), kind(marked)
        if kind is dict:
            matches, marked = self.read_all(value.values())
            return _mapping(tuple(value), matches), dict(zip(value, marked, strict=True))
        inner = self.objects and not isinstance(value, _NOT_ATTRIBUTES_ALONE)
        if not (inner or is_cache(value)) or not can_be_rebuilt(value):
            raise _NoRoute  # such as a deque in a cache, which is more than its attributes
        outside, self.objects = self.objects, True
        parts = [self._attribute(name, part) for name, part in vars(value).items()]
        self.objects = outside
        state = {name: mark for name, (_, mark) in zip(vars(value), parts, strict=True)}
        return _attributes(kind, tuple(state), [match for match, _ in parts]), make(kind, state)

    def read_all(self, values: Iterable[Any]) -> tuple[list[Match], list[Any]]:
        """Return the tests and the marked values of several values, as :meth:`read` does of one."""
        parts = [self.read(value) for value in values]
        return [match for match, _ in parts], [marked for _, marked in parts]

    def _attribute(self, name: str, value: Any) -> tuple[Match, Any]:
        counts = name in COUNTERS and type(value) is int and value > 1  # a counter is a leaf of its own
        return (_is_counter, self._mark(object())) if counts else self.read(value)

    def _mark(self, mark: Any) -> Any:
        self.marks.append(mark)
        return mark


# objects that are more than their attributes, or are called
_NOT_ATTRIBUTES_ALONE = (type, list, tuple, dict, set, frozenset, FunctionType, MethodType)


def _attributes(cls: type, names: tuple[str, ...], parts: Sequence[Match]) -> Match:
    def match(value: Any, tensors: list[Any]) -> bool:
        if type(value) is not cls:
            return False
        state = value.__dict__
        if tuple(state) != names:
            return False
        return all(part(item, tensors) for part, item in zip(parts, state.values(), strict=True))

    return match


def _is_counter(value: Any, tensors: list[Any]) -> bool:
    tensors.append(value)
    return type(value) is int and value > 1


def _number(kind: type) -> Match:
    def match(value: Any, tensors: list[Any]) -> bool:
        tensors.append(value)
        return type(value) is kind

    return match


def _is_tensor(value: Any, tensors: list[Any]) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    tensors.append(value)
    return True


def _is_generator(value: Any, _tensors: list[Any]) -> bool:
    return isinstance(value, torch.Generator)  # no graph reads it


def _constant(known: Any) -> Match:
    def match(value: Any, _tensors: list[Any]) -> bool:
        return value is known or same_constant(value, known)

    return match


def _sequence(kind: Any, parts: Sequence[Match]) -> Match:
    def match(value: Any, tensors: list[Any]) -> bool:
        if type(value) is not kind or len(value) != len(parts):
            return False
        return all(part(item, tensors) for part, item in zip(parts, value, strict=True))

    return match


def _mapping(keys: tuple[Any, ...], parts: Sequence[Match]) -> Match:
    kinds = tuple(map(type, keys))

    def match(value: Any, tensors: list[Any]) -> bool:
        if type(value) is not dict or tuple(value) != keys or tuple(map(type, value)) != kinds:
            return False
        return all(part(item, tensors) for part, item in zip(parts, value.values(), strict=True))

    return match
