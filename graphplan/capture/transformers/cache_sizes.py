"""Which axes of a cache may vary, and which of them count the same.

A trace has a symbol for each axis of each tensor, and learns that two are one number where code computes with
both, in the blocks: after their arguments, such as the mask, were made of the first. Said at the start, all
blocks are given the same, so that one can stand for the others::

    layers[0].keys (s1, 8, s2, 64), layers[1].keys (s3, 8, s4, 64)    becomes    (s1, 8, s2, 64) of both
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from graphplan.capture.signature import BoundCall
from graphplan.capture.sizes.dynamic_axes import BATCH, LENGTH, Roles
from graphplan.capture.structure import flatten
from graphplan.capture.transformers.caches import LayoutPart, caches_at, layout_of


def cache_roles(cache: Any, batch: int | None) -> list[Roles]:
    """The axes of the leaves of a cache that may vary."""
    leaves, spec = flatten(cache)
    return [
        _roles(leaf, grows, batch) for leaf, (_, grows) in zip(leaves, _places(layout_of(spec)), strict=True)
    ]


def with_tokens(roles: Sequence[Roles], call: BoundCall, *, ones: bool) -> list[Roles]:
    """The roles of the leaves of a call, where tensors in caches grow by lengths; those of 1 if ``ones``."""
    found = list(roles)
    for start, spec in caches_at(call.spec):
        for index, (_, grows) in enumerate(_places(layout_of(spec)), start):
            leaf = call.leaves[index]
            if isinstance(leaf, torch.Tensor):
                axes = [axis for axis in grows or () if ones or leaf.shape[axis] != 1]
                found[index] = {**found[index], **dict.fromkeys(axes, LENGTH)}
    return found


def take_for_one(cache: Any, example: Any, roles: list[Roles]) -> None:
    """Have a trace know that axes of one role count the same in all layers of a kind, as in the example.

    ``cache`` is the traced one. The trace makes a condition of each, which it would otherwise find itself.
    """
    traced, spec = flatten(cache)
    first: dict[Hashable, Any] = {}
    for (kind, _), leaf, like, axes in zip(
        _places(layout_of(spec)), traced, flatten(example)[0], roles, strict=True
    ):
        for axis, role in axes.items() if isinstance(leaf, torch.Tensor) else ():
            same = first.setdefault((kind, role, like.shape[axis]), leaf.shape[axis])
            if leaf.shape[axis] != same:  # a comparison of symbols that are equal in the example
                raise AssertionError(f"{kind}: {leaf.shape[axis]} is not {same}, as in the example")


def _roles(leaf: Any, grows: tuple[int, ...] | None, batch: int | None) -> Roles:
    if not isinstance(leaf, torch.Tensor):
        return {0: LENGTH}
    roles = {0: BATCH} if leaf.dim() >= 2 and leaf.shape[0] == batch else {}
    return {**roles, **dict.fromkeys(grows or (), LENGTH)}


def _places(part: LayoutPart, kind: tuple[Any, ...] = ()) -> Iterator[tuple[Hashable, Any]]:
    """For each leaf of a layout, what tells of its kind of layer, and the axes along which it grows."""
    if part.kind == "leaf":
        yield kind, part.value
    for key, inner in zip(part.keys or ("",) * len(part.parts), part.parts, strict=True):
        yield from _places(inner, kind if inner.kind == "leaf" else (*kind, key, inner.cls))
