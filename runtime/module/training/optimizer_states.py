"""Move optimizer states to the devices of placed parameters before the next optimizer step.

A model that is placed at its first call keeps its parameter objects, since an optimizer may refer to them.
The optimizer may have loaded a state from a checkpoint by then. torch has put it where the parameters were;
trainers such as Lightning's put all that they load on one device.
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


class _StateMover:
    """A step hook that moves an optimizer's state to its parameters, once after each placed module."""

    def __init__(self) -> None:
        self.placed = WeakSet[nn.Module]()
        self.moved = WeakSet[Optimizer]()
        self.registered = False
        self.lock = Lock()  # one thread may train while another places

    def register(self, module: nn.Module) -> None:
        """Have each optimizer move its state for the parameters of this module at its next step."""
        with self.lock:
            if not self.registered:
                register_optimizer_step_pre_hook(self)
                self.registered = True
            self.placed.add(module)
            self.moved.clear()

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Move the optimizer's state; called by ``register_optimizer_step_pre_hook``."""
        with self.lock:
            if optimizer in self.moved:
                return
            self.moved.add(optimizer)
            modules = list(self.placed)
        placed = {id(parameter) for module in modules for parameter in module.parameters()}
        for group in optimizer.param_groups:
            on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if state and id(parameter) in placed:
                    _move(state, parameter.device, parameter.device if on_device else torch.device("cpu"))


def _move(state: dict[str, Any], device: torch.device, counter: torch.device) -> None:
    """Move the tensors of a parameter's state to ``device``, and its step counter to ``counter``."""
    for key, value in state.items():
        move = methodcaller("to", counter if key == "step" else device)
        state[key] = pytree.tree_map_only(torch.Tensor, move, value)


_STATE_MOVER = _StateMover()
move_optimizer_states = _STATE_MOVER.register
"""Have the optimizers of a module's parameters move their states to these, once, at their next step."""
