"""Tensors without data: shape, strides and dtype, and the layout of a copy.

Dynamic sizes count at their upper bound: the plan is for the largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from graphplan.capture.sizes.dynamic_sizes import largest_size
from graphplan.warnings import warn


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor as the interpreter carries it.

    ``requires_grad`` matters even without autograd: ``matmul`` copies a strided input to fold its
    dimensions only if the other side requires a gradient.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def copy_bytes(self) -> int:
        """Bytes of a dense copy."""
        return math.prod(self.shape) * self.dtype.itemsize

    def copied(self) -> TensorMeta:
        """Return the result of ``.to()`` another device: dense, dimensions in the same order."""
        return TensorMeta(self.shape, _strides_of_copy(self.shape, self.stride), self.dtype)


@lru_cache(maxsize=4096)  # called for each argument of each operation
def _strides_of_copy(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty_strided(shape, stride, device="meta").to("meta", copy=True).stride()


def is_tensor_meta(value: Any) -> bool:
    """Whether a value is a :class:`TensorMeta`, which is a leaf of arguments and results."""
    return isinstance(value, TensorMeta)


def stand_in(leaf: Any, device: torch.device) -> Any:
    """Return a leaf of an operation's arguments on a device; a tensor gets memory without values."""
    if isinstance(leaf, TensorMeta):
        tensor = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=device)
        return tensor.requires_grad_() if leaf.requires_grad else tensor
    return device if isinstance(leaf, torch.device) else leaf


def _size(size: Any, sizes: Mapping[Any, int], *, of_tensor: bool = True) -> int:
    """Return a size as the plan counts it: at its upper bound if it is dynamic or depends on data.

    Numbers that are not sizes of tensors take no memory.
    """
    bound = largest_size(size, sizes)
    if bound is not None:
        return bound
    if of_tensor:
        warn(
            "a data-dependent size has no upper bound: the plan counts it as 1, so real peaks may be higher "
            "than planned"
        )
    expression = size.node.expr.xreplace(sizes)
    return max(1, int(expression.subs(dict.fromkeys(expression.free_symbols, 1))))


def describe(val: Any, sizes: Mapping[Any, int] | None = None) -> Any:
    """Return a traced value as the interpreter carries it; ``sizes`` maps symbols to sizes."""
    sizes = sizes or {}
    if isinstance(val, torch.Tensor):
        shape = tuple(_size(size, sizes) for size in val.shape)
        if val.layout is not torch.strided:
            return TensorMeta(shape, torch.empty(shape, device="meta").stride(), val.dtype)
        return TensorMeta(shape, tuple(_size(step, sizes) for step in val.stride()), val.dtype)
    if isinstance(val, list | tuple):
        return [describe(item, sizes) for item in val]
    if isinstance(val, torch.SymInt):
        return _size(val, sizes, of_tensor=False)
    if isinstance(val, torch.SymFloat | torch.SymBool):
        return val.node.hint if val.node.hint is not None else 1.0
    return val


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a graph: ``"float32"``."""
    return str(dtype).removeprefix("torch.")
