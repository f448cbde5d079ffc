"""Arguments and results of a traced call, taken apart into what code can read of them and their tensors.

::

    (x, None, {"mask": m, "index": 3})       (*, *, {"mask": *, "index": *}), [0, None, 1, 3] and [x, m]
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from graphplan._compat.traced_tensors import node_of
from graphplan.capture.repeated.guarded_integer import GuardedInteger
from graphplan.capture.repeated.module_traits import UNCHANGING, UnlikeError, told
from graphplan.capture.structure import flatten, unflatten

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A part of a value that holds no others.

    Attributes:
        kind: ``"tensor"``, ``"guarded"``, ``"symbolic"``, ``"constant"`` or ``"shared"``.
        told: what must be equal of equal leaves; the number of a tensor or of a guarded integer.
        value: of what is taken as it is.
    """

    kind: str
    told: Any
    value: Any = field(default=None, compare=False)


@dataclass(slots=True)
class TracedValue:
    """What code can read of a value, and the tensors in it.

    Attributes:
        spec: its structure.
        leaves: equal for values that differ in tensors of equal descriptions.
        tensors: each once.
        nodes: that have made them.
        containers: its lists and dicts.
    """

    spec: pytree.TreeSpec
    leaves: list[_Leaf]
    tensors: list[torch.Tensor]
    nodes: list[fx.Node]
    containers: list[Any]

    def description(self) -> tuple[Any, ...]:
        """Equal for values between which code cannot tell."""
        return self.spec, self.leaves, *map(describe, self.tensors)

    def with_integers(self, integers: list[int]) -> tuple[Any, ...]:
        """What can be read of it, but for tensors, if guarded integers are these."""
        return self.spec, [_constant(integers[x.told]) if x.kind == "guarded" else x for x in self.leaves]

    def rebuilt(self, tensors: list[torch.Tensor], integers: list[int]) -> Any:
        """It with other tensors, and other integers in the place of guarded ones."""
        numbered: dict[str, Any] = {"tensor": tensors, "guarded": integers}
        return unflatten(
            [numbered[x.kind][x.told] if x.kind in numbered else x.value for x in self.leaves], self.spec
        )


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
    """Take a value apart; ``shared`` are classes of objects of which only the identity counts."""
    containers: list[Any] = []

    def is_leaf(part: Any) -> bool:
        if isinstance(part, list | dict):
            containers.append(part)
        return not _is_container(part)

    parts, spec = flatten(value, is_leaf)
    found = TracedValue(spec, [], [], [], containers)
    places = {id(one): place for place, one in enumerate(guarded)}
    for part in parts:
        if isinstance(part, torch.Tensor):
            leaf = _Leaf("tensor", _number(part, found, tracer))
        elif type(part) is GuardedInteger:
            leaf = _Leaf("guarded", places[id(part)])
        elif is_symbolic(part):
            leaf = _Leaf("symbolic", (type(part), part.node.expr), part)
        elif isinstance(part, shared):
            leaf = _Leaf("shared", id(part), part)
        elif isinstance(part, UNCHANGING):
            leaf = _constant(part)
        else:
            raise UnlikeError(f"a {type(part).__name__} is passed")
        found.leaves.append(leaf)
    return found


def _is_container(value: Any) -> bool:
    return type(value) in (list, tuple, dict, OrderedDict) or pytree.is_namedtuple_instance(value)


def _constant(value: Any) -> _Leaf:
    return _Leaf("constant", (type(value), told(value)), value)


def _number(tensor: torch.Tensor, found: TracedValue, tracer: Any) -> int:
    node = node_of(tensor, tracer)
    if node is None or not isinstance(tensor, FakeTensor):
        raise UnlikeError("a tensor is passed that is a constant")
    if node not in found.nodes:
        found.nodes.append(node)
        found.tensors.append(tensor)
    return found.nodes.index(node)
