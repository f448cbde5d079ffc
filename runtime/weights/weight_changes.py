"""Errors for weights that were moved or converted after the plan was made, in place of torch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from graphplan.devices.topology import CPU
from graphplan.errors import PlanError


def require_planned(
    name: str, weight: torch.Tensor, device: torch.device, dtype: torch.dtype, shape: torch.Size
) -> None:
    """Raise PlanError unless a weight has the planned device, dtype and shape."""
    if (weight.device, weight.dtype, weight.shape) != (device, dtype, shape):
        raise PlanError(
            f"{name!r} is {weight.dtype} of shape {list(weight.shape)} on {weight.device}, but the plan has "
            f"it as {dtype} of shape {list(shape)} on {device}: a placed model cannot be moved or converted, "
            "only partitioned again"
        )


def require_in_place(
    module: nn.Module, convert: Callable[[nn.Module], Any], allowed_device: torch.device | None
) -> None:
    """Raise PlanError if a conversion would move, share or convert a weight of a placed module.

    Args:
        module: the placed module.
        convert: the conversion; it is applied to a probe module.
        allowed_device: a move to this device is accepted and does nothing: inputs come from there.
    """
    device_dtypes = dict.fromkeys((t.device, t.dtype) for t in (*module.parameters(), *module.buffers()))
    for device, dtype in device_dtypes:
        probe = nn.Module()
        probe.register_buffer("weight", torch.empty(0, device=device, dtype=dtype))
        convert(probe)
        converted: Any = probe.weight
        moved = converted.device not in (device, allowed_device)
        if moved or converted.dtype != dtype:
            raise PlanError(
                f"a placed model cannot be moved or converted ({dtype} on {device} would become "
                f"{converted.dtype} on {converted.device}): leave the move out, or convert and partition "
                "again the plain model on the CPU that graphplan.unplace(model) returns"
            )
        if device.type == CPU and converted.is_shared():
            raise PlanError(
                "share_memory() would move the weights of a placed model: share those of the plain one, "
                "which graphplan.unplace(model) returns, and place that in each process"
            )


def _checked_conversion(name: str) -> Callable[..., Any]:
    """Return a module method (``to``, ``half``, ...) that raises an error if it would change a placed weight.

    A model with a property ``device`` may be moved there: its own code does so before each forward pass.
    """
    method = getattr(nn.Module, name)

    @functools.wraps(method)
    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        # only the property that placed models define, not any attribute of this name
        allowed_device = self.device if "device" in vars(type(self)) else None
        require_in_place(self, lambda probe: method(probe, *args, **kwargs), allowed_device)
        return self

    return convert


class KeptInPlace(nn.Module):
    """A module whose weights are neither moved nor converted."""

    to, cpu, cuda = map(_checked_conversion, ("to", "cpu", "cuda"))
    half, bfloat16, float, double = map(_checked_conversion, ("half", "bfloat16", "float", "double"))
    type, to_empty = map(_checked_conversion, ("type", "to_empty"))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Check a conversion by a parent module; a move to the CPU is accepted, and moves nothing."""
        require_in_place(self, lambda probe: probe._apply(fn, recurse), torch.device("cpu"))
        return self
