"""What a call of a placed module would differentiate: which parameters require gradients, under which autocast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from graphplan.capture.modes import Differentiation
from graphplan.errors import InputError


class TrainingReader:
    """Reads it from one module quickly, again and again. It does not hold on to the module itself.

    Args:
        outputs: names of the results that backward starts from; None for the loss, or all.
        device_types: of the devices of the plan, whose autocast counts.
        module: whose parameters are read.
    """

    def __init__(
        self, outputs: tuple[str, ...] | None, device_types: Sequence[str], module: nn.Module | None = None
    ) -> None:
        self.outputs, self.device_types = outputs, tuple(dict.fromkeys(device_types))
        self._entries = [] if module is None else list(_entries(module))
        self._last: tuple[tuple[bool, ...], Differentiation] | None = None

    def of(self, module: nn.Module) -> TrainingReader:
        """The reader of another module."""
        return TrainingReader(self.outputs, self.device_types, module)

    def read(self) -> Differentiation | None:
        """What is differentiated now; None where no parameter requires a gradient.

        Raises:
            InputError: autocast is on for two of the plan's device types, with different types.
        """
        flags = tuple(table[name].requires_grad for table, name, _ in self._entries)
        autocast = autocast_of(self.device_types)
        if self._last is not None and self._last[0] == flags and self._last[1].autocast == autocast:
            return self._last[1]
        trained = tuple(
            first for (_, _, first), trains in zip(self._entries, flags, strict=True) if trains
        )
        if not trained:
            return None
        found = Differentiation(trained, self.outputs, autocast)
        self._last = flags, found
        return found


def autocast_of(device_types: Sequence[str]) -> torch.dtype | None:
    """The type that autocast is on for, on any of these device types.

    Raises:
        InputError: it is on for several, with different types.
    """
    found = {
        torch.get_autocast_dtype(kind) for kind in device_types if torch.is_autocast_enabled(kind)
    }
    if len(found) > 1:
        raise InputError(
            f"autocast is on with {' and '.join(sorted(map(str, found)))} on the devices of one model: use one"
        )
    return next(iter(found), None)


def _entries(module: nn.Module):  # type: ignore[no-untyped-def]
    """The dictionary, the name there and the first name of each parameter, shared ones once."""
    seen: set[int] = set()
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield part._parameters, name, f"{path}.{name}" if path else name
