"""Warn a caller who seems to expect gradients of a module that was placed without them.

Its results require none, as under ``torch.no_grad()``, and torch's error at ``backward()`` does not say why.
The signs of a backward pass are: an input requires gradients, ``train()`` was called on the placed module, or
a forward pass in training mode returns a loss. Training mode alone is not a sign: new modules are in it, and
are often run only for their results.

If the loss depends on parameters of another model too, ``backward()`` succeeds. The sign is then an optimizer
that steps over parameters of the placed module, none of which has a gradient after a call.
"""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphplan._compat.torch import in_grad_transform
from graphplan.errors import PlanError
from graphplan.ir.plan_data import PlanData
from graphplan.runtime.module.dispatch import CallRequest
from graphplan.runtime.module.module_state import ModuleState
from graphplan.warnings import warn

_NONE = "the results of a model that was placed without gradients have none"
_WRITE = "give partition train=True, which plans the whole step, or grad=True"
_UNCHANGED = (
    f"{_NONE}: this optimizer holds parameters of {{}}, and changes none of them. To train them, {_WRITE}; "
    "or leave them out of the optimizer"
)
_TRANSFORMED = "torch.func would take them for zero: give partition grad=True"


def may_miss_gradients(state: ModuleState) -> bool:
    """Whether a call may lack gradients that its caller wants, and no warning has said so yet.

    Raises:
        PlanError: it is inside a ``torch.func`` transform, which would take the missing gradients for zero.
    """
    if state.keep_grad or state.step is not None:
        return False
    if in_grad_transform():
        raise PlanError(f"{_NONE}, and {_TRANSFORMED}")
    return torch.is_grad_enabled() and not state.warned_of_gradients


def warn_of_missing_gradients(
    module: nn.Module, state: ModuleState, plan: PlanData | None, request: CallRequest
) -> None:
    """Warn, in a call with gradients enabled, that they are not computed, if the caller seems to want them.

    ``plan`` is None if the call runs module by module.
    """
    _STEP_HOOK.record_call(module)
    inputs = (*request.args, *request.kwargs.values())
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
        why = "an input requires them"
    elif not module.training or not any(parameter.requires_grad for parameter in module.parameters()):
        return
    elif state.train_called:
        why = "train() was called"
    elif plan is not None and _returns_loss(plan):
        why = "this call in training mode returns a loss"
    else:
        return
    state.warned_of_gradients = True
    warn(f"{_NONE}, and {why}: backward() will fail, or change none of its parameters. To train, {_WRITE}")


def _returns_loss(plan: PlanData) -> bool:
    """Whether a result is a floating-point tensor without dimensions."""
    results = (plan.graph.values.get(name) for name in plan.graph.outputs)
    return any(
        value is not None and value.is_tensor and value.shape == () and "float" in value.dtype
        for value in results
    )


class _StepHook:
    """A step hook of all optimizers, which warns of modules whose parameters no gradient has reached.

    ``called`` are the modules called with gradients enabled since the last step over their parameters.
    """

    def __init__(self) -> None:
        self.called = WeakSet[nn.Module]()
        self.registered = False
        self.lock = Lock()  # one thread may train while another calls

    def record_call(self, module: nn.Module) -> None:
        """Record a call of a module that was placed without gradients."""
        with self.lock:
            if not self.registered:
                register_optimizer_step_pre_hook(self)
                self.registered = True
            self.called.add(module)

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Warn once of each called module; called by ``register_optimizer_step_pre_hook``."""
        with self.lock:
            modules = list(self.called)
        if not modules:
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in modules:
            trainable = (parameter for parameter in module.parameters() if parameter.requires_grad)
            first = next(trainable, None)  # alone, since most optimizers hold all parameters or none
            if first is None or id(first) not in held:
                continue
            with self.lock:
                self.called.discard(module)
            if first.grad is None and all(parameter.grad is None for parameter in trainable):
                vars(module)["_graphplan"].warned_of_gradients = True
                warn(_UNCHANGED.format(type(module).__name__))


_STEP_HOOK = _StepHook()
