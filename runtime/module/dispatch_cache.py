"""A call of a form that was served before goes straight to its program.

Binding a call to the names of ``forward`` and flattening it by pytree takes longer than many a layer. A
route remembers one form: how many arguments by position, which names in which order, and for each argument
what it is made of. A call that has exactly this form takes the route, and its tensors are checked as for any
call; every other call is bound and flattened. For ``model(ids, mask=None)`` a route is::

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
from graphplan.capture.transformers.caches import COUNTERS, can_be_made, is_cache
from graphplan.runtime.module.result_structure import make

Match = Callable[[Any, list[Any]], bool]
"""Whether a value has the form; its tensors are appended to the list, in order."""


class _Unknown(Exception):  # noqa: N818  # not an error: it is caught where it matters
    """A value of which no route is made."""


@dataclass(frozen=True, slots=True)
class Same:
    """What a graph asks of a number that it has taken in."""

    number: Any

    def fits(self, leaf: Any) -> bool:
        """Whether it is that number."""
        return same_constant(leaf, self.number)


Check = TensorLeaf | CounterLeaf | FloatLeaf | Same


@dataclass(frozen=True, slots=True)
class Route:
    """One form of a call.

    Attributes:
        count: arguments by position.
        names: of the others, in the order in which they are given.
        matches: the form of each argument.
        checks: what each tensor, counter or number must be, in the order of the arguments.
        guards: further conditions, on all leaves.
        positions: for each leaf, the tensor that it is, or None for a constant.
        constants: the leaves that are no tensors.
        first: the tensor whose device is the caller's.
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
        """The leaves of a call of this form, whose tensors the program serves; None for any other call."""
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
    forward: inspect.Signature,
    signature: InputSignature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Route | None:
    """The route of a call that was bound and served; None where its form cannot be told so quickly.

    ``forward`` is the signature of the model's own, ``signature`` that of the program.
    """
    if signature.prepared is not None:
        return None  # it computes with the tensors
    if any(isinstance(p.default, torch.Tensor) for p in forward.parameters.values()):
        return None
    usual = _route_of(_FormReader(), forward, signature, args, kwargs)
    return usual or _route_of(_FormReader(numbers=True), forward, signature, args, kwargs)


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
    except _Unknown:
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
        return None  # a tensor that is dropped on the way
    constants = tuple(
        leaf if position is None else None for position, leaf in zip(positions, call.leaves, strict=True)
    )
    tensors = (p for p, leaf in zip(positions, signature.leaves, strict=True) if isinstance(leaf, TensorLeaf))
    first = next(tensors, None)  # in the order of forward's arguments, as :attr:`BoundCall.device`
    checked = (tuple(checks), signature.guards, tuple(positions))
    return Route(len(args), tuple(kwargs), tuple(matches), *checked, constants, first)


_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)


class _FormReader:
    """Reads the form of arguments, and puts marks in place of their tensors; of their numbers if asked."""

    def __init__(self, *, numbers: bool = False) -> None:
        self.marks: list[Any] = []
        self.numbers = numbers
        self.objects = False  # inside an object whose attributes are flattened with it

    def index_of(self, leaf: Any) -> int | None:
        """Which tensor of the call a leaf stands for; None for a constant."""
        return next((index for index, mark in enumerate(self.marks) if mark is leaf), None)

    def read(self, value: Any) -> tuple[Match, Any]:
        """The test for values of this value's form, and the value with marks in place of its tensors."""
        kind: Any = type(value)
        if isinstance(value, torch.Tensor):
            return _is_tensor, self._mark(torch.empty((0,) * value.dim()))
        if self.numbers and kind in (int, float):
            return _number(kind), self._mark(object())
        named = isinstance(value, Enum) or (self.objects and isinstance(value, type))
        if value is None or kind in _CONSTANTS or named:
            return _constant(value), value
        if isinstance(value, torch.Generator):
            return _is_generator, value
        if kind is list or kind is tuple:
            matches, marked = self.read_all(value)
            return _sequence(kind, matches), kind(marked)
        if kind is dict:
            matches, marked = self.read_all(value.values())
            return _mapping(tuple(value), matches), dict(zip(value, marked, strict=True))
        inner = self.objects and not isinstance(value, _SPECIAL)
        if not (inner or is_cache(value)) or not can_be_made(value):
            raise _Unknown  # the last: such as a deque in a cache, which is more than its attributes
        outside, self.objects = self.objects, True
        parts = [self._attribute(name, part) for name, part in vars(value).items()]
        self.objects = outside
        state = {name: mark for name, (_, mark) in zip(vars(value), parts, strict=True)}
        return _attributes(kind, tuple(state), [match for match, _ in parts]), make(kind, state)

    def read_all(self, values: Iterable[Any]) -> tuple[list[Match], list[Any]]:
        """As :meth:`read`, of several."""
        parts = [self.read(value) for value in values]
        return [match for match, _ in parts], [marked for _, marked in parts]

    def _attribute(self, name: str, value: Any) -> tuple[Match, Any]:
        counts = name in COUNTERS and type(value) is int and value > 1  # a counter is a leaf of its own
        return (_is_counter, self._mark(object())) if counts else self.read(value)

    def _mark(self, mark: Any) -> Any:
        self.marks.append(mark)
        return mark


# what has attributes and is more than those, or is called
_SPECIAL = (type, list, tuple, dict, set, frozenset, FunctionType, MethodType)


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
