"""Warn a caller who seems to expect gradients of a module that was placed without them.

Its results require none, as under ``torch.no_grad()``, and torch's error at ``backward()`` does not say why.
The signs of a backward pass are: an input requires gradients, ``train()`` was called on the placed module, or
a forward pass in training mode returns a loss. Training mode alone is not a sign: new modules are in it, and
are often run only for their results.
"""

from __future__ import annotations

import torch
from torch import nn

from graphplan._compat.torch import in_grad_transform
from graphplan.errors import PlanError
from graphplan.ir.plan_data import PlanData
from graphplan.runtime.module.dispatch import CallRequest
from graphplan.runtime.module.module_state import ModuleState
from graphplan.warnings import warn

_NONE = "the results of a model that was placed without gradients have none"
_WRITE = "give partition train=True, which plans the whole step, or grad=True"
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
    warn(f"{_NONE}, and {why}: backward() will fail. To train, {_WRITE}")


def _returns_loss(plan: PlanData) -> bool:
    """Whether a result is a floating-point tensor without dimensions."""
    results = (plan.graph.values.get(name) for name in plan.graph.outputs)
    return any(
        value is not None and value.is_tensor and value.shape == () and "float" in value.dtype
        for value in results
    )
