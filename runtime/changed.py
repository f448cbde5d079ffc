"""Weights that were moved or converted behind the plan's back: said so, instead of what torch would say."""

from __future__ import annotations

import torch

from graphplan.errors import PlanError

__all__ = ["require_planned"]


def require_planned(
    name: str, weight: torch.Tensor, device: torch.device, dtype: torch.dtype, shape: torch.Size
) -> None:
    """Raise PlanError unless a weight is of the form that was planned."""
    if (weight.device, weight.dtype, weight.shape) != (device, dtype, shape):
        raise PlanError(
            f"{name!r} is {weight.dtype} of shape {list(weight.shape)} on {weight.device}, the plan has it "
            f"as {dtype} of shape {list(shape)} on {device}: a placed model cannot be moved or converted, "
            "only partitioned anew"
        )
