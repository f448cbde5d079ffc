"""How many bytes autograd saves in a forward pass: counted by its own hooks, on fake tensors."""

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
from graphplan.devices.machine import suspended

_SMALL = 1 << 28  # elements of weights, above which real kernels are not tried


def saved_bytes(model_copy: ModelCopy, call: BoundCall) -> int | None:
    """Bytes of the storages that autograd saves beside weights and inputs; None where nobody can tell.

    Where fake tensors do not run the model, since data decides what it computes, real ones do if it is small.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call.leaves]
    found = _counted(model_copy, fakes, call, mode)
    small = sum(tensor.numel() for tensor in model_copy.weights.tensors.values()) <= _SMALL
    return _counted(model_copy, list(call.leaves), call, nullcontext()) if found is None and small else found


def _counted(
    model_copy: ModelCopy, leaves: Sequence[Any], call: BoundCall, mode: AbstractContextManager[Any]
) -> int | None:
    tensors = [*model_copy.module.parameters(), *(x for x in leaves if isinstance(x, torch.Tensor))]
    known, sizes = {tensor.untyped_storage()._cdata for tensor in tensors}, dict[int, int]()
    held: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
            held.append(tensor)  # so that no other storage gets its address
        return tensor

    args, kwargs = unflatten(leaves, call.spec)
    try:
        with (
            suspended(),
            quiet(),
            mode,
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            model_copy.module(*args, **kwargs)
    except Exception:  # the model's own code may raise anything, and fakes have limits of their own
        return None
    return sum(sizes.values())
