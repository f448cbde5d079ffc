"""The dynamic axes of caches, and their equality.

A trace has a symbol for each axis of each tensor. It learns that two are equal only where code uses both,
inside the blocks, after block arguments such as the mask were computed from the first. If the equality is
known from the start, all blocks have the same arguments, and one trace can stand for all::

    layers[0].keys (s1, 8, s2, 64), layers[1].keys (s3, 8, s4, 64)    becomes    (s1, 8, s2, 64) for both
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
    """Return the dynamic axes of the leaves of a cache."""
    leaves, spec = flatten(cache)
    return [
        _roles(leaf, grows, batch) for leaf, (_, grows) in zip(leaves, _layers(layout_of(spec)), strict=True)
    ]


def with_tokens(roles: Sequence[Roles], call: BoundCall, *, ones: bool) -> list[Roles]:
    """Return the roles with those of growing cache axes added; axes of size 1 only if ``ones``."""
    extended = list(roles)
    for start, spec in caches_at(call.spec):
        for index, (_, grows) in enumerate(_layers(layout_of(spec)), start):
            leaf = call.leaves[index]
            if isinstance(leaf, torch.Tensor):
                axes = [axis for axis in grows or () if ones or leaf.shape[axis] != 1]
                extended[index] = {**extended[index], **dict.fromkeys(axes, LENGTH)}
    return extended


def equate_sizes(cache: Any, example: Any, roles: list[Roles]) -> None:
    """Equate the sizes of axes of one role in all layers of a kind that are equal in the example.

    ``cache`` is the traced one. Each comparison adds a guard, which the trace would otherwise add itself.
    """
    traced, spec = flatten(cache)
    first: dict[Hashable, Any] = {}
    leaves = zip(_layers(layout_of(spec)), traced, flatten(example)[0], roles, strict=True)
    for (layer, _), leaf, example_leaf, axes in leaves:
        if not isinstance(leaf, torch.Tensor):
            continue
        for axis, role in axes.items():
            size = first.setdefault((layer, role, example_leaf.shape[axis]), leaf.shape[axis])
            if leaf.shape[axis] != size:  # compares symbols that are equal in the example
                raise AssertionError(f"{layer}: {leaf.shape[axis]} is not {size}, as in the example")


def _roles(leaf: Any, grows: tuple[int, ...] | None, batch: int | None) -> Roles:
    if not isinstance(leaf, torch.Tensor):
        return {0: LENGTH}
    roles = {0: BATCH} if leaf.dim() >= 2 and leaf.shape[0] == batch else {}
    return {**roles, **dict.fromkeys(grows or (), LENGTH)}


def _layers(part: LayoutPart, layer: tuple[Any, ...] = ()) -> Iterator[tuple[Hashable, Any]]:
    """Yield (key of the layer kind, axes along which it grows) for each leaf of a layout."""
    if part.kind == "leaf":
        yield layer, part.value
    for key, inner in zip(part.keys or ("",) * len(part.parts), part.parts, strict=True):
        yield from _layers(inner, layer if inner.kind == "leaf" else (*layer, key, inner.cls))
