"""Join the stages of one rank to one module, in which weights have their names of the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphplan.capture.model.model_weights import module_at
from graphplan.errors import InputError
from graphplan.runtime.weights.weight_changes import KeptInPlace


class MachineStages(KeptInPlace):
    """A module with the weights of several placed stages; a weight that two of them read is one tensor.

    Args:
        stages: the placed stages, in order.

    Raises:
        InputError: two stages would train a weight on different devices.
    """

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self._entries: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        for stage in stages:
            for path, part in stage.named_modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        self._add(path, name, part._parameters, parameter)
                for name, buffer in part._buffers.items():
                    module = module_at(self, path)
                    if buffer is not None and name not in module._buffers:
                        module.register_buffer(name, buffer, name not in part._non_persistent_buffers_set)
        self.bind_stages()

    def _add(self, path: str, name: str, table: dict[str, Any], parameter: nn.Parameter) -> None:
        module = module_at(self, path)
        known = module._parameters.get(name)
        if known is None:
            module.register_parameter(name, parameter)
        elif known.device != parameter.device:
            if parameter.requires_grad:
                full_name = f"{path}.{name}" if path else name
                raise InputError(
                    f"two stages of one machine train {full_name!r}, one of them on {known.device} and one "
                    f"on {parameter.device}: give larger budgets, or schedule='1f1b'"
                )
            return
        self._entries.append((module._parameters, table, name))

    def bind_stages(self) -> None:
        """Bind the stages to the current parameters of this module, in case some were replaced."""
        for parameters, table, name in self._entries:
            table[name] = parameters[name]


class NoStage(nn.Module):
    """The module of a rank without a stage: an empty parameter, as optimizers and checkpoints require one."""

    def __init__(self) -> None:
        super().__init__()
        self.placeholder = nn.Parameter(torch.empty(0))


def join_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """Return the module with the weights of a rank's stages."""
    if not stages:
        return NoStage()
    return stages[0] if len(stages) == 1 else MachineStages(stages)
