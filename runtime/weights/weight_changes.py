"""Weights that were moved or converted behind the plan's back: said so, instead of what torch would say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphplan.errors import PlanError


def require_planned(
    name: str, weight: torch.Tensor, device: torch.device, dtype: torch.dtype, shape: torch.Size
) -> None:
    """Raise PlanError unless a weight is of the form that was planned."""
    if (weight.device, weight.dtype, weight.shape) != (device, dtype, shape):
        raise PlanError(
            f"{name!r} is {weight.dtype} of shape {list(weight.shape)} on {weight.device}, the plan has it "
            f"as {dtype} of shape {list(shape)} on {device}: a placed model cannot be moved or converted, "
            "only partitioned again"
        )


def require_in_place(
    module: nn.Module, convert: Callable[[nn.Module], Any], welcome: torch.device | None = None
) -> None:
    """Raise PlanError where a conversion would move or convert a weight of a placed module.

    Args:
        module: the placed module.
        convert: what would be done to it.
        welcome: a move to this device is taken to mean that calls come from there.
    """
    forms = dict.fromkeys((t.device, t.dtype) for t in (*module.parameters(), *module.buffers()))
    for device, dtype in forms:
        probe = nn.Module()
        probe.register_buffer("weight", torch.empty(0, device=device, dtype=dtype))
        convert(probe)
        made: Any = probe.weight
        moved = made.device not in (device, welcome)
        if moved or made.dtype != dtype:
            raise PlanError(
                f"a placed model keeps its weights where and as the plan has them: {dtype} on {device} would "
                f"be {made.dtype} on {made.device}. graphplan.unplace(model) gives back the plain model on "
                "the CPU, to convert and to partition again"
            )
