"""Arguments and results of a traced call, taken apart into what code can read of them and their tensors.

::

    (x, None, {"mask": m, "index": 3})       (0, None, {"mask": 1, "index": 3}) and [x, m]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from graphplan._compat.traced_tensors import node_of
from graphplan.capture.repeated.guarded_integer import GuardedInteger
from graphplan.capture.repeated.module_traits import UNCHANGING, UnlikeError, told

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a value.

    Attributes:
        kind: ``"tensor"``, ``"guarded"``, ``"symbolic"``, ``"constant"``, ``"shared"``, or ``"container"``.
        told: what must be equal of equal parts; the number of a tensor or of a guarded integer.
        parts: of a container.
        value: of what is taken as it is.
    """

    kind: str
    told: Any
    parts: tuple[_Part, ...] = ()
    value: Any = field(default=None, compare=False)

    def with_integers(self, integers: list[int]) -> _Part:
        """What can be read of it if guarded integers are these."""
        if self.kind == "guarded":
            value = integers[self.told]
            return _Part("constant", (int, value), value=value)
        return replace(self, parts=tuple(part.with_integers(integers) for part in self.parts))

    def rebuilt(self, tensors: list[torch.Tensor], integers: list[int]) -> Any:
        """It with other tensors, and other integers in the place of guarded ones."""
        if self.kind == "tensor":
            return tensors[self.told]
        if self.kind == "guarded":
            return integers[self.told]
        if self.kind != "container":
            return self.value
        values = [part.rebuilt(tensors, integers) for part in self.parts]
        if isinstance(self.told, tuple):
            kind, *keys = self.told
            return kind(zip(keys, values, strict=True))
        kind = self.told
        return kind(*values) if hasattr(kind, "_fields") else kind(values)


@dataclass(slots=True)
class TracedValue:
    """What code can read of a value, and the tensors in it.

    Attributes:
        part: equal for values that differ in tensors of equal descriptions.
        tensors: each once.
        nodes: that have made them.
    """

    part: _Part
    tensors: list[torch.Tensor]
    nodes: list[fx.Node]

    def description(self) -> tuple[Hashable, ...]:
        """Equal for values between which code cannot tell."""
        return (self.part, *map(describe, self.tensors))


def is_symbolic(value: Any) -> bool:
    """Whether a value is a size, or computed of sizes."""
    return isinstance(value, _SYMBOLIC)


def describe(value: Any) -> Any:
    """What code can read of a tensor without its values, or of other results of an operation."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise UnlikeError("a tensor is not strided")
        sizes = (*map(_size, value.shape), *map(_size, value.stride()), _size(value.storage_offset()))
        return isinstance(value, torch.nn.Parameter), value.dtype, value.device, value.requires_grad, sizes
    if isinstance(value, list | tuple):
        return type(value), *map(describe, value)
    return _size(value)


def _size(value: Any) -> Any:
    return value.node.expr if is_symbolic(value) else value


def take_apart(
    value: Any, tracer: Any, guarded: list[GuardedInteger], shared: tuple[type, ...]
) -> TracedValue:
    """Take a value apart; ``shared`` are classes of objects of which only the identity counts.

    Raises:
        UnlikeError: there is something in it of which nothing is known.
    """
    found = TracedValue(_Part("constant", None), [], [])
    places = {id(one): place for place, one in enumerate(guarded)}

    def part_of(value: Any) -> _Part:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return _Part("tensor", _number(value, found, tracer))
        if kind is GuardedInteger:
            return _Part("guarded", places[id(value)])
        if is_symbolic(value):
            return _Part("symbolic", (kind, value.node.expr), value=value)
        if isinstance(value, shared):
            return _Part("shared", id(value), value=value)
        if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return _Part("container", kind, tuple(map(part_of, value)))
        if kind in (dict, OrderedDict):
            return _Part("container", (kind, *value), tuple(map(part_of, value.values())))
        if isinstance(value, UNCHANGING):
            return _Part("constant", (kind, told(value)), value=value)
        raise UnlikeError(f"a {kind.__name__} is passed")

    found.part = part_of(value)
    return found


def _number(tensor: torch.Tensor, found: TracedValue, tracer: Any) -> int:
    node = node_of(tensor, tracer)
    if node is None or not isinstance(tensor, FakeTensor):
        raise UnlikeError("a tensor is passed that is a constant")
    if node not in found.nodes:
        found.nodes.append(node)
        found.tensors.append(tensor)
    return found.nodes.index(node)
