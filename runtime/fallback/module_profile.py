"""Profile of one eager forward pass: the order of submodules, their output sizes, the peak of live bytes."""

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
    """Measurements of one forward pass.

    Attributes:
        order: names of submodules, in the order in which they are first called.
        outputs: submodule -> bytes of the tensors that it returned.
        peak: the most bytes that are alive at once, without weights.
    """

    order: list[str] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    peak: int = 0


def _has_storage(leaf: Any) -> bool:
    """Whether this is a tensor with a storage: sparse tensors and some wrappers have none."""
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
    """Profile one call of ``run``, which is the module or calls it; its errors pass through.

    Raises:
        CaptureError: ``torch.cond`` or the like calls a module: torch compiles it, with its hooks.
    """
    profile = CallProfile()
    tensors = tensors_in(leaves_of((args, kwargs)))
    counted = LiveBytes([*module.parameters(), *module.buffers(), *tensors], _has_storage)
    handles = []

    def pre_hook(name: str, _module: nn.Module, _args: Any) -> None:
        if counted.within is not None:
            raise CaptureError(
                f"torch.{counted.within} calls {name!r}: in a model without a graph it may call no module. "
                "Write it in plain Python"
            )
        if name not in profile.order:
            profile.order.append(name)

    def post_hook(name: str, _module: nn.Module, _args: Any, result: Any) -> None:
        tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
        profile.outputs[name] = sum(leaf.numel() * leaf.element_size() for leaf in tensors)

    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(partial(pre_hook, name)))
        handles.append(part.register_forward_hook(partial(post_hook, name)))
    try:
        with torch.set_grad_enabled(keep_grad), counted:
            run(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    profile.peak = counted.live.peak + sum(round_up(tensor.nbytes) for tensor in tensors)
    return profile
