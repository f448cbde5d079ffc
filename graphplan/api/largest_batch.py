"""The largest batch for which a plan fits the budgets: doubling what is given, then bisection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from graphplan.api.arguments import require_inputs
from graphplan.api.plan_options import PlanKeywords, require_known
from graphplan.api.planning import plan
from graphplan.capture.sizes.size_limits import SizeLimits
from graphplan.capture.structure import know_containers, leaves_of, map_leaves
from graphplan.capture.transformers.caches import know_caches
from graphplan.capture.value_branches import is_of_integers
from graphplan.devices.max_memory import MaxMemory
from graphplan.errors import InfeasibleError, InputError


def largest_batch(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    most: int = 1024,
    **options: Unpack[PlanKeywords],
) -> int:
    """The most sequences, or images, of a forward pass or training step within the budgets.

    Each size that is tried is planned, that of the example first. The search is no proof: a larger batch may
    fit too.

    Args:
        model: as in :func:`graphplan.plan`; it is not changed.
        max_memory: likewise.
        args: example inputs by position. Axis 0 of the first tensor is the batch, and of every tensor that is
            as long there.
        kwargs: example inputs by name.
        most: where to stop, as at ``max_batch``.
        options: as in :func:`graphplan.plan`, such as ``train=True, optimizer=torch.optim.AdamW``.

    Raises:
        InputError: the inputs have no batch, or ``most`` is not positive.
        InfeasibleError: not even a batch of one fits.
        GraphplanError: as in :func:`graphplan.plan`.
    """
    require_known(plan, options, "largest_batch")
    require_inputs(args, kwargs)
    know_caches(model)
    example = tuple(args), dict(kwargs or {})
    know_containers(example)
    tensors = [leaf for leaf in leaves_of(example) if isinstance(leaf, torch.Tensor)]
    if not tensors or not tensors[0].dim() or not tensors[0].shape[0]:
        raise InputError("largest_batch needs example inputs whose first tensor has a batch along axis 0")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InputError(f"most={most!r}: write a positive number of sequences")
    given, limits = tensors[0].shape[0], SizeLimits(options.get("max_batch"), options.get("max_length"))
    most = min(most, limits.max_batch or most)

    lacking = dict[int, InfeasibleError]()

    def fits(size: int) -> bool:
        sized = map_leaves(lambda leaf: _of_size(leaf, given, size), example)
        try:
            plan(model, max_memory, *sized, **options)
        except InfeasibleError as error:
            lacking[size] = error
        return size not in lacking

    low, high = 0, min(given, most)
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise lacking[1]
    return low


def _of_size(leaf: Any, given: int, size: int) -> Any:
    """A tensor of a batch for another batch: by integers, code may branch; others are on the meta device."""
    if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != given:
        return leaf
    if is_of_integers(leaf):
        return leaf[torch.arange(size, device=leaf.device) % given]
    return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
