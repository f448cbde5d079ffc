"""Division of a batch into microbatches along its first dimension.

Tensors whose first size is that of the batch are divided; each microbatch gets all others unchanged. Tensors
that were not divided in the example are not divided in later calls, even if they have as many rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from graphplan.capture.signature import BoundCall, leaf_names
from graphplan.capture.structure import leaves_of, map_leaves
from graphplan.errors import InputError

Divided = Mapping[str, bool]
"""Name of a tensor -> whether it is divided."""


def divided_in(example: BoundCall) -> Divided:
    """Return which tensors of an example are divided, without those of one row, which may broadcast."""
    rows, named = batch_of(example), zip(leaf_names(example), example.leaves, strict=True)
    return {name: leaf.shape[0] == rows for name, leaf in named if _rows(leaf) not in (None, 1)}


def batch_of(call: BoundCall, divided: Divided = MappingProxyType({})) -> int:
    """Return the rows of a batch: the first size of the first tensor that has dimensions.

    Args:
        call: the call with the batch.
        divided: the tensors divided in the example; others are ignored.

    Raises:
        InputError: there is no such tensor.
    """
    for name, leaf in zip(leaf_names(call), call.leaves, strict=True):
        if divided.get(name, True) and (rows := _rows(leaf)) is not None:
            return rows
    raise InputError("no input is a tensor with a batch dimension: leave microbatches at 1")


def microbatches_of(call: BoundCall, count: int, divided: Divided = MappingProxyType({})) -> list[BoundCall]:
    """Return the calls of the microbatches of a batch.

    Args:
        call: the call with the whole batch.
        count: the number of microbatches; with 1 the call is unchanged.
        divided: the tensors divided in the example.

    Raises:
        InputError: the batch does not divide equally, or a tensor that was divided in the example has another
            number of rows than the batch.
    """
    if count == 1:
        return [call]
    rows = batch_of(call, divided)
    if rows % count or not rows:
        raise InputError(
            f"a batch of {rows} rows does not divide into {count} microbatches of equal size: pad it to "
            f"{max(1, -(-rows // count)) * count} rows, or choose other microbatches"
        )
    size, named = rows // count, list(zip(leaf_names(call), call.leaves, strict=True))
    for name, leaf in named:
        if divided.get(name) and _rows(leaf) not in (None, 1, rows):
            raise InputError(
                f"{name} has {_rows(leaf)} rows, but the batch has {rows}: it was divided into microbatches "
                "in the example, so it must have as many rows"
            )
    parts = [divided.get(name, True) and _rows(leaf) == rows for name, leaf in named]

    def part(start: int) -> BoundCall:
        is_part = iter(parts)
        return call.mapped(lambda leaf: leaf[start : start + size] if next(is_part) else leaf)

    return [part(start) for start in range(0, rows, size)]


def _rows(leaf: Any) -> int | None:
    return int(leaf.shape[0]) if isinstance(leaf, torch.Tensor) and leaf.dim() else None


def targets_of(target: Any, count: int, rows: int) -> list[Any]:
    """Return the target, a tensor or a tree of tensors, of each of ``count`` microbatches.

    Raises:
        InputError: a tensor's rows are not a multiple of the batch's, as they are for ``(batch * length,)``.
    """
    for leaf in leaves_of(target):
        if (
            count > 1
            and isinstance(leaf, torch.Tensor)
            and (not leaf.dim() or not leaf.shape[0] or leaf.shape[0] % rows)
        ):
            raise InputError(
                f"a target of shape {list(leaf.shape)} cannot be divided along its first dimension like the "
                f"batch: give it {rows} rows, as many as the batch has"
            )

    def part(leaf: Any, index: int) -> Any:
        return leaf.tensor_split(count)[index] if isinstance(leaf, torch.Tensor) else leaf

    return [map_leaves(partial(part, index=index), target) for index in range(count)]
