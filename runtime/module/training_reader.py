"""What a call of a placed module differentiates: the parameters that require gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from graphplan.capture.model.modes import Differentiation, needs_portable
from graphplan.capture.structure import leaves_of


class TrainingReader:
    """Reads it from one module quickly, again and again. It does not hold on to the module itself.

    Args:
        outputs: names of the results that backward starts from; None for the loss, or all.
        device_types: of the devices of the plan.
    """

    def __init__(self, outputs: tuple[str, ...] | None, device_types: Sequence[str]) -> None:
        self.outputs, self.device_types = outputs, tuple(device_types)
        self._entries: list[tuple[dict[str, Any], str, str]] = []
        self._last: tuple[tuple[bool, ...], Differentiation] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingReader:
        return TrainingReader(self.outputs, self.device_types)  # of another module

    def read(self, module: nn.Module, inputs: Any) -> Differentiation | None:
        """What is differentiated in a call of these inputs; None where nothing requires a gradient."""
        self._entries = self._entries or list(_entries(module))
        flags = tuple(table[name].requires_grad for table, name, _ in self._entries)
        if self._last is not None and self._last[0] == flags:
            return self._last[1]
        trained = tuple(first for (_, _, first), trains in zip(self._entries, flags, strict=True) if trains)
        found = Differentiation(trained, self.outputs, needs_portable(self.device_types))
        if trained:
            self._last = flags, found
            return found
        tensors = (leaf for leaf in leaves_of(inputs) if isinstance(leaf, torch.Tensor))
        return found if any(tensor.requires_grad for tensor in tensors) else None


def _entries(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, str]]:
    """The dictionary, the name there and the first name of each parameter, shared ones once."""
    seen: set[int] = set()
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield part._parameters, name, f"{path}.{name}" if path else name
