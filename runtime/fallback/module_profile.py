"""One call of a module, run as it is: which submodules run, what they return, what is alive at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan.capture.structure import leaves_of
from graphplan.devices.topology import round_up
from graphplan.ir.liveness import LiveStorages


@dataclass(slots=True)
class CallProfile:
    """What one call showed.

    Attributes:
        order: submodules, by their first call's start.
        outputs: submodule -> bytes of the tensors that it returned.
        peak: the most bytes alive beside weights.
        result: of the call.
    """

    order: list[str] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    peak: int = 0
    result: Any = None


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make, while they live."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.live = LiveStorages(filter(_has_storage, known))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.live.count(filter(_has_storage, leaves_of(out)))
        return out


def _has_storage(leaf: Any) -> bool:
    """Whether this is a tensor with a storage: neither sparse nor a wrapper without one."""
    try:
        return isinstance(leaf, torch.Tensor) and leaf.untyped_storage() is not None
    except (NotImplementedError, RuntimeError):
        return False


def profile_call(
    module: nn.Module, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> CallProfile:
    """Run a module, or what calls it, under ``torch.no_grad()`` and watch; what it raises passes through."""
    profile = CallProfile()
    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(partial(_starts, profile, name)))
        handles.append(part.register_forward_hook(partial(_ends, profile, name)))
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    try:
        with torch.no_grad(), _LiveBytes([*module.parameters(), *module.buffers(), *tensors]) as watched:
            profile.result = run(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    profile.peak = watched.live.peak + sum(round_up(tensor.nbytes) for tensor in tensors)
    return profile


def _starts(profile: CallProfile, name: str, _module: nn.Module, _args: Any) -> None:
    if name not in profile.order:
        profile.order.append(name)


def _ends(profile: CallProfile, name: str, _module: nn.Module, _args: Any, result: Any) -> None:
    tensors = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]
    profile.outputs[name] = sum(leaf.numel() * leaf.element_size() for leaf in tensors)
