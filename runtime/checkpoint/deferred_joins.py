"""Defer the joins of a conversion, so that each part is read directly into its place in the weight.

Conversions of checkpoints mostly stack experts and concatenate projections. They are run on meta tensors,
which reads nothing. Two experts that become one weight::

    stack([a, b])    read a -> weight[0]
                     read b -> weight[1]

A conversion that does more than to join and copy views of its sources must be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan._compat.torch import storage_of
from graphplan.runtime.checkpoint.mapped_files import MappedFile
from graphplan.runtime.checkpoint.parallel_reads import Progress, Read
from graphplan.runtime.checkpoint.safetensors_header import FileTensor

aten = torch.ops.aten

_Places = Callable[[torch.Tensor], Sequence[torch.Tensor]]


class DeferredJoins(TorchDispatchMode):
    """Context manager that records how a conversion joins tensors of files, without reading them.

    Args:
        sources: tensors of files; the meta tensors :attr:`tensors` stand for them.

    Attributes:
        computes: whether the conversion does more.
    """

    def __init__(self, sources: Sequence[FileTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.tensors = [torch.empty(source.shape, dtype=source.dtype, device="meta") for source in sources]
        self.computes = False
        self._sources = {storage_of(t): source for t, source in zip(self.tensors, sources, strict=True)}
        self._joined: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor], _Places]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on meta tensors, and record the tensors that it joins."""
        result = func(*args, **(kwargs or {}))
        if func in _JOINS:
            self._joined[id(result)] = result, *_JOINS[func](*args)
        else:
            read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            dtypes = {tensor.dtype for tensor in (*read, *pytree.tree_leaves(result))}
            of_joined = any(id(tensor) in self._joined for tensor in read)
            self.computes |= of_joined or not func.is_view or len(dtypes) > 1
        return result

    def reads(self, value: torch.Tensor, target: torch.Tensor, progress: Progress) -> Iterator[Read]:
        """Yield the reads that fill ``target`` with a value; copy parts whose elements are not adjacent."""
        if id(value) in self._joined:
            _, parts, places = self._joined[id(value)]
            for part, place in zip(parts, places(target), strict=True):
                yield from self.reads(part, place, progress)
            return
        source, offset = self._sources[storage_of(value)], int(value.storage_offset())
        if value.is_contiguous():
            start = source.start + offset * source.dtype.itemsize
            yield Read(replace(source, shape=tuple(value.shape), start=start), target)
        else:
            data = MappedFile(source.file).tensor(source)
            target.copy_(data.as_strided(value.shape, value.stride(), offset))
            progress(value.nbytes)


def _stacked(parts: Sequence[torch.Tensor], dim: int = 0) -> tuple[Sequence[torch.Tensor], _Places]:
    return parts, lambda target: target.unbind(dim)


def _concatenated(parts: Sequence[torch.Tensor], dim: int = 0) -> tuple[Sequence[torch.Tensor], _Places]:
    return parts, lambda target: target.split([part.shape[dim] for part in parts], dim)


def _copied(tensor: torch.Tensor) -> tuple[Sequence[torch.Tensor], _Places]:
    return (tensor,), lambda target: (target,)


_JOINS: dict[Any, Callable[..., tuple[Sequence[torch.Tensor], _Places]]] = {
    aten.stack.default: _stacked,
    aten.cat.default: _concatenated,
    aten.clone.default: _copied,
}
"""Join -> its parts, from its arguments, and how a tensor of its result's shape is cut into their places."""
