"""Find the largest batch whose plan fits the budgets, by doubling and bisection."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from graphplan.api.arguments import require_inputs
from graphplan.api.plan_options import PlanKeywords, require_known
from graphplan.api.planning import plan
from graphplan.capture.sizes.size_limits import SizeLimits
from graphplan.capture.structure import leaves_of, map_leaves, register_containers
from graphplan.capture.transformers.caches import register_caches
from graphplan.capture.value_branches import is_integer_tensor
from graphplan.devices.max_memory import MaxMemory
from graphplan.errors import InfeasibleError, InputError


def largest_batch(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    limit: int = 1024,
    **options: Unpack[PlanKeywords],
) -> int:
    """Return the largest batch size of a forward pass or training step that fits the budgets.

    Sizes are planned one after another: the example's is doubled until it no longer fits, then bisected.
    This does not prove that no larger batch fits.

    Args:
        model: as in :func:`graphplan.plan`; it is not changed.
        max_memory: as in :func:`graphplan.plan`.
        args: example inputs by position. Axis 0 of the first tensor is the batch axis, and so is axis 0 of
            every tensor of that size.
        kwargs: example inputs by name.
        limit: upper limit of the batch size; ``max_batch`` is one too.
        options: as in :func:`graphplan.plan`, such as ``train=True, optimizer=torch.optim.AdamW``.

    Raises:
        InputError: the first tensor has no axis 0, or ``limit`` is not a positive integer.
        InfeasibleError: not even a batch of one fits.
        GraphplanError: as in :func:`graphplan.plan`.
    """
    require_known(inspect.signature(plan).parameters, options, "largest_batch")
    require_inputs(args, kwargs)
    register_caches(model)
    example = tuple(args), dict(kwargs or {})
    register_containers(example)
    tensors = [leaf for leaf in leaves_of(example) if isinstance(leaf, torch.Tensor)]
    if not tensors or not tensors[0].dim() or not tensors[0].shape[0]:
        raise InputError("largest_batch needs example inputs whose first tensor has a batch along axis 0")
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InputError(f"limit={limit!r}: write a positive number of sequences")
    rows, limits = tensors[0].shape[0], SizeLimits(options.get("max_batch"), options.get("max_length"))
    limit = min(limit, limits.max_batch or limit)

    failures = dict[int, InfeasibleError]()

    def fits(size: int) -> bool:
        resized = map_leaves(lambda leaf: _resize_batch(leaf, rows, size), example)
        try:
            plan(model, max_memory, *resized, **options)
        except InfeasibleError as error:
            failures[size] = error
        return size not in failures

    low, high = 0, min(rows, limit)
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise failures[1]
    return low


def _resize_batch(leaf: Any, rows: int, size: int) -> Any:
    """Return a tensor resized to another batch size: integers keep values, as code may branch on them."""
    if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
        return leaf
    if is_integer_tensor(leaf):
        return leaf[torch.arange(size, device=leaf.device) % rows]
    return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
