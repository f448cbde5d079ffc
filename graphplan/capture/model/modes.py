"""Modes: all that a model's result depends on besides its inputs and weights.

A graph serves only the modes in which it was traced. They do not show in the inputs::

    model.eval()                        whether each module trains
    with model.disable_adapter(): ...   which PEFT adapters are enabled, active and merged
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
from graphplan.capture.structure import PLAIN_TYPES, leaves_of
from graphplan.devices.topology import CPU, SIMULATED
from graphplan.errors import InputError, PlanError

_training = attrgetter("training")
_SAVING_WRITES = {"architectures", "dtype"}  # save_pretrained sets them in a configuration


@dataclass(frozen=True, slots=True)
class Differentiation:
    """The differentiation of a training step: parameters and results.

    Attributes:
        trained: first names of the parameters that require a gradient.
        outputs: names of the results that backward starts from; None: the loss, or else all with a gradient.
    """

    trained: tuple[str, ...]
    outputs: tuple[str, ...] | None = None

    def of(self, module: nn.Module, inputs: Any) -> Differentiation | None:
        """Return a copy with the parameters that now require a gradient; None if nothing requires one."""
        trained = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
        tensors = (leaf for leaf in leaves_of(inputs) if isinstance(leaf, torch.Tensor))
        is_needed = trained or any(tensor.requires_grad for tensor in tensors)
        return replace(self, trained=trained) if is_needed else None


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes of a tree of modules.

    Attributes:
        training: whether each module trains, in the order of ``modules()``.
        adapters: for each adapter layer: whether its adapters are disabled, the active and the merged ones.
        configs: for each configuration, its plain values by name.
        step: the differentiation of a training step; None for a forward pass alone.
        autocast: the dtype of autocast; None where it is off.
        default: torch's default dtype.
    """

    training: tuple[bool, ...]
    adapters: tuple[tuple[bool, tuple[str, ...], tuple[str, ...]], ...] = ()
    configs: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    step: Differentiation | None = None
    autocast: torch.dtype | None = None
    default: torch.dtype = field(default_factory=torch.get_default_dtype)

    def difference(self, other: Modes) -> str | None:
        """Return a text that says how the modes differ from ``other``; None if they do not."""
        if self.adapters != other.adapters:
            return "adapters were activated, merged or disabled"
        for new, old in zip(self.configs, other.configs, strict=False):
            for name in sorted(new.keys() | old.keys()):
                if new.get(name) != old.get(name):
                    return f"config.{name} is {new.get(name)!r}, but was {old.get(name)!r}"
        if self.autocast != other.autocast:
            return "autocast has changed"
        if self.default != other.default:
            return f"torch's default dtype is {self.default}, but was {other.default}"
        if self.step != other.step:
            return "the parameters that require gradients have changed, or gradients were switched on or off"
        return None if self.training == other.training else "its modules were switched by train() or eval()"


class ModeReader:
    """Reads the modes of one module quickly and repeatedly. It does not keep the module itself alive.

    Args:
        module: the module whose modes are read.
        device_types: types of the devices that compute: only their autocast counts.
    """

    def __init__(self, module: nn.Module, device_types: Sequence[str] = ()) -> None:
        self._device_types = frozenset(device_types)
        self._parts = list(module.modules())[1:]
        self._adapted = [part for part in self._parts if is_adapted(part)]
        self._configs = _configs([module, *self._parts])
        self._last_read: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}) for _ in self._configs]
        self._peft = vars(module).get("peft_config")

    def read(self, module: nn.Module) -> Modes:
        """Return the current modes.

        Raises:
            PlanError: PEFT has set ``peft_config`` of the module since this reader was made.
            InputError: autocast is on with different dtypes for two of the device types.
        """
        if vars(module).get("peft_config") is not self._peft:
            raise PlanError(
                f"adapters were put into {type(module).__name__} after it was placed: take them out (by "
                "unload() of PEFT's model), put them into the plain model that graphplan.unplace returns, "
                "and partition that"
            )
        training = (module.training, *map(_training, self._parts))
        adapters = tuple(adapters_of(part) for part in self._adapted)
        configs = tuple(map(self._values, range(len(self._configs))))
        return Modes(training, adapters, configs, autocast=autocast_of(self._device_types))

    def _values(self, index: int) -> dict[str, Any]:
        """Return the plain values of a configuration; the same object while they do not change."""
        table = vars(self._configs[index])
        values, (before, plain) = tuple(table.values()), self._last_read[index]
        same = len(values) == len(before) and all(map(is_, values, before))
        contained = (name for name in plain if type(plain[name]) not in PLAIN_TYPES)
        if not same or any(table[name] != plain[name] for name in contained):
            modes = {name: value for name, value in table.items() if name not in _SAVING_WRITES}
            plain = {name: copy.deepcopy(value) for name, value in modes.items() if is_plain(value)}
            self._last_read[index] = values, plain
        return plain

    def write(self, module: nn.Module, modes: Modes) -> None:
        """Set the modes of the module, or of a copy of it.

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
    """Return the dtype of autocast on these device types; None where it is off."""
    types = {CPU if one == SIMULATED else one for one in device_types}  # simulated devices compute on the CPU
    dtypes = {torch.get_autocast_dtype(one) for one in types if torch.is_autocast_enabled(one)}
    if len(dtypes) > 1:
        raise InputError(
            f"autocast is on with {' and '.join(sorted(map(str, dtypes)))} on devices of one model: use one"
        )
    return next(iter(dtypes), None)


def _require_adapters(layers: Iterable[Any], active: Iterable[str]) -> None:
    known = {
        adapter
        for layer in layers
        for table in layer.adapter_layer_names
        for adapter in getattr(layer, table, ())
    }
    for name in sorted(set(active) - known):
        raise PlanError(
            f"adapter {name!r} was put into the model after it was placed: partition the model with it"
        )


def _configs(parts: Iterable[nn.Module]) -> list[Any]:
    """Return the configurations that modules hold, each once."""
    configs = (vars(part).get("config") for part in parts)
    return list({id(one): one for one in configs if hasattr(one, "to_dict")}.values())
