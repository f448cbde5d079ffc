"""The weights of a model by name: which of them are shared, which share memory, and their bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import is_transformed
from graphplan.capture.parameter_attributes import attribute_tensors, is_own


class ModelWeights:
    """The parameters and buffers of a model by name, with shared weights resolved.

    ``tensors`` maps each weight's first name to its tensor, ``names`` to all its names; ``first`` maps every
    name to the first. ``parameter_attributes`` has the names of tensors in attributes of parameters.
    ``plain`` maps names of module attributes to tensors that are not weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[str, list[str]] = {}
        self.first: dict[str, str] = {}
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.persistent = self.parameters | {
            f"{path}.{name}" if path else name
            for path, part in model.named_modules(remove_duplicate=False)
            for name in part._buffers.keys() - part._non_persistent_buffers_set
        }
        named = named_tensors(model)
        buffers = dict(model.named_buffers(remove_duplicate=False)).keys()
        self.parameter_attributes = named.keys() - self.parameters - buffers
        self.identities: dict[Any, str] = {}
        for name, tensor in named.items():
            first = self.identities.setdefault(identity(tensor), name)
            self.first[name] = first
            self.names.setdefault(first, []).append(name)
            self.tensors.setdefault(first, tensor)
        self.plain = plain_attributes(model)

    def has_rows(self, name: str) -> bool:
        """Whether rows of this weight are contiguous plain tensors with a version counter."""
        tensor = self.tensors[name]
        return is_dense(tensor) and tensor.is_contiguous() and not tensor.is_inference()

    def sharing(self, name: str) -> list[str]:
        """Return other weights, and plain tensors, in the memory of this weight or constant of a trace."""
        tensors = {**self.tensors, **self.plain}
        candidates = [name] if name in tensors else list(self.plain)  # a constant may be any of these
        memories = {one: memory for one in tensors if (memory := memory_of(tensors[one])) is not None}
        return [
            other
            for one in candidates
            for other in memories
            if other != one and memories.get(one) == memories[other]
        ]


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, tensors in attributes of parameters, and buffers, under each of their names.

    An attribute may hold the scales of a quantised weight: ``"linear.weight.quant_state.absmax"``.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tensors = parameters | dict(module.named_buffers(remove_duplicate=False))
    for name, parameter in parameters.items():
        tensors.update((f"{name}.{inner}", table[key]) for inner, table, key in attribute_tensors(parameter))
    return tensors


def plain_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in attributes of modules that are not weights, by name."""
    return {
        f"{path}.{name}" if path else name: value
        for path, part in model.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }


def weight_at(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the parameter or buffer of a name; None if there is none."""
    path, _, own_name = name.rpartition(".")
    part = module.get_submodule(path)
    parameter = part._parameters.get(own_name)
    return part._buffers.get(own_name) if parameter is None else parameter


def weights_now(module: nn.Module) -> Callable[[str], torch.Tensor | None]:
    """Return a function from a name to the module's current weight; it does not keep the module alive."""
    reference = weakref.ref(module)

    def current(name: str) -> torch.Tensor | None:
        alive = reference()
        return None if alive is None else weight_at(alive, name)

    return current


def module_at(root: nn.Module, path: str) -> nn.Module:
    """Return the module at a path under ``root``; add empty modules where there are none."""
    module = root
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


def memory_of(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for two tensors in one storage; None where that is unknown."""
    if not is_dense(tensor) or tensor.device.type == "meta" or not tensor.numel() or is_transformed(tensor):
        return None
    return tensor.device, tensor.untyped_storage().data_ptr()


def identity(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for two tensors that are the same weight: one object, or alike in memory."""
    memory = memory_of(tensor)
    if memory is None:
        return id(tensor)
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain strided one, or a simulated one: neither a wrapper nor sparse."""
    return is_own(tensor) and tensor.layout is torch.strided


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a weight wraps other tensors, as quantised ones do."""
    return hasattr(tensor, "__tensor_flatten__") and not is_own(tensor)


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the innermost tensors of a wrapper; the tensor itself if it is none."""
    if not is_wrapper(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a protocol of torch's
    return [part for name in names for part in inner_tensors(getattr(tensor, name))]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, those of a wrapper's inner tensors included."""
    return sum(part.numel() * part.element_size() for part in inner_tensors(tensor))
