"""Operations that lowered graphs call and torch does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["to_device"]


def to_device(value: Any, device: torch.device | str) -> Any:
    """Copy every tensor in ``value`` to ``device``; everything else passes through unchanged."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)
