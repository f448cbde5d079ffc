"""Tensors of a checkpoint that are not read yet, and what was done to them on the way to a weight.

Conversions of checkpoints mostly move data: they stack experts, join projections, transpose. Run on deferred
tensors they read nothing and leave a recipe, which is then turned round: each file's tensor is read straight
into its part of the weight. Two experts that become one weight::

    stack([a, b])    read a -> weight[0]
                     read b -> weight[1]

What is no such movement has a shape and no recipe, and must be done with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphplan.runtime.checkpoint.parallel_reads import Request
from graphplan.runtime.checkpoint.safetensors_header import FileTensor

__all__ = ["Deferred", "requests_of"]

aten = torch.ops.aten

Fill = Callable[[torch.Tensor], list[Request] | None]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a deferred tensor comes to be.

    Attributes:
        fill: from a tensor that is to hold it to the reads that fill it; None where there are none.
        source: the tensor of a file that it is, so that rows of it are one too.
    """

    fill: Fill
    source: FileTensor | None = None


_OPAQUE = _Recipe(lambda _: None)


class Deferred(torch.Tensor):
    """A tensor with a shape, a dtype and a recipe, and no data."""

    recipe: _Recipe

    @staticmethod
    def __new__(cls, like: torch.Tensor, recipe: _Recipe) -> Deferred:
        """A tensor of the shape and dtype of ``like``."""
        made: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=torch.device("meta")
        )
        made.recipe = recipe
        return made

    @classmethod
    def of(cls, source: FileTensor) -> Deferred:
        """A tensor of a file."""
        return cls(torch.empty(source.shape, dtype=source.dtype, device="meta"), _read(source))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the disabled implementation
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on shapes, and write down what it moves."""
        result = func(*pytree.tree_map(_shape_of, args), **pytree.tree_map(_shape_of, kwargs or {}))
        known = _RECIPES.get(func)
        recipes = None if known is None else known(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            return cls(result, _OPAQUE if recipes is None else recipes)
        if isinstance(result, list | tuple):
            made = [_OPAQUE] * len(result) if recipes is None else recipes
            return [cls(one, recipe) for one, recipe in zip(result, made, strict=True)]
        return result


def requests_of(tensor: Any, target: torch.Tensor) -> list[Request] | None:
    """The reads that fill ``target`` with a deferred tensor; None where it must be computed."""
    return tensor.recipe.fill(target) if isinstance(tensor, Deferred) else None


def _shape_of(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Deferred) else leaf


def _read(source: FileTensor) -> _Recipe:
    return _Recipe(lambda target: [Request(source, target)], source)


def _same(x: Any, *_: Any, **__: Any) -> _Recipe | None:
    return x.recipe if isinstance(x, Deferred) else None


def _joined(parts: Sequence[Any], targets: Sequence[torch.Tensor]) -> list[Request] | None:
    found: list[Request] = []
    for part, target in zip(parts, targets, strict=True):
        reads = requests_of(part, target)
        if reads is None:
            return None
        found += reads
    return found


def _stack(parts: Sequence[Any], dim: int = 0) -> _Recipe:
    return _Recipe(lambda target: _joined(parts, target.unbind(dim)))


def _cat(parts: Sequence[Any], dim: int = 0) -> _Recipe:
    sizes = [part.shape[dim] for part in parts]
    return _Recipe(lambda target: _joined(parts, target.split(sizes, dim)))


def _transpose(x: Any, a: int = 0, b: int = 1) -> _Recipe:
    return _Recipe(lambda target: requests_of(x, target.transpose(a, b)))


def _t(x: Any) -> _Recipe:
    return _transpose(x) if x.dim() == 2 else x.recipe


def _permute(x: Any, dims: Sequence[int]) -> _Recipe:
    order = [dim % x.dim() for dim in dims]
    back = [order.index(dim) for dim in range(len(order))]
    return _Recipe(lambda target: requests_of(x, target.permute(back)))


def _view(x: Any, *_: Any) -> _Recipe:
    def fill(target: torch.Tensor) -> list[Request] | None:
        return requests_of(x, target.view(x.shape)) if target.is_contiguous() else None

    return _Recipe(fill)


def _rows(x: Any, start: int, stop: int) -> _Recipe:
    """Rows of a file's tensor are a tensor of the file."""
    source = x.recipe.source
    if source is None or not source.shape[0]:
        return _OPAQUE
    row = source.nbytes // source.shape[0]
    shape = (stop - start, *source.shape[1:])
    return _read(replace(source, shape=shape, start=source.start + start * row, nbytes=(stop - start) * row))


def _split(x: Any, size: int | Sequence[int], dim: int = 0) -> list[_Recipe] | None:
    if dim % x.dim():
        return None
    total = x.shape[0]
    sizes = [min(size, total - at) for at in range(0, total, size)] if isinstance(size, int) else list(size)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_rows(x, start, start + count) for start, count in zip(starts, sizes, strict=True)]


def _slice(
    x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> _Recipe | None:
    if dim % x.dim() or step != 1:
        return None
    first, last, _ = slice(start, end).indices(x.shape[0])
    return _rows(x, first, last)


_RECIPES: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _same,
    aten.stack.default: _stack,
    aten.cat.default: _cat,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.permute.default: _permute,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.squeeze.dim: _view,
    aten.unsqueeze.default: _view,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
}
