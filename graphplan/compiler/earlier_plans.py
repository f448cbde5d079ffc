"""Decisions of earlier plans that hold for later ones: devices of weights and constants, prefetch buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphplan.analysis.plan import Plan
from graphplan.capture.captured_graph import Capture, Part
from graphplan.capture.model.model_weights import tensor_bytes
from graphplan.devices.topology import DISK, DeviceKey, Topology
from graphplan.errors import InfeasibleError
from graphplan.ir.graph import Graph
from graphplan.ir.schedule import Assignment, prefetch_bytes
from graphplan.runtime.weights.storage import WeightLayout

_ALLOCATOR_SLACK = 2 << 20  # bytes by which CUDA's allocator may count a larger prefetch buffer differently


class PlacedConstants:
    """The constants of all plans of a model; a name stands for one value in all of its captures.

    Attributes:
        tensors: name -> value, as traced.
        homes: name -> device on which the first plan that has it puts it.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.homes: dict[str, DeviceKey] = {}
        self._copies: dict[str, torch.Tensor] = {}

    def record(self, constants: Mapping[str, torch.Tensor], homes: Mapping[str, DeviceKey]) -> None:
        """Record the devices of the constants that no earlier plan has."""
        for name, tensor in constants.items():
            self.tensors.setdefault(name, tensor)
            self.homes.setdefault(name, homes[name])

    def place(self, constants: Mapping[str, torch.Tensor], topology: Topology) -> dict[str, torch.Tensor]:
        """Return each constant on its recorded device; all plans that have it share one tensor."""
        for name in constants:
            if name not in self._copies:
                device = topology[self.homes[name]].torch_device
                self._copies[name] = self.tensors[name].detach().to(device, copy=True)
        return {name: self._copies[name] for name in constants}


class Commitments:
    """Decisions of earlier plans of a model.

    Attributes:
        homes: weight or part of a weight -> device where it resides; None until a plan has decided.
        assignment: the assignment that placed the weights, if another process planned it.
        constants: the placed constants.
        plans: plans so far.
        trained: parameters that have a gradient or optimizer state in one of the plans, which may stay.
        refused: captures of calls for which the plans left no room.
    """

    def __init__(
        self, homes: dict[str, DeviceKey] | None = None, assignment: Assignment | None = None
    ) -> None:
        self.homes, self.assignment = homes, assignment
        self.constants = PlacedConstants()
        self.plans: list[Plan] = []
        self.trained: set[str] = set()
        self.refused: list[Capture] = []

    def lacks_room(self, capture: Capture) -> bool:
        """Whether a call of the same trace, as large or smaller, was refused for lack of room."""
        alike = [one.sizes for one in self.refused if one.module is capture.module]
        return any(all(capture.sizes.get(name, 0) >= n for name, n in sizes.items()) for sizes in alike)

    def assignment_for(self, graph: Graph) -> Assignment | None:
        """Return ``assignment`` if it is of this graph, else None."""
        assignment = self.assignment
        if assignment is None or assignment.operations.keys() != graph.operations.keys():
            return None
        return assignment if assignment.weights.keys() == graph.weights.keys() else None

    def commit(self, plan: Plan, constants: Mapping[str, torch.Tensor]) -> None:
        """Record this plan, and the devices of weights and constants that no earlier plan has."""
        homes = plan.schedule.assignment.weights
        own_homes = {name: key for name, key in homes.items() if plan.graph.weights[name].is_own}
        self.homes = own_homes | (self.homes or {})
        self.constants.record(constants, homes)
        self.plans.append(plan)
        self.trained.update(weight.name for weight in plan.graph.weights.values() if weight.beside)

    @property
    def parts(self) -> dict[Part, DeviceKey]:
        """Placed part of a sliced weight -> its device."""
        named = ((Part.named(name), key) for name, key in (self.homes or {}).items())
        return {part: key for part, key in named if part is not None}

    def prefetch_bytes(self) -> dict[DeviceKey, int]:
        """Return device -> bytes of the prefetch buffer that earlier plans have there."""
        return prefetch_bytes(buffer for plan in self.plans for buffer in plan.schedule.prefetch_buffers)

    def prefetch_limits(self, topology: Topology) -> dict[DeviceKey, int]:
        """Return device -> maximum bytes of a prefetch buffer within the budgets of earlier plans."""
        existing = self.prefetch_bytes()
        limits: dict[DeviceKey, int] = {}
        for plan in self.plans:
            planned = prefetch_bytes(plan.schedule.prefetch_buffers)
            for spec in topology.devices:
                slack = _ALLOCATOR_SLACK if spec.type == "cuda" else 0
                available = planned.get(spec.key, 0) + spec.room - plan.peak_bytes[spec.key] - slack
                limit = max(available, existing.get(spec.key, 0))
                limits[spec.key] = min(limit, limits.get(spec.key, limit))
        return limits

    def homes_of_constants(
        self, constants: Mapping[str, torch.Tensor], topology: Topology
    ) -> dict[str, DeviceKey]:
        """Return devices for the constants that earlier plans do not have, whose peaks do not count them.

        Each is on the first device with room for it beside the peaks of these plans; nothing is returned if
        every device has room for all.

        Raises:
            InfeasibleError: no device has room for one of them.
        """
        new = {n: tensor_bytes(x) for n, x in constants.items() if n not in self.constants.homes}
        if not self.plans or not new:
            return {}
        room = {
            spec.key: spec.room - max(plan.peak_bytes[spec.key] for plan in self.plans)
            for spec in topology.computing
        }
        homes: dict[str, DeviceKey] = {}
        if sum(new.values()) <= min(room.values()):
            return homes
        for name, nbytes in new.items():
            key = next((key for key in room if nbytes <= room[key]), None)
            if key is None:
                most = max(room, key=lambda key: room[key])
                raise InfeasibleError(
                    f"the constant {name!r} needs {nbytes} bytes, but beside what other calls need, at most "
                    f"{room[most]} bytes are free, on device {most}"
                )
            homes[name], room[key] = key, room[key] - nbytes
        return homes

    def layout(self, topology: Topology) -> WeightLayout:
        """Return where the first plans have put the weights, and which weights are streamed."""
        assert self.homes is not None
        prefetch_buffers = [buffer for plan in self.plans for buffer in plan.schedule.prefetch_buffers]
        whole_of = {part.name: part.part_of for plan in self.plans for part in plan.graph.parts}
        streamed = (
            whole_of.get(n, n)
            for buffer in prefetch_buffers
            for segment in buffer.segments
            for n in segment.weights
        )
        return WeightLayout(
            {name: topology[key].torch_device for name, key in self.homes.items()},
            [name for name in dict.fromkeys(streamed) if self.homes.get(name) != DISK],
            any(topology[buffer.device].type == "cuda" for buffer in prefetch_buffers),
            frozenset(name for name, key in self.homes.items() if key == DISK),
        )
