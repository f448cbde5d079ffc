"""Invert a conversion of checkpoint tensors: read each source directly into its part of the weight.

Conversions of checkpoints mostly move data: they stack experts, concatenate projections, transpose. They are
run on meta tensors, which reads nothing. torch itself has the storage of a view; only joins and copies are
recorded. Two experts that become one weight::

    stack([a, b])    read a -> weight[0]
                     read b -> weight[1]

A conversion that does more than move data must be computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan._compat.torch import storage_of
from graphplan.runtime.checkpoint.parallel_reads import Read
from graphplan.runtime.checkpoint.safetensors_header import FileTensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Joined:
    """The result of an operation that joins or copies tensors.

    Attributes:
        tensor: the result; other tensors over its storage are views.
        parts: the tensors that were joined.
        cut: splits a tensor of the result's shape into one view for each part.
    """

    tensor: torch.Tensor
    parts: Sequence[torch.Tensor]
    cut: Callable[[torch.Tensor], Sequence[torch.Tensor]]


class DeferredReads(TorchDispatchMode):
    """Context manager that records how a conversion moves tensors of files, without reading them.

    Args:
        sources: tensors of files; the meta tensors :attr:`tensors` stand for them.
    """

    def __init__(self, sources: Sequence[FileTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.tensors = [torch.empty(source.shape, dtype=source.dtype, device="meta") for source in sources]
        self._sources = {
            storage_of(tensor): source for tensor, source in zip(self.tensors, sources, strict=True)
        }
        self._joined: dict[int, _Joined] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on meta tensors, and record the tensors that it joins."""
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            for written in (leaf for leaf in args if isinstance(leaf, torch.Tensor)):
                self._sources.pop(storage_of(written), None)
                self._joined.pop(storage_of(written), None)
        elif func in _CUTS:
            self._joined[storage_of(result)] = _Joined(result, *_CUTS[func](*args))
        return result

    def requests(self, result: torch.Tensor, target: torch.Tensor) -> list[Read] | None:
        """Return the reads that fill ``target`` with the result ``result``; None if it must be computed."""
        order = _memory_order(result)
        source, joined = self._sources.get(storage_of(result)), self._joined.get(storage_of(result))
        whole = source if joined is None else joined.tensor
        if order is None or whole is None or result.dtype != whole.dtype:  # ``view(dtype)`` changes the dtype
            return None
        target = target.permute(order)
        if source is not None:  # ``result`` may be some rows of it
            start = source.start + int(result.storage_offset()) * source.dtype.itemsize
            return [Read(replace(source, shape=tuple(target.shape), start=start), target)]
        if joined is None or result.numel() != joined.tensor.numel():
            return None
        return self._parts(joined, target)

    def _parts(self, joined: _Joined, target: torch.Tensor) -> list[Read] | None:
        """Return the reads of a whole joined tensor; the dimensions of ``target`` are in memory order."""
        order = _memory_order(joined.tensor)
        assert order is not None, "results of torch operations have no gaps"
        shape = [joined.tensor.shape[dim] for dim in order]
        if list(target.shape) != shape:
            if not target.is_contiguous():
                return None
            target = target.view(shape)
        inverse = [order.index(dim) for dim in range(len(order))]
        requests: list[Read] = []
        for part, piece in zip(joined.parts, joined.cut(target.permute(inverse)), strict=True):
            reads = self.requests(part, piece)
            if reads is None:
                return None
            requests += reads
        return requests


def _memory_order(tensor: torch.Tensor) -> list[int] | None:
    """Return the dimensions in memory order, outermost first; None if there are gaps between elements."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    sizes = [tensor.shape[dim] for dim in order]
    dense = all(
        size == 1 or strides[dim] == math.prod(sizes[index + 1 :])
        for index, (dim, size) in enumerate(zip(order, sizes, strict=True))
    )
    return order if dense else None


def _cut_stack(parts: Sequence[torch.Tensor], dim: int = 0) -> tuple[Any, Any]:
    return parts, lambda target: target.unbind(dim)


def _cut_cat(parts: Sequence[torch.Tensor], dim: int = 0) -> tuple[Any, Any]:
    return parts, lambda target: target.split([part.shape[dim] for part in parts], dim)


def _cut_copy(tensor: torch.Tensor) -> tuple[Any, Any]:
    return (tensor,), lambda target: (target,)


_CUTS: dict[Any, Callable[..., tuple[Any, Any]]] = {
    aten.stack.default: _cut_stack,
    aten.cat.default: _cut_cat,
    aten.clone.default: _cut_copy,
    aten._to_copy.default: _cut_copy,
}
