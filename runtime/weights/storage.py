"""Place the weights of a model on their devices.

Each accelerator has one allocation of the total size of the weights that reside there. On the CPU,
parameters share the caller's memory. Weights that are read from a checkpoint are in mappings of host memory;
streamed ones are adjacent, so that they need not be gathered later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from graphplan._compat.torch import copy_gradient_hooks, is_view, may_share_data
from graphplan.capture.changes.attribute_data import plain_data, plain_tensors
from graphplan.capture.model.model_weights import ModelWeights, identity, named_tensors, tensor_bytes
from graphplan.capture.model.shared_attributes import copy_to_run, of_class, trace_patched
from graphplan.capture.parameter_attributes import attribute_tensors, custom_attributes
from graphplan.devices.topology import CPU, round_up
from graphplan.errors import InputError
from graphplan.message_text import readable_bytes
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.memory.allocation import allocating
from graphplan.runtime.memory.arena import Arena, is_plain, moved
from graphplan.runtime.memory.host_pages import HostPages, Pages
from graphplan.warnings import warn

_PROGRESS_FROM = 1 << 30  # bytes above which placing takes long enough for a progress bar

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Where each weight is placed.

    Attributes:
        devices: first name of each weight -> its device.
        streamed: weights on the CPU that are streamed, in the order in which they are copied.
        pinned: whether a CUDA device copies the streamed weights.
        mapped: weights that stay in their file.
    """

    devices: Mapping[str, torch.device]
    streamed: Sequence[str] = ()
    pinned: bool = False
    mapped: frozenset[str] = frozenset()


def place_model(
    model: nn.Module,
    weights: ModelWeights,
    layout: WeightLayout,
    placed_class: Callable[[type[nn.Module]], type[nn.Module]] = lambda cls: cls,
    source: Checkpoint | None = None,
    *,
    owned: bool = False,
    install: Callable[[nn.Module, Mapping[int, Any]], nn.Module] = copy_to_run,
) -> tuple[nn.Module, list[Pages]]:
    """Return a copy of ``model`` whose weights are on their devices.

    Parameters that reside on the CPU share their memory with the caller's; buffers do not, since forward
    passes may write to them.

    Args:
        model: the model; unchanged unless ``install`` changes it.
        weights: those of ``model``.
        layout: where they are placed.
        placed_class: maps the class of the module that ``install`` returns to the class of the result.
        source: a checkpoint from which the data is read instead of from the model.
        owned: whether ``model`` gives up its weights: those that are on their device already are not copied.
        install: maps the model, and id of each of its tensors -> the placed tensor, to a module: a copy, or
            the model itself as in :func:`replace_tensors` and :func:`replace_parameter_data`.

    Returns:
        the module, and the host memory of weights that it does not share with the caller: memory that a
        checkpoint was read into, and mapped files.

    Raises:
        InputError: a weight is on the meta device, so that there is no data to place.
        GraphplanError: a device has no room.
    """
    if source is None:
        require_data(model, weights)
    total = sum(tensor_bytes(t) for name, t in weights.tensors.items() if name not in layout.mapped)
    with (
        torch.no_grad(),
        tqdm(total=total, unit="B", unit_scale=True, desc="placing", disable=total < _PROGRESS_FROM) as bar,
    ):
        data = Checkpoint(weights, {}) if source is None else source
        placer = _WeightPlacer(weights, layout, data, bar.update, owned=owned, shares=source is None)
        placer.run()
    memo: dict[int, object] = {}
    for name, tensor in named_tensors(model).items():
        memo[id(tensor)] = as_type_of(tensor, placer.placed[weights.first[name]], memo)
    placed_model = install(model, with_attributes(model, memo))
    trace_patched(placed_model)
    return of_class(placed_model, placed_class(type(placed_model))), [*placer.pages, *data.files]


def move_changed_devices_to_host(
    model: nn.Module, layout: WeightLayout, install: Callable[[nn.Module, Mapping[int, Any]], nn.Module]
) -> None:
    """Move the weights of each accelerator that gains or loses weights to host memory, to free its memory.

    Args:
        model: a placed model.
        layout: where its weights are placed next.
        install: puts the tensors into the model, as in :func:`place_model`.
    """
    weights = ModelWeights(model)
    devices = {name: tensor.device for name, tensor in weights.tensors.items()}
    changed = {
        device
        for name in devices
        if devices[name] != layout.devices[name]
        for device in (devices[name], layout.devices[name])
        if device.type != CPU
    }
    install(model, in_host_memory(model, weights, [name for name in devices if devices[name] in changed]))


def in_host_memory(model: nn.Module, weights: ModelWeights, names: Iterable[str]) -> dict[int, Any]:
    """Return id of each tensor of a model -> the tensor after these weights are moved to CPU memory.

    Shared weights stay shared, whether they are one object or two over the same memory.
    """
    on_host = {name: weights.tensors[name].detach().cpu() for name in names}
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(model).items():
        memo[id(tensor)] = as_type_of(tensor, on_host.get(weights.first[name], tensor), memo)
    return with_attributes(model, memo)


@dataclass(slots=True)
class _WeightPlacer:
    """Places every weight: reserves memory for all, then fills it.

    Parameters that are on their device already share the caller's memory if the model is ``owned``, or if it
    ``shares`` them.
    """

    weights: ModelWeights
    layout: WeightLayout
    source: Checkpoint
    progress: Progress
    owned: bool
    shares: bool
    placed: dict[str, torch.Tensor] = field(default_factory=dict)
    pages: list[HostPages] = field(default_factory=list)

    def run(self) -> None:
        grouped: dict[torch.device, list[str]] = {}
        for name, tensor in self.weights.tensors.items():
            device = self.layout.devices[name]
            if name in self.layout.mapped and name in self.source:  # an unpickled model has no file
                self.placed[name] = self.source.map(name)
            elif self._keeps_memory(name, tensor, device):
                self.placed[name] = tensor if self.owned else tensor.detach()
                self.progress(tensor_bytes(tensor))
            elif is_plain(tensor) and (device.type != CPU or name in self.source):
                grouped.setdefault(device, []).append(name)
            else:
                self.placed[name] = self._place_alone(name, tensor, device)
        for device, names in grouped.items():
            self._reserve(device, names)
        self._fill([name for names in grouped.values() for name in names])

    def _keeps_memory(self, name: str, tensor: torch.Tensor, device: torch.device) -> bool:
        ours = self.owned or (self.shares and isinstance(tensor, nn.Parameter))
        return ours and tensor.device == device and name not in self.source

    def _place_alone(self, name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy with its own allocation, for tensors that are not plain or go from model to CPU."""
        data = tensor.detach()
        if name in self.source:
            data = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.source.read({name: data}, self.progress)
        else:
            self.progress(tensor_bytes(tensor))
        with allocating(device, f"{name!r} of {readable_bytes(tensor_bytes(tensor))}"):
            return moved(data, device)

    def _reserve(self, device: torch.device, names: Sequence[str]) -> None:
        if device.type != CPU:
            self._reserve_each(names, Arena(device, self._bytes(names)))
            return
        streamed = [name for name in self.layout.streamed if name in set(names)]
        others = [name for name in names if name not in set(streamed)]
        for group, pinned in ((streamed, self.layout.pinned), (others, False)):
            if group:
                self.pages.append(HostPages(self._bytes(group), pinned=pinned))
                self._reserve_each(group, self.pages[-1])

    def _bytes(self, names: Sequence[str]) -> int:
        return sum(round_up(tensor_bytes(self.weights.tensors[name])) for name in names)

    def _reserve_each(self, names: Sequence[str], memory: Arena | HostPages) -> None:
        for name in names:
            self.placed[name] = memory.reserve(self.weights.tensors[name])

    def _fill(self, names: Sequence[str]) -> None:
        if in_source := {name: self.placed[name] for name in names if name in self.source}:
            self.source.read(in_source, self.progress)
        for name in names:
            if name not in self.source:
                self.placed[name].copy_(self.weights.tensors[name].detach())
                self.progress(tensor_bytes(self.weights.tensors[name]))


def require_data(model: nn.Module, weights: ModelWeights) -> None:
    """Raise InputError if a weight is on the meta device, where there is no data to place."""
    empty = [name for name, tensor in weights.tensors.items() if tensor.device.type == "meta"]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise InputError(
            f"{type(model).__name__} has no data for {empty[0]!r}{more}: they are on the meta device. "
            "Load the weights first, or use graphplan.plan, which needs none"
        )


def replace_tensors(model: nn.Module, placed: Mapping[int, Any]) -> nn.Module:
    """Replace the tensors of the model itself; forward passes that are running still read the old ones.

    Other attributes are replaced too, such as the lists of recurrent layers: they would keep memory alive.
    """
    for part in model.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = placed[id(tensor)]
    for parameter in model.parameters():
        for _, table, name in attribute_tensors(parameter):
            table[name] = placed.get(id(table[name]), table[name])
    for part, name, attribute in plain_data(model):
        for table, key in ((vars(part), name), *((table, key) for _, table, key in attribute.entries)):
            if id(table[key]) in placed and not isinstance(table, tuple):
                table[key] = placed[id(table[key])]
    return model


def replace_parameter_data(model: nn.Module, placed: Mapping[int, Any]) -> nn.Module:
    """Replace the data of the model's own parameters: an optimizer may already refer to the objects.

    Source: ``torch.nn.Module._apply``.
    """
    by_id, replaced = dict[int, nn.Parameter](), list[str]()
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.Parameter):  # not a tensor of ``torch.func.functional_call``
            current = by_id[id(parameter)] = _move_data(parameter, placed[id(parameter)])
            if current is not parameter and parameter.requires_grad:
                replaced.append(name)
    if replaced:
        first = ", ".join(map(repr, replaced[:3])) + (", ..." if replaced[3:] else "")
        warn(
            f"another object holds on to {first}: from this call on the model has new parameters in their "
            "place. Create the optimizer after this call"
        )
    return replace_tensors(model, {**placed, **by_id})


def _move_data(parameter: nn.Parameter, placed: nn.Parameter) -> nn.Parameter:
    """Return ``parameter`` with the data of ``placed``, or ``placed`` if torch cannot replace the data."""
    if placed is parameter:
        return parameter
    gradient, parameter.grad = parameter.grad, None
    result, notes = parameter, custom_attributes(parameter)
    try:
        if may_share_data(parameter, placed):
            parameter.data = placed.data
        else:
            torch.utils.swap_tensors(parameter, placed)
    except RuntimeError:  # a weak reference, as an LSTM has, or an autograd graph refers to it
        parameter.grad, result = gradient, placed
    result.grad = None if gradient is None else gradient.to(result.device)
    vars(result).update(notes)
    return result


def with_attributes(model: nn.Module, placed: Mapping[int, Any]) -> dict[int, Any]:
    """Extend ``placed`` to plain attributes that share memory and layout with a tensor of the model."""
    named = {identity(tensor): tensor for tensor in named_tensors(model).values()}
    plain = {id(tensor): named.get(identity(tensor)) for *_, tensor in plain_tensors(model)}
    shared = {key: placed[id(t)].detach() for key, t in plain.items() if t is not None}
    return {**shared, **placed}


def as_type_of(original: torch.Tensor, placed: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Return ``placed`` with the type of ``original``: one object per original, so weights stay shared."""
    if id(original) in memo:
        return memo[id(original)]
    if placed is original:
        return original
    if isinstance(original, nn.Parameter):
        parameter = nn.Parameter(placed, original.requires_grad and not placed.is_inference())
        copy_gradient_hooks(original, parameter)
        vars(parameter).update(custom_attributes(original))
        if type(parameter) is nn.Parameter and issubclass(type(original), nn.Parameter):
            parameter.__class__ = type(original)
        return parameter
    if original.requires_grad:
        return placed.requires_grad_()
    return placed.detach() if is_view(placed) else placed  # forward may write to it with gradients
