"""One call of a module, run as it is: which submodules run, what they return, what is alive at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan.alignment import round_up

__all__ = ["CallProfile", "profile_call"]


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
        self.known = {_storage_of(tensor) for tensor in known}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for leaf in pytree.tree_leaves(out):
            key = _storage_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if key is not None and key not in self.known and key not in self.live:
                storage = leaf.untyped_storage()
                self.live[key] = (StorageWeakRef(storage), round_up(storage.nbytes()))
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return out


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper without one
        return None


def profile_call(
    module: nn.Module, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> CallProfile:
    """Run a module, or what calls it, under ``torch.no_grad()`` and watch; what it raises passes through."""
    profile = CallProfile()
    handles = []
    for name, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(_starts(profile, name)))
        handles.append(part.register_forward_hook(_ends(profile, name)))
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    try:
        with torch.no_grad(), _LiveBytes([*module.parameters(), *module.buffers(), *tensors]) as live:
            profile.result = run(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    profile.peak = live.peak + sum(round_up(tensor.nbytes) for tensor in tensors)
    return profile


def _starts(profile: CallProfile, name: str) -> Any:
    def hook(_module: nn.Module, _args: Any) -> None:
        if name not in profile.order:
            profile.order.append(name)

    return hook


def _ends(profile: CallProfile, name: str) -> Any:
    def hook(_module: nn.Module, _args: Any, result: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        profile.outputs[name] = sum(leaf.numel() * leaf.element_size() for leaf in tensors)

    return hook
