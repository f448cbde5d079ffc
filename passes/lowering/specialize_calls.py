"""Speed up dispatch: call torch's Python-bound builtins in place of ATen overloads.

``torch.ops.aten`` looks an overload up, boxes its arguments and walks its schema at each call: about one
microsecond more than the builtin that eager code calls, which does the same. Before and after::

    mul = torch.ops.aten.mul.Tensor(x, w)                    mul = torch.mul(x, w)
    view = torch.ops.aten.view.default(mul, [1, -1, 16])     view = mul.view(1, -1, 16)
    part = torch.ops.aten.slice.Tensor(view, 2, 0, 8)        part = view.narrow(2, 0, 8)

Only overloads whose builtin is known to take the same arguments at the same positions are replaced, and only
calls whose arguments have the expected types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_DEFAULT = """
abs addmm argmax baddbmm batch_norm bitwise_not bmm cat ceil chunk clamp clone conv1d conv2d cos
cumsum dropout embedding erf exp floor gather group_norm index_select layer_norm log logical_and
logical_not logical_or matmul max_pool2d maximum minimum mm neg reciprocal relu rms_norm rsqrt
sigmoid sin split_with_sizes sqrt square stack tanh tril triu unsqueeze
"""
_NN = """
adaptive_avg_pool2d avg_pool2d elu gelu hardswish hardtanh leaky_relu linear scaled_dot_product_attention silu
softplus
"""
_TENSOR = "add sub mul div le lt ge gt eq ne bitwise_and bitwise_or"

BUILTINS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    **{getattr(aten, name).default: getattr(torch, name) for name in _DEFAULT.split()},
    **{getattr(aten, name).default: getattr(torch._C._nn, name) for name in _NN.split()},
    **{getattr(aten, name).Tensor: getattr(torch, name) for name in _TENSOR.split()},
    **{getattr(aten, name).Scalar: getattr(torch, name) for name in ("le", "lt", "ge", "gt", "eq", "ne")},
    aten.flatten.using_ints: torch.flatten,
    aten.log_softmax.int: torch.log_softmax,
    aten.masked_fill.Scalar: torch.masked_fill,
    aten.masked_fill.Tensor: torch.masked_fill,
    aten.mean.dim: torch.mean,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.pow.Tensor_Tensor: torch.pow,
    aten.select.int: torch.select,
    aten.softmax.int: torch.softmax,
    aten.squeeze.dim: torch.squeeze,
    aten.sum.dim_IntList: torch.sum,
    aten.transpose.int: torch.transpose,
    aten.unbind.int: torch.unbind,
    aten.where.self: torch.where,
}
"""Overload -> the builtin that takes its arguments in the same order and under the same names."""

_COMPARISONS = {getattr(aten, name).Tensor for name in ("le", "lt", "ge", "gt", "eq", "ne")}

METHODS: dict[torch._ops.OpOverload, str] = {
    aten.view.default: "view",
    aten.reshape.default: "reshape",
    aten.expand.default: "expand",
    aten.permute.default: "permute",
}
"""Overload with a list of sizes or dimensions -> the method that takes them as arguments."""

_SAME_METHODS: dict[torch._ops.OpOverload, tuple[str, int]] = {
    aten.add_.Tensor: ("add_", 2),
    aten.mul_.Tensor: ("mul_", 2),
    aten.copy_.default: ("copy_", 2),
    aten.to.dtype: ("to", 2),
    aten.contiguous.default: ("contiguous", 1),
}
"""Overload -> the method that takes the same arguments, and the number of these that is required."""

_INT_MAX = (1 << 63) - 1


def specialize_calls(graph: fx.Graph) -> None:
    """Replace overloads of a lowered graph by faster calls, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _rewrite(node)
    graph.lint()


def _rewrite(node: fx.Node) -> None:
    target: Any = node.target
    if not _has_tensor_first(node):
        return
    if target in BUILTINS:
        if _plain_arguments(node):
            node.target = BUILTINS[target]
    elif target in METHODS:
        sizes = node.args[1] if len(node.args) == 2 and not node.kwargs else None
        if isinstance(sizes, list | tuple) and sizes:
            _to_method(node, METHODS[target], (node.args[0], *sizes))
    elif target in _SAME_METHODS:
        method, count = _SAME_METHODS[target]
        if len(node.args) == count and not node.kwargs:
            _to_method(node, method, node.args)
    elif target is aten.slice.Tensor:
        _narrow(node)


def _has_tensor_first(node: fx.Node) -> bool:
    """Whether the first argument is a node, or a list of nodes, none of them known to be a number."""
    first = node.args[0] if node.args else None
    nodes = first if isinstance(first, list | tuple) else [first]
    return bool(nodes) and all(isinstance(n, fx.Node) and _may_be_tensor(n) for n in nodes)


def _may_be_tensor(node: fx.Node) -> bool:
    return not isinstance(
        node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool
    )


def _plain_arguments(node: fx.Node) -> bool:
    """Whether the arguments fit the schema as a builtin reads it: None only where it is optional."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    positional = [a for a in schema if not a.kwarg_only]
    if len(node.args) > len(positional):
        return False
    names = {a.name for a in schema if a.kwarg_only}
    if not set(node.kwargs) <= names:
        return False  # a builtin may have another name for a positional argument
    if node.target in _COMPARISONS and not isinstance(node.args[1], fx.Node):
        return False  # with a number the builtin would call the Scalar overload
    return all(_fits(a.type, value) for a, value in zip(positional, node.args, strict=False))


def _fits(type_: Any, value: Any) -> bool:
    if value is None:
        return isinstance(type_, torch._C.OptionalType)
    if isinstance(type_, torch._C.OptionalType):
        return _fits(type_.getElementType(), value)
    if isinstance(value, list | tuple):
        return isinstance(type_, torch._C.ListType) and all(_fits(type_.getElementType(), v) for v in value)
    return not isinstance(type_, torch._C.ListType)


def _to_method(node: fx.Node, name: str, arguments: Sequence[Any]) -> None:
    node.op, node.target, node.args = "call_method", name, tuple(arguments)


def _narrow(node: fx.Node) -> None:
    """Replace a slice of step one whose bounds lie inside a static size by ``narrow``."""
    source = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
    if node.kwargs or not isinstance(source, torch.Tensor):
        return
    arguments: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, end, step = arguments
    size = source.shape[dim] if type(dim) is int else None
    if type(size) is not int or step != 1:
        return
    start, end = 0 if start is None else start, size if end in (None, _INT_MAX) else end
    if type(start) is int and type(end) is int and 0 <= start <= end <= size:
        _to_method(node, "narrow", (node.args[0], dim, start, end - start))
