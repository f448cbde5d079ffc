"""Weights on their devices: the placed copy of a model.

Each accelerator has one allocation for all weights that live there, as large as they are. On the CPU
parameters share the caller's memory; what a checkpoint fills is one mapping, those that are streamed
next to each other, so that they need not be copied together later.
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
from graphplan.capture.parameter_notes import noted_tensors, notes_of
from graphplan.devices.topology import CPU, round_up
from graphplan.errors import InputError
from graphplan.message_text import readable_bytes
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.memory.allocation import allocating
from graphplan.runtime.memory.arena import Arena, is_plain, moved
from graphplan.runtime.memory.host_pages import HostPages, Pages
from graphplan.warnings import warn

_PROGRESS_FROM = 1 << 30  # bytes above which placing takes long enough to watch

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where weights go.

    Attributes:
        devices: first name of each weight -> its device.
        streamed: those on the CPU that are streamed, in the order in which they are copied.
        pinned: whether a CUDA device copies them.
        mapped: those that stay in their file.
    """

    devices: Mapping[str, torch.device]
    streamed: Sequence[str] = ()
    pinned: bool = False
    mapped: frozenset[str] = frozenset()


def place_model(
    model: nn.Module,
    weights: ModelWeights,
    layout: Layout,
    placed_class: Callable[[type[nn.Module]], type[nn.Module]] = lambda cls: cls,
    source: Checkpoint | None = None,
    *,
    owned: bool = False,
    become: Callable[[nn.Module, Mapping[int, Any]], nn.Module] = copy_to_run,
) -> tuple[nn.Module, list[Pages]]:
    """A copy of ``model`` whose weights are on their devices.

    Parameters that live on the CPU share their memory with the caller's; buffers do not, since calls
    may write to them.

    Args:
        model: left as it is.
        weights: of ``model``.
        layout: where they go.
        placed_class: from the class of what ``become`` makes to that of what is returned.
        source: where the data is read from instead of the model (a checkpoint).
        owned: whether ``model`` gives its weights away, so that what is in place is not copied.
        become: from the model and its placed tensors, by the identity of each, to what is returned: a copy,
            or the model itself as :func:`refilled` or :func:`taken_over`.

    Returns:
        that, and the host memory of its weights that it does not share with the caller's: what a checkpoint
        was read into, and the files that weights are read from at each call.

    Raises:
        InputError: a weight is on the meta device, so there is nothing to place.
        GraphplanError: a device has no room.
    """
    if source is None:
        require_data(model, weights)
    total = sum(tensor_bytes(t) for name, t in weights.tensors.items() if name not in layout.mapped)
    with (
        torch.no_grad(),
        tqdm(total=total, unit="B", unit_scale=True, desc="placing", disable=total < _PROGRESS_FROM) as bar,
    ):
        placing = _Placing(weights, layout, source, owned, bar.update)
        placing.run()
    memo: dict[int, object] = {}
    for name, tensor in named_tensors(model).items():
        memo[id(tensor)] = like(tensor, placing.placed[weights.first[name]], memo)
    made = become(model, with_attributes(model, memo))
    trace_patched(made)
    files = () if source is None else source.files
    return of_class(made, placed_class(type(made))), [*placing.pages, *files]


def bring_back(
    model: nn.Module, layout: Layout, become: Callable[[nn.Module, Mapping[int, Any]], nn.Module]
) -> None:
    """Bring the weights of each accelerator that is to hold others into host memory: its own is free then.

    Args:
        model: whose weights they are.
        layout: where they are to go.
        become: how the model takes them, as in :func:`place_model`.
    """
    weights = ModelWeights(model)
    here = {name: tensor.device for name, tensor in weights.tensors.items()}
    changed = {
        device
        for name in here
        if here[name] != layout.devices[name]
        for device in (here[name], layout.devices[name])
        if device.type != CPU
    }
    become(model, in_host_memory(model, weights, [name for name in here if here[name] in changed]))


def in_host_memory(model: nn.Module, weights: ModelWeights, names: Iterable[str]) -> dict[int, Any]:
    """By the identity of each tensor of a model, what it is once these weights of it are in CPU memory.

    What is one weight stays one, whether it is one object or two over one memory.
    """
    brought = {name: weights.tensors[name].detach().cpu() for name in names}
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(model).items():
        memo[id(tensor)] = like(tensor, brought.get(weights.first[name], tensor), memo)
    return with_attributes(model, memo)


@dataclass(slots=True)
class _Placing:
    """Finds a place for every weight, then fills the places."""

    weights: ModelWeights
    layout: Layout
    source: Checkpoint | None
    owned: bool
    progress: Progress
    placed: dict[str, torch.Tensor] = field(default_factory=dict)
    pages: list[HostPages] = field(default_factory=list)

    def run(self) -> None:
        together: dict[torch.device, list[str]] = {}
        for name, tensor in self.weights.tensors.items():
            device = self.layout.devices[name]
            if self.source is not None and name in self.layout.mapped:
                self.placed[name] = self.source.map(name)
            elif self._is_shared(name, tensor, device):
                self.placed[name] = tensor if self.owned else tensor.detach()
                self.progress(tensor_bytes(tensor))
            elif is_plain(tensor) and (device.type != CPU or self._is_read(name)):
                together.setdefault(device, []).append(name)
            else:
                self.placed[name] = self._alone(name, tensor, device)
        for device, names in together.items():
            self._reserve(device, names)
        self._fill([name for names in together.values() for name in names])

    def _is_read(self, name: str) -> bool:
        return self.source is not None and name in self.source

    def _is_shared(self, name: str, tensor: torch.Tensor, device: torch.device) -> bool:
        ours = self.owned or (self.source is None and isinstance(tensor, nn.Parameter))
        return ours and tensor.device == device and not self._is_read(name)

    def _alone(self, name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A weight with an allocation of its own: what wraps other tensors, and buffers on the CPU."""
        data = tensor.detach()
        if self.source is not None and name in self.source:
            data = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.source.read({name: data}, self.progress)
        else:
            self.progress(tensor_bytes(tensor))
        with allocating(device, f"{name!r} of {readable_bytes(tensor_bytes(tensor))}"):
            return moved(data, device)

    def _reserve(self, device: torch.device, names: Sequence[str]) -> None:
        if device.type != CPU:
            self._cut(names, Arena(device, self._bytes(names)))
            return
        streamed = [name for name in self.layout.streamed if name in set(names)]
        others = [name for name in names if name not in set(streamed)]
        for group, pinned in ((streamed, self.layout.pinned), (others, False)):
            if group:
                self.pages.append(HostPages(self._bytes(group), pinned=pinned))
                self._cut(group, self.pages[-1])

    def _bytes(self, names: Sequence[str]) -> int:
        return sum(round_up(tensor_bytes(self.weights.tensors[name])) for name in names)

    def _cut(self, names: Sequence[str], memory: Arena | HostPages) -> None:
        for name in names:
            self.placed[name] = memory.reserve(self.weights.tensors[name])

    def _fill(self, names: Sequence[str]) -> None:
        read = [name for name in names if self._is_read(name)]
        if self.source is not None and read:
            self.source.read({name: self.placed[name] for name in read}, self.progress)
        for name in names:
            if not self._is_read(name):
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


def refilled(model: nn.Module, placed: Mapping[int, Any]) -> nn.Module:
    """The model itself with these in place of its tensors, which calls that are under way still read.

    Also in other attributes, as in the lists of recurrent layers: what stayed there would hold on to memory.
    """
    for part in model.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = placed[id(tensor)]
    for parameter in model.parameters():
        for _, table, name in noted_tensors(parameter):
            table[name] = placed.get(id(table[name]), table[name])
    for part, name, found in plain_data(model):
        for table, key in ((vars(part), name), *((table, key) for _, table, key in found.entries)):
            if id(table[key]) in placed and not isinstance(table, tuple):
                table[key] = placed[id(table[key])]
    return model


def taken_over(model: nn.Module, placed: Mapping[int, Any]) -> nn.Module:
    """The model itself, each parameter the object that it was: an optimizer may hold it by now.

    Source: ``torch.nn.Module._apply``.
    """
    own, lost = dict[int, nn.Parameter](), list[str]()
    for name, one in model.named_parameters():
        if isinstance(one, nn.Parameter):  # no tensor that ``torch.func.functional_call`` has put there
            own[id(one)] = _over(one, placed[id(one)])
            lost += [name] if own[id(one)] is not one and one.requires_grad else []
    if lost:
        first = ", ".join(map(repr, lost[:3])) + (", ..." if lost[3:] else "")
        warn(
            f"something holds on to {first}: from this call on the model has others in their place; make an "
            "optimizer after it"
        )
    return refilled(model, {**placed, **own})


def _over(parameter: nn.Parameter, placed: nn.Parameter) -> nn.Parameter:
    """The same object over the memory of another; that one, where torch cannot."""
    if placed is parameter:
        return parameter
    gradient, parameter.grad = parameter.grad, None
    made, notes = parameter, notes_of(parameter)
    try:
        if may_share_data(parameter, placed):
            parameter.data = placed.data
        else:
            torch.utils.swap_tensors(parameter, placed)
    except RuntimeError:  # a weak reference, as an LSTM has, or a graph of autograd
        parameter.grad, made = gradient, placed
    made.grad = None if gradient is None else gradient.to(made.device)
    vars(made).update(notes)
    return made


def with_attributes(model: nn.Module, placed: Mapping[int, Any]) -> dict[int, Any]:
    """What stands for the tensors of a model, and for attributes that lie in the memory of one as it does."""
    named = {identity(tensor): tensor for tensor in named_tensors(model).values()}
    plain = {id(tensor): named.get(identity(tensor)) for *_, tensor in plain_tensors(model)}
    shared = {key: placed[id(one)].detach() for key, one in plain.items() if one is not None}
    return {**shared, **placed}


def like(original: torch.Tensor, placed: torch.Tensor, memo: dict[int, Any]) -> Any:
    """``placed`` as what ``original`` was; one object for one object, so that ties stay ties."""
    if id(original) in memo:
        return memo[id(original)]
    if placed is original:
        return original
    if isinstance(original, nn.Parameter):
        made = nn.Parameter(placed, original.requires_grad and not placed.is_inference())
        copy_gradient_hooks(original, made)
        vars(made).update(notes_of(original))
        if type(made) is nn.Parameter and issubclass(type(original), nn.Parameter):
            made.__class__ = type(original)
        return made
    if original.requires_grad:
        return placed.requires_grad_()
    return placed.detach() if is_view(placed) else placed  # forward may write to it with gradients
