"""Weights that were moved or converted behind the plan's back: said so, instead of what torch would say."""

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
    """Raise PlanError unless a weight is of the form that was planned."""
    if (weight.device, weight.dtype, weight.shape) != (device, dtype, shape):
        raise PlanError(
            f"{name!r} is {weight.dtype} of shape {list(weight.shape)} on {weight.device}, the plan has it "
            f"as {dtype} of shape {list(shape)} on {device}: a placed model cannot be moved or converted, "
            "only partitioned again"
        )


def require_in_place(
    module: nn.Module, convert: Callable[[nn.Module], Any], welcome: torch.device | None
) -> None:
    """Raise PlanError where a conversion would move, share or convert a weight of a placed module.

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
                f"be {made.dtype} on {made.device}. Leave the move out, or convert and partition again "
                "what graphplan.unplace(model) gives back: the plain model on the CPU"
            )
        if device.type == CPU and made.is_shared():
            raise PlanError(
                "share_memory() would move the weights of a placed model: share those of the plain one, "
                "which graphplan.unplace(model) gives back, and place that in each process"
            )


def _kept_in_place(name: str) -> Callable[..., Any]:
    """A method of modules that moves or converts: an error where it would change a placed weight.

    A model that says its ``device`` may be moved there: its own code does that before each of its calls.
    """
    method = getattr(nn.Module, name)

    @functools.wraps(method)
    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        # the property that answers for placed models, not an attribute that is called so
        welcome = self.device if "device" in vars(type(self)) else None
        require_in_place(self, lambda probe: method(probe, *args, **kwargs), welcome)
        return self

    return convert


class KeptInPlace(nn.Module):
    """A module that is neither moved nor converted."""

    to, cpu, cuda = map(_kept_in_place, ("to", "cpu", "cuda"))
    half, bfloat16, float, double = map(_kept_in_place, ("half", "bfloat16", "float", "double"))
    type, to_empty = map(_kept_in_place, ("type", "to_empty"))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What a parent's ``.to`` calls: to the CPU, where calls may come from, it moves nothing."""
        require_in_place(self, lambda probe: probe._apply(fn, recurse), torch.device("cpu"))
        return self
