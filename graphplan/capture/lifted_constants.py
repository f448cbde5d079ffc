"""Constants that traces lift out of a model's code: each is placed once, for all plans that have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from graphplan.capture.captured_graph import Capture
from graphplan.devices.topology import DeviceKey, Topology


@dataclass(frozen=True, slots=True)
class PlacedConstant:
    """A constant of the code that an earlier plan has placed.

    Attributes:
        name: unique among plans.
        origin: its name in the capture.
        tensor: its values, as traced.
        key: where it is.
    """

    name: str
    origin: str
    tensor: torch.Tensor
    key: DeviceKey

    def is_same(self, origin: str, tensor: torch.Tensor) -> bool:
        """Whether a capture's constant is this one."""
        return self.tensor is tensor or (origin == self.origin and _equal(self.tensor, tensor))


class PlacedConstants:
    """Those of all plans of a model."""

    def __init__(self) -> None:
        self._placed: list[PlacedConstant] = []
        self._copies: dict[str, torch.Tensor] = {}

    def homes(self, constants: Mapping[str, torch.Tensor]) -> dict[str, DeviceKey]:
        """Where constants are already: by the names of this capture, and those of others."""
        here = {n: known.key for n, t in constants.items() if (known := self._find(n, t)) is not None}
        return {**here, **{other.name: other.key for other in self.others(constants)}}

    def others(self, constants: Mapping[str, torch.Tensor]) -> list[PlacedConstant]:
        """Constants of earlier plans that this capture has not: they stay where they are."""
        return [
            known
            for known in self._placed
            if not any(known.is_same(name, tensor) for name, tensor in constants.items())
        ]

    def settle(self, constants: Mapping[str, torch.Tensor], homes: Mapping[str, DeviceKey]) -> None:
        """Let constants that no earlier plan has be where this one has them."""
        for name, tensor in constants.items():
            if self._find(name, tensor) is None:
                known = PlacedConstant(f"{name}@{len(self._placed)}", name, tensor, homes[name])
                self._placed.append(known)

    def place(self, constants: Mapping[str, torch.Tensor], topology: Topology) -> dict[str, torch.Tensor]:
        """Each constant on the device that is settled: one tensor for all plans that have it."""
        found = {}
        for name, tensor in constants.items():
            known = self._find(name, tensor)
            assert known is not None
            if known.name not in self._copies:
                device = topology[known.key].torch_device
                self._copies[known.name] = tensor.detach().to(device, copy=True)
            found[name] = self._copies[known.name]
        return found

    def _find(self, name: str, tensor: torch.Tensor) -> PlacedConstant | None:
        """The constant of an earlier plan that has the same name and values."""
        return next((known for known in self._placed if known.is_same(name, tensor)), None)


def name_apart(capture: Capture, others: Sequence[Capture]) -> None:
    """Let constants of different values have different names in all captures of one model."""
    for name, tensor in list(capture.constants.items()):
        known = [other.constants[name] for other in others if name in other.constants]
        if all(_equal(mine, tensor) for mine in known):
            continue
        new = f"{name}_of_capture_{len(others)}"
        capture.constants[new] = capture.constants.pop(name)
        for node, weight in capture.weights.items():
            if weight == name:
                capture.weights[node] = new


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = a.dtype == b.dtype and a.shape == b.shape
    return a is b or (alike and bool(torch.equal(a, b)))
