"""What the code of a model goes by beside its inputs: training or not, adapters, configurations.

A graph is of the modes in which it was traced. All of these change a result, and none shows in the inputs::

    model.eval()                        whether each module trains
    with model.disable_adapter(): ...   which adapters of PEFT are on, active and merged
    model.config.use_cache = False      the plain values of the configurations that modules hold
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from graphplan._compat.peft import adapters_of, is_adapted, set_adapters
from graphplan.capture.changes.attribute_data import is_plain
from graphplan.capture.structure import leaves_of
from graphplan.devices.topology import CPU, SIMULATED
from graphplan.errors import InputError, PlanError

_CONTAINERS = (list, dict, set, tuple)
_training = attrgetter("training")


@dataclass(frozen=True, slots=True)
class Differentiation:
    """What is differentiated in a training step.

    Attributes:
        trained: first names of the parameters that require a gradient.
        outputs: names of the results that backward starts from; None for the loss, or all with a gradient.
    """

    trained: tuple[str, ...]
    outputs: tuple[str, ...] | None = None

    def of(self, module: nn.Module, inputs: Any) -> Differentiation | None:
        """Of a call of these inputs; None where neither they nor a parameter require a gradient now."""
        trained = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
        given = (leaf for leaf in leaves_of(inputs) if isinstance(leaf, torch.Tensor))
        needed = trained or any(tensor.requires_grad for tensor in given)
        return replace(self, trained=trained) if needed else None


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes of a tree of modules.

    Attributes:
        training: for each module, in the order of ``modules()``.
        adapters: for each layer that adapters were put into: whether they are off, the active and the merged.
        configs: for each configuration, its plain values by name.
        step: what is differentiated, in a training step; None for a forward pass alone.
        autocast: the type that autocast is on for; None where it is off.
        default: the type of tensors that are made without one.
    """

    training: tuple[bool, ...]
    adapters: tuple[tuple[bool, tuple[str, ...], tuple[str, ...]], ...] = ()
    configs: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    step: Differentiation | None = None
    autocast: torch.dtype | None = None
    default: torch.dtype = field(default_factory=torch.get_default_dtype)

    def difference(self, other: Modes) -> str | None:
        """What is not as in ``other``, for people; None where nothing is."""
        if self.adapters != other.adapters:
            return "other adapters are active, merged or disabled"
        for mine, theirs in zip(self.configs, other.configs, strict=False):
            for name in sorted(mine.keys() | theirs.keys()):
                if mine.get(name) != theirs.get(name):
                    return f"config.{name} is {mine.get(name)!r}, and was {theirs.get(name)!r}"
        if self.autocast != other.autocast:
            return "autocast has changed"
        if self.default != other.default:
            return f"torch's default dtype is {self.default}, and was {other.default}"
        if self.step != other.step:
            return "other parameters require gradients, or gradients are on or off"
        return None if self.training == other.training else "its modules train, or do not any more"


class ModeReader:
    """Reads the modes of one module quickly, again and again. It does not hold on to the module itself.

    Args:
        module: whose modes are read.
        device_types: of the devices that compute, whose autocast counts.
    """

    def __init__(self, module: nn.Module, device_types: Sequence[str] = ()) -> None:
        self._device_types = frozenset(device_types)
        self._parts = list(module.modules())[1:]
        self._adapted = [part for part in self._parts if is_adapted(part)]
        self._configs = _configs([module, *self._parts])
        self._known: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}) for _ in self._configs]
        self._peft = vars(module).get("peft_config")

    def read(self, module: nn.Module) -> Modes:
        """The modes as they are now.

        Raises:
            PlanError: PEFT has put adapters into the module since this reader was made.
            InputError: autocast is on for two of the device types, with different types.
        """
        if vars(module).get("peft_config") is not self._peft:
            raise PlanError(
                f"adapters were put into {type(module).__name__} after it was placed: put them into the "
                "original model, and partition that"
            )
        training = (module.training, *map(_training, self._parts))
        adapters = tuple(adapters_of(part) for part in self._adapted)
        configs = tuple(map(self._values, range(len(self._configs))))
        return Modes(training, adapters, configs, autocast=autocast_of(self._device_types))

    def _values(self, index: int) -> dict[str, Any]:
        """The plain values of a configuration; the same object while they are the same."""
        table = vars(self._configs[index])
        values, (known, plain) = tuple(table.values()), self._known[index]
        same = len(values) == len(known) and all(map(is_, values, known))
        if not same or any(table[name] != plain[name] for name in plain if type(plain[name]) in _CONTAINERS):
            plain = {name: _as_read(name, value) for name, value in table.items() if _is_mode(name, value)}
            self._known[index] = values, plain
        return plain

    def write(self, module: nn.Module, modes: Modes) -> None:
        """Put a module, or a copy of that which the modes are of, into these modes.

        Raises:
            PlanError: an adapter is active that the module does not have.
        """
        for part, training in zip((module, *self._parts), modes.training, strict=True):
            part.training = training
        _require_adapters(self._adapted, {name for _, active, _ in modes.adapters for name in active})
        for layer, (off, active, merged) in zip(self._adapted, modes.adapters, strict=True):
            set_adapters(layer, off, active, merged)
        for config, plain in zip(self._configs, modes.configs, strict=False):
            table = vars(config)
            for name, value in plain.items():
                if name not in table or table[name] != value:
                    table[name] = copy.deepcopy(value)


def autocast_of(device_types: Iterable[str]) -> torch.dtype | None:
    """The type that autocast is on for, on any of these device types."""
    kinds = {CPU if kind == SIMULATED else kind for kind in device_types}  # simulated values are the CPU's
    found = {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    if len(found) > 1:
        raise InputError(
            f"autocast is on with {' and '.join(sorted(map(str, found)))} on devices of one model: use one"
        )
    return next(iter(found), None)


def _require_adapters(layers: Iterable[Any], active: Iterable[str]) -> None:
    there = {
        adapter
        for layer in layers
        for table in layer.adapter_layer_names
        for adapter in getattr(layer, table, ())
    }
    for name in sorted(set(active) - there):
        raise PlanError(
            f"adapter {name!r} was put into the model after it was placed: partition the model with it"
        )


def _is_mode(name: str, value: Any) -> bool:
    """Whether code may go by it; saving a model writes its class's name."""
    return is_plain(value) and name != "architectures"


def _as_read(name: str, value: Any) -> Any:
    """A value of a configuration; saving a model writes its type of numbers as text."""
    if name == "dtype" and isinstance(value, str):
        return getattr(torch, value, value)  # what is no type of torch's stays text
    return copy.deepcopy(value)


def _configs(parts: Iterable[nn.Module]) -> list[Any]:
    """The configurations that modules hold, each once."""
    held = (vars(part).get("config") for part in parts)
    return list({id(one): one for one in held if hasattr(one, "to_dict")}.values())
