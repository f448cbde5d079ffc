"""What an optimizer holds of placed parameters goes where they are before its first step.

A model that is placed at its first call keeps its parameter objects, since an optimizer may hold them. That
may have a state by then, from a checkpoint. Torch has put it where the parameters were; and trainers, as
Lightning's, put all that they load on one device.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree


class _Followers:
    """Before the first step of each optimizer, moves its state to where parameters have been placed."""

    def __init__(self) -> None:
        self.placed = WeakSet[nn.Module]()
        self.known = WeakSet[Optimizer]()
        self.registered = False

    def follow(self, module: nn.Module) -> None:
        """Let optimizers that step from now on follow the parameters of this module."""
        if not self.registered:
            register_optimizer_step_pre_hook(self)
            self.registered = True
        self.placed.add(module)
        self.known.clear()

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """As :func:`torch.optim.optimizer.register_optimizer_step_pre_hook` calls it."""
        if optimizer in self.known:
            return
        self.known.add(optimizer)
        placed = {id(parameter) for module in self.placed for parameter in module.parameters()}
        for group in optimizer.param_groups:
            scalars = bool(group.get("fused") or group.get("capturable"))  # else torch keeps them on the CPU
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if state and id(parameter) in placed:
                    _move(state, parameter.device, scalars=scalars)


def _move(state: dict[str, Any], device: torch.device, *, scalars: bool) -> None:
    """Have the tensors of a parameter's state on a device; without ``scalars`` these stay."""
    for key, value in state.items():
        state[key] = pytree.tree_map_only(
            torch.Tensor, lambda one: one.to(device) if one.dim() or scalars else one, value
        )


_FOLLOWERS = _Followers()
states_follow = _FOLLOWERS.follow
"""Let the optimizers of a module's parameters move what they hold of these, once, at their next step."""
