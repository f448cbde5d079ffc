"""Weights that wrap other tensors, such as quantised ones: moved tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["moved"]


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device.

    A wrapper is made anew from copies of what it wraps: its own ``.to`` need not know the device.
    """
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) is torch.nn.Parameter:
        return tensor.to(device, copy=True)
    names, context = flatten()
    inner = {name: moved(getattr(tensor, name).detach(), device) for name in names}
    kind: Any = type(tensor)
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made
