"""What an optimizer holds of placed parameters goes where they are before its first step.

A model that is placed at its first call keeps its parameter objects, since an optimizer may hold them. That
may have a state by then, from a checkpoint. Torch has put it where the parameters were; and trainers, as
Lightning's, put all that they load on one device.
"""

from __future__ import annotations

from operator import methodcaller
from threading import Lock
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
        self.lock = Lock()  # one thread may train while another places

    def follow(self, module: nn.Module) -> None:
        """Let optimizers that step from now on follow the parameters of this module."""
        with self.lock:
            if not self.registered:
                register_optimizer_step_pre_hook(self)
                self.registered = True
            self.placed.add(module)
            self.known.clear()

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """As :func:`torch.optim.optimizer.register_optimizer_step_pre_hook` calls it."""
        with self.lock:
            if optimizer in self.known:
                return
            self.known.add(optimizer)
            modules = list(self.placed)
        placed = {id(parameter) for module in modules for parameter in module.parameters()}
        for group in optimizer.param_groups:
            beside = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if state and id(parameter) in placed:
                    _move(state, parameter.device, parameter.device if beside else torch.device("cpu"))


def _move(state: dict[str, Any], device: torch.device, counter: torch.device) -> None:
    """Have the tensors of a parameter's state on a device; what counts its steps on another, as torch has."""
    for key, value in state.items():
        moved = methodcaller("to", counter if key == "step" else device)
        state[key] = pytree.tree_map_only(torch.Tensor, moved, value)


_FOLLOWERS = _Followers()
states_follow = _FOLLOWERS.follow
"""Let the optimizers of a module's parameters move what they hold of these, once, at their next step."""
