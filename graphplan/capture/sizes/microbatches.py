"""A batch, divided along its first dimension.

Tensors whose first size is that of the batch are divided; all else goes with each microbatch as it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from graphplan.capture.signature import BoundCall
from graphplan.capture.structure import leaves_of, map_leaves
from graphplan.errors import InputError


def batch_of(call: BoundCall) -> int:
    """Rows of a batch: the first size of its first tensor that has sizes.

    Raises:
        InputError: there is none.
    """
    for tensor in call.tensors:
        if tensor.dim():
            return int(tensor.shape[0])
    raise InputError("no input is a tensor with a batch dimension: leave microbatches at 1")


def microbatches_of(call: BoundCall, count: int) -> list[BoundCall]:
    """The calls into which a batch is divided.

    Args:
        call: of the whole batch.
        count: of microbatches; with 1 the call stays as it is.

    Raises:
        InputError: the batch cannot be divided into so many equal parts.
    """
    if count == 1:
        return [call]
    rows = batch_of(call)
    if rows % count or not rows:
        raise InputError(
            f"a batch of {rows} rows does not divide into {count} microbatches of equal size: pad it to "
            f"{max(1, -(-rows // count)) * count} rows, or choose other microbatches"
        )
    each = rows // count

    def part(leaf: Any, start: int) -> Any:
        divided = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows
        return leaf[start : start + each] if divided else leaf

    return [call.mapped(partial(part, start=at)) for at in range(0, rows, each)]


def targets_of(target: Any, count: int, rows: int) -> list[Any]:
    """The parts of a target, a tensor or a tree of them, for each of so many microbatches.

    Raises:
        InputError: a tensor has other rows than the batch, and no multiple of them, as ``(batch * length,)``.
    """
    for leaf in leaves_of(target) if count > 1 else ():
        if isinstance(leaf, torch.Tensor) and (not leaf.dim() or not leaf.shape[0] or leaf.shape[0] % rows):
            raise InputError(
                f"a target of the sizes {list(leaf.shape)} does not divide along its first dimension as the "
                f"batch does: give it {rows} rows, as many as the batch has"
            )

    def part(leaf: Any, index: int) -> Any:
        return leaf.tensor_split(count)[index] if isinstance(leaf, torch.Tensor) else leaf

    return [map_leaves(partial(part, index=index), target) for index in range(count)]
