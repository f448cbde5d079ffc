"""Whose error a capture ends with: what eager raises too is the user's, and comes through unchanged.

Eager is asked on the copy of the model, whose weights are zero: on fake tensors, which cost nothing; and
where these refuse, with real kernels, since fake tensors have limits of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphplan.capture.model_copy import ModelCopy
from graphplan.capture.quiet import quiet
from graphplan.capture.signature import BoundCall
from graphplan.capture.structure import unflatten
from graphplan.errors import GraphplanError

_TRIABLE = 1 << 28  # elements of weights, above which real kernels are not tried


def eager_error(model_copy: ModelCopy, call: BoundCall) -> Exception | None:
    """What the model itself raises for a call, ready to be raised; None where it runs, or nobody can tell."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call.leaves]
    found = _raised(model_copy, fake, call, mode)
    if found is None or type(found).__module__.startswith("torch.") or isinstance(found, GraphplanError):
        return None  # a limit of fake tensors, which says nothing about the inputs
    if sum(tensor.numel() for tensor in model_copy.weights.tensors.values()) > _TRIABLE:
        return found
    return _raised(model_copy, list(call.leaves), call, nullcontext())


def _raised(
    model_copy: ModelCopy, leaves: Sequence[Any], call: BoundCall, mode: AbstractContextManager[Any]
) -> Exception | None:
    args, kwargs = unflatten(leaves, call.spec)
    module, method = model_copy.module, model_copy.method
    run = module if method == "forward" else getattr(module, method)
    try:
        with quiet(), torch.no_grad(), mode:
            run(*args, **kwargs)
    except Exception as error:  # the model's own code may raise anything
        return error
    return None


def is_same(error: Exception, other: Exception | None) -> bool:
    """Whether two runs of a model raised the same."""
    return type(error) is type(other) and str(error) == str(other)
