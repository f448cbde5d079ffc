"""One call of a module, run as it is: which submodules run, what they return, what is alive at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from graphplan.capture.structure import leaves_of
from graphplan.devices.topology import round_up
from graphplan.errors import CaptureError
from graphplan.ir.liveness import LiveBytes
from graphplan.runtime.fallback.replaced_tensors import tensors_in


@dataclass(slots=True)
class CallProfile:
    """What one call showed.

    Attributes:
        order: submodules, by their first call's start.
        outputs: submodule -> bytes of the tensors that it returned.
        peak: the most bytes alive beside weights.
    """

    order: list[str] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    peak: int = 0


def _has_storage(leaf: Any) -> bool:
    """Whether this is a tensor with a storage: neither sparse nor a wrapper without one."""
    try:
        return isinstance(leaf, torch.Tensor) and leaf.untyped_storage() is not None
    except (NotImplementedError, RuntimeError):
        return False


def profile_call(
    module: nn.Module,
    run: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    keep_grad: bool = False,
) -> CallProfile:
    """Run a module, or what calls it, and watch; what it raises passes through.

    Raises:
        CaptureError: ``torch.cond`` or the like calls a module: torch compiles what they call, hooks and all.
    """
    profile = CallProfile()
    tensors = tensors_in(leaves_of((args, kwargs)))
    counted = LiveBytes([*module.parameters(), *module.buffers(), *tensors], _has_storage)
    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(partial(_starts, profile, counted, name)))
        handles.append(part.register_forward_hook(partial(_ends, profile, name)))
    try:
        with torch.set_grad_enabled(keep_grad), counted:
            run(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    profile.peak = counted.live.peak + sum(round_up(tensor.nbytes) for tensor in tensors)
    return profile


def _starts(profile: CallProfile, counted: LiveBytes, name: str, _module: nn.Module, _args: Any) -> None:
    if counted.within is not None:
        raise CaptureError(
            f"torch.{counted.within} calls {name!r}: in a model without a graph it may call no module. Write "
            "it in plain Python"
        )
    if name not in profile.order:
        profile.order.append(name)


def _ends(profile: CallProfile, name: str, _module: nn.Module, _args: Any, result: Any) -> None:
    tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
    profile.outputs[name] = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
