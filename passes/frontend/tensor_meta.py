"""A tensor without data: shape, strides and dtype, and what a copy of it is.

Sizes that vary count at their bound: the plan is for the largest.
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
    dimensions when the other side requires a gradient, and does not when it does not.
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
        """What ``.to()`` another device makes of it: dense, its dimensions in the same order."""
        return TensorMeta(self.shape, _strides_of_copy(self.shape, self.stride), self.dtype)


@lru_cache(maxsize=4096)  # asked for each argument of each operation
def _strides_of_copy(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty_strided(shape, stride, device="meta").to("meta", copy=True).stride()


def is_tensor_meta(value: Any) -> bool:
    """Whether this is one, and so a leaf of the arguments and results that the interpreter carries."""
    return isinstance(value, TensorMeta)


def stand_in(leaf: Any, device: torch.device) -> Any:
    """What an operation on a device is given for a leaf of its arguments; tensors have no values yet."""
    if isinstance(leaf, TensorMeta):
        made = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=device)
        return made.requires_grad_() if leaf.requires_grad else made
    return device if isinstance(leaf, torch.device) else leaf


def _size(size: Any, sizes: Mapping[Any, int]) -> int:
    """A size as the plan counts it: a dynamic one at its bound, as one that the data decides."""
    bound = largest_size(size, sizes)
    if bound is not None:
        return bound
    warn(
        "a size that only the data decides has no upper bound: the plan counts it as 1, so real peaks may be "
        "higher than planned"
    )
    expression = size.node.expr.xreplace(sizes)
    return max(1, int(expression.subs(dict.fromkeys(expression.free_symbols, 1))))


def describe(val: Any, sizes: Mapping[Any, int] | None = None) -> Any:
    """A traced value as the interpreter carries it; ``sizes`` are those of its symbols."""
    sizes = sizes or {}
    if isinstance(val, torch.Tensor):
        shape = tuple(_size(size, sizes) for size in val.shape)
        if val.layout is not torch.strided:
            return TensorMeta(shape, contiguous_strides(shape), val.dtype)
        return TensorMeta(shape, tuple(_size(step, sizes) for step in val.stride()), val.dtype)
    if isinstance(val, list | tuple):
        return [describe(item, sizes) for item in val]
    if isinstance(val, torch.SymInt):
        return _size(val, sizes)
    if isinstance(val, torch.SymFloat | torch.SymBool):
        return val.node.hint if val.node.hint is not None else 1.0
    return val


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements between neighbours along each dimension, of a tensor in row-major order."""
    return torch.empty(shape, device="meta").stride()


def dtype_name(dtype: torch.dtype) -> str:
    """As in a graph: ``"float32"``."""
    return str(dtype).removeprefix("torch.")
