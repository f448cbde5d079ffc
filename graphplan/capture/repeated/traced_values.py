"""Arguments and results of a traced call, split into tensors and all else that code can read.

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
from graphplan.capture.repeated.module_traits import UNCHANGING, NotComparableError, comparison_key
from graphplan.capture.structure import flatten, unflatten

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A part of a value that has no inner parts.

    Attributes:
        kind: ``"tensor"``, ``"guarded"``, ``"symbolic"``, ``"constant"`` or ``"shared"``.
        key: compared with other leaves; for a tensor or a guarded integer its index.
        value: the value of any other kind.
    """

    kind: str
    key: Any
    value: Any = field(default=None, compare=False)


@dataclass(slots=True)
class TracedValue:
    """A value, split into its tensors and all else that code can read.

    Attributes:
        spec: the structure of the value.
        leaves: its leaves, equal for values that differ only in tensors.
        tensors: its tensors, each once.
        nodes: the nodes of the tensors.
        containers: its lists and dicts.
    """

    spec: pytree.TreeSpec
    leaves: list[_Leaf]
    tensors: list[torch.Tensor]
    nodes: list[fx.Node]
    containers: list[Any]

    def description(self) -> tuple[Any, ...]:
        """Return a key that is equal for values that code cannot distinguish."""
        return self.spec, self.leaves, *map(describe, self.tensors)

    def with_integers(self, integers: list[int]) -> tuple[Any, ...]:
        """Return a key without tensors, with these values of the guarded integers."""
        return self.spec, [_constant(integers[x.key]) if x.kind == "guarded" else x for x in self.leaves]

    def rebuild(self, tensors: list[torch.Tensor], integers: list[int]) -> Any:
        """Return the value with other tensors, and with integers in place of guarded ones."""
        numbered: dict[str, Any] = {"tensor": tensors, "guarded": integers}
        return unflatten(
            [numbered[x.kind][x.key] if x.kind in numbered else x.value for x in self.leaves], self.spec
        )


def is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic number, such as a size."""
    return isinstance(value, _SYMBOLIC)


def describe(value: Any) -> Any:
    """Return a key of an operation's result: all that code can read except the values of tensors."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise NotComparableError("a tensor is not strided")
        sizes = (*map(_size, value.shape), *map(_size, value.stride()), _size(value.storage_offset()))
        return isinstance(value, torch.nn.Parameter), value.dtype, value.device, value.requires_grad, sizes
    if isinstance(value, list | tuple):
        return type(value), *map(describe, value)
    return _size(value)


def _size(value: Any) -> Any:
    return value.node.expr if is_symbolic(value) else value


def split_traced(
    value: Any, tracer: Any, guarded: list[GuardedInteger], shared: tuple[type, ...]
) -> TracedValue:
    """Split a value; objects of the classes in ``shared`` are compared by identity."""
    containers: list[Any] = []

    def is_leaf(part: Any) -> bool:
        if isinstance(part, list | dict):
            containers.append(part)
        return not _is_container(part)

    parts, spec = flatten(value, is_leaf)
    result = TracedValue(spec, [], [], [], containers)
    indices = {id(one): index for index, one in enumerate(guarded)}
    for part in parts:
        if isinstance(part, torch.Tensor):
            leaf = _Leaf("tensor", _number(part, result, tracer))
        elif type(part) is GuardedInteger:
            leaf = _Leaf("guarded", indices[id(part)])
        elif is_symbolic(part):
            leaf = _Leaf("symbolic", (type(part), part.node.expr), part)
        elif isinstance(part, shared):
            leaf = _Leaf("shared", id(part), part)
        elif isinstance(part, UNCHANGING):
            leaf = _constant(part)
        else:
            raise NotComparableError(f"a {type(part).__name__} is among the arguments or results")
        result.leaves.append(leaf)
    return result


def _is_container(value: Any) -> bool:
    return type(value) in (list, tuple, dict, OrderedDict) or pytree.is_namedtuple_instance(value)


def _constant(value: Any) -> _Leaf:
    return _Leaf("constant", (type(value), comparison_key(value)), value)


def _number(tensor: torch.Tensor, result: TracedValue, tracer: Any) -> int:
    node = node_of(tensor, tracer)
    if node is None or not isinstance(tensor, FakeTensor):
        raise NotComparableError("a constant tensor is among the arguments or results")
    if node not in result.nodes:
        result.nodes.append(node)
        result.tensors.append(tensor)
    return result.nodes.index(node)
