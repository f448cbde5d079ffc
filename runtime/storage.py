"""Weights on their devices: the placed copy of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import nn
from tqdm.auto import tqdm

from graphplan.errors import GraphplanError, InputError, readable_bytes
from graphplan.twin import ModelWeights, tensor_bytes

__all__ = ["TensorSource", "place_model", "require_data"]


class TensorSource(Protocol):
    """Where the data of weights comes from."""

    def read(self, name: str) -> torch.Tensor:
        """The data of the weight with this first name, on the CPU."""
        ...


_PROGRESS_FROM = 1 << 30  # bytes above which placing takes long enough to watch


def place_model(
    model: nn.Module,
    weights: ModelWeights,
    devices: Mapping[str, torch.device],
    placed_class: Callable[[type[nn.Module]], type[nn.Module]] = lambda cls: cls,
    source: TensorSource | None = None,
    *,
    owned: bool = False,
) -> nn.Module:
    """A copy of ``model`` whose weights are on their devices.

    Parameters that live on the CPU share their memory with the caller's; buffers do not, since calls
    may write to them.

    Args:
        model: left as it is.
        weights: of ``model``.
        devices: first name of each weight -> where it goes.
        placed_class: from the class of the model to that of the copy.
        source: where the data is read from instead of the model (a checkpoint).
        owned: whether ``model`` gives its weights away, so that what is in place is not copied.

    Raises:
        InputError: a weight is on the meta device, so there is nothing to place.
    """
    if source is None:
        require_data(model, weights)
    placed: dict[str, torch.Tensor] = {}
    total = sum(tensor_bytes(tensor) for tensor in weights.tensors.values())
    with (
        torch.no_grad(),
        tqdm(total=total, unit="B", unit_scale=True, desc="placing", disable=total < _PROGRESS_FROM) as bar,
    ):
        for name, tensor in weights.tensors.items():
            data = tensor if source is None else source.read(name)
            shared = owned or (source is None and isinstance(tensor, nn.Parameter))
            placed[name] = _place(name, data, devices[name], shared=shared)
            bar.update(tensor_bytes(tensor))
    memo: dict[int, object] = {}
    for name, tensor in _all_tensors(model):
        memo[id(tensor)] = _like(tensor, placed[weights.first[name]], memo)
    copied = copy.deepcopy(model, memo)
    copied.__dict__.pop("forward", None)  # a patched forward was traced; the class's is ours
    copied.__class__ = placed_class(type(model))
    return copied


def _all_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def require_data(model: nn.Module, weights: ModelWeights) -> None:
    """Raise InputError if a weight is on the meta device, where there is no data to place."""
    empty = [name for name, tensor in weights.tensors.items() if tensor.device.type == "meta"]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise InputError(
            f"{type(model).__name__} has no data for {empty[0]!r}{more}: they are on the meta device. "
            "Load the weights first, or use graphplan.plan, which needs none"
        )


def _place(name: str, tensor: torch.Tensor, device: torch.device, *, shared: bool) -> torch.Tensor:
    data = tensor.detach()
    if data.device == device and shared:
        return data
    try:
        return data.to(device, copy=True)
    except torch.OutOfMemoryError as error:
        raise GraphplanError(
            f"{device} has no room for {name!r} of {readable_bytes(tensor_bytes(tensor))}, though the "
            f"budget allows it: something else is on the device. {str(error).splitlines()[0]}"
        ) from error


def _like(original: torch.Tensor, placed: torch.Tensor, memo: dict[int, object]) -> object:
    """``placed`` as what ``original`` was; one object for one object, so that ties stay ties."""
    if id(original) in memo:
        return memo[id(original)]
    if isinstance(original, nn.Parameter):
        return nn.Parameter(placed, original.requires_grad)
    return placed.requires_grad_(original.requires_grad) if original.requires_grad else placed
