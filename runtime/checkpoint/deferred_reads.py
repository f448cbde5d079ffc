"""What is done to tensors of a checkpoint on the way to a weight, turned round: each is read into its part.

Conversions of checkpoints mostly move data: they stack experts, join projections, transpose. Run on meta
tensors they read nothing, and torch itself says which memory a view is of; only what is joined or copied is
written down. Two experts that become one weight::

    stack([a, b])    read a -> weight[0]
                     read b -> weight[1]

What is no such movement must be done with the data.
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
    """A tensor that was made of others.

    Attributes:
        tensor: as it was made; what has its memory is a view of it.
        parts: of which it was made.
        cut: from a tensor of its shape to one for each part.
    """

    tensor: torch.Tensor
    parts: Sequence[torch.Tensor]
    cut: Callable[[torch.Tensor], Sequence[torch.Tensor]]


class DeferredReads(TorchDispatchMode):
    """A block in which tensors of files are moved without being read.

    Args:
        sources: tensors of files; :attr:`tensors` stand for them.
    """

    def __init__(self, sources: Sequence[FileTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.tensors = [torch.empty(one.shape, dtype=one.dtype, device="meta") for one in sources]
        self._sources = {storage_of(tensor): one for tensor, one in zip(self.tensors, sources, strict=True)}
        self._joined: dict[int, _Joined] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on shapes, and write down what it joins."""
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            for written in (leaf for leaf in args if isinstance(leaf, torch.Tensor)):
                self._sources.pop(storage_of(written), None)
                self._joined.pop(storage_of(written), None)
        elif func in _CUTS:
            self._joined[storage_of(result)] = _Joined(result, *_CUTS[func](*args))
        return result

    def requests(self, made: torch.Tensor, target: torch.Tensor) -> list[Read] | None:
        """The reads that fill ``target`` with what the block has made; None where it must be computed."""
        order = _memory_order(made)
        source, joined = self._sources.get(storage_of(made)), self._joined.get(storage_of(made))
        whole = source if joined is None else joined.tensor
        if order is None or whole is None or made.dtype != whole.dtype:  # or its bytes as another dtype
            return None
        target = target.permute(order)
        if source is not None:  # of which it may be some rows
            start = source.start + int(made.storage_offset()) * source.dtype.itemsize
            return [Read(replace(source, shape=tuple(target.shape), start=start), target)]
        if joined is None or made.numel() != joined.tensor.numel():
            return None
        return self._parts(joined, target)

    def _parts(self, joined: _Joined, target: torch.Tensor) -> list[Read] | None:
        """As :meth:`requests`, of all of a joined tensor, in the order of its memory."""
        order = _memory_order(joined.tensor)
        assert order is not None, "what torch makes has no gaps"
        shape = [joined.tensor.shape[dim] for dim in order]
        if list(target.shape) != shape:
            if not target.is_contiguous():
                return None
            target = target.view(shape)
        back = [order.index(dim) for dim in range(len(order))]
        found: list[Read] = []
        for part, piece in zip(joined.parts, joined.cut(target.permute(back)), strict=True):
            reads = self.requests(part, piece)
            if reads is None:
                return None
            found += reads
        return found


def _memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The dimensions in the order of memory; None where elements have gaps between them."""
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
