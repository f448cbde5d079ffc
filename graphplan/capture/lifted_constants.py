"""Constants that traces lift out of a model's code: each is placed once, for all plans that have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphplan.capture.captured_graph import Capture
from graphplan.devices.topology import DeviceKey, Topology


class PlacedConstants:
    """Those of all plans of a model, in whose captures a name is of one value.

    Attributes:
        tensors: name -> values, as traced.
        homes: name -> where the first plan that has it puts it.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.homes: dict[str, DeviceKey] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def settle(self, constants: Mapping[str, torch.Tensor], homes: Mapping[str, DeviceKey]) -> None:
        """Let constants that no earlier plan has be where this one has them."""
        for name, tensor in constants.items():
            self.tensors.setdefault(name, tensor)
            self.homes.setdefault(name, homes[name])

    def place(self, constants: Mapping[str, torch.Tensor], topology: Topology) -> dict[str, torch.Tensor]:
        """Each constant on the device that is settled: one tensor for all plans that have it."""
        for name in constants:
            if name not in self._copies:
                device = topology[self.homes[name]].torch_device
                self._copies[name] = self.tensors[name].detach().to(device, copy=True)
        return {name: self._copies[name] for name in constants}


def unify_names(capture: Capture, others: Sequence[Capture]) -> None:
    """Let a constant have one name in all captures of a model, and a name one value."""
    known = {name: tensor for other in others for name, tensor in other.constants.items()}
    names: dict[str, str] = {}
    for name, tensor in capture.constants.items():
        same = (old for old, one in known.items() if one is tensor or (old == name and _equal(one, tensor)))
        names[name] = next(same, f"{name}_of_capture_{len(others)}" if name in known else name)
    tensors = {names[name]: tensor for name, tensor in capture.constants.items()}
    capture.constants.clear()
    capture.constants.update(tensors)
    capture.weights.update({node: names[one] for node, one in capture.weights.items() if one in names})


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
