"""The planner's input: one forward pass to place on a set of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from graphplan.devices.topology import DeviceKey, DeviceSpec, Topology
from graphplan.ir.cost_model import operation_seconds
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.schedule import Runs


@dataclass(frozen=True, slots=True)
class Problem:
    """One forward pass to place.

    Attributes:
        graph: the operations in a fixed order, their values and weights.
        topology: devices, memory budgets (bytes), links.
        host: key or name of the caller's device, where inputs are.
        returns_to_host: whether outputs are moved back to the host.
        fixed_weights: weight -> its device, if the caller has pinned it or an earlier plan of the same
            model has placed it.
        allowed: operation -> devices that it may run on; an operation that is not named may run on all.
        offload: whether the CPU may compute, and hold weights that accelerators read, where the
            accelerators do not hold the model.
        balance: minimise the longest stage instead of the sum.
        prefetch_bytes: device -> bytes of the prefetch buffer that plans of other passes have allocated.
        prefetch_limits: device -> most bytes of its prefetch buffer, in view of the plans of other passes.
        further_calls: whether other forward passes use the same weights.
        streaming: False where autograd keeps weights after the pass: they are then copied one by one.
    """

    graph: Graph
    topology: Topology
    host: DeviceKey
    returns_to_host: bool = True
    fixed_weights: Mapping[str, DeviceKey] = field(default_factory=dict)
    allowed: Mapping[str, frozenset[DeviceKey]] = field(default_factory=dict)
    offload: bool = True
    balance: bool = False
    prefetch_bytes: Mapping[DeviceKey, int] = field(default_factory=dict)
    prefetch_limits: Mapping[DeviceKey, int] = field(default_factory=dict)
    further_calls: bool = False
    streaming: bool = True
    # caches of every evaluation: the `Run` steps of schedules, and the seconds of operations by device
    runs: Runs = field(init=False, default_factory=Runs, repr=False, compare=False)
    _clocks: dict[DeviceKey, tuple[DeviceSpec, dict[str, float]]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def seconds(self, operation: Operation, spec: DeviceSpec) -> float:
        """Return the seconds of an operation on a device, infinite if it may not run there."""
        return self.clock(spec)[operation.name]

    def clock(self, spec: DeviceSpec) -> Mapping[str, float]:
        """Return operation -> its seconds on a device, in the graph's order."""
        cached = self._clocks.get(spec.key)
        if cached is None or (cached[0] is not spec and cached[0] != spec):
            seconds = {name: operation_seconds(op, spec) for name, op in self.graph.operations.items()}
            for name, allowed in self.allowed.items():
                if spec.key not in allowed and name in seconds:
                    seconds[name] = math.inf
            cached = self._clocks[spec.key] = spec, seconds
        return cached[1]

    def on(self, keys: frozenset[DeviceKey]) -> Problem:
        """Return the problem with each operation restricted to those of these devices that it may run on."""
        allowed = {name: self.allowed.get(name, keys) for name in self.graph.operations}
        return replace(self, allowed={name: (rule & keys) or rule for name, rule in allowed.items()})

    def on_allowed_devices(self, operations: Mapping[str, DeviceKey]) -> dict[str, DeviceKey]:
        """Return the devices, with operations that may not run on theirs moved to the first allowed one."""
        moved = dict(operations)
        for name, allowed in self.allowed.items():
            if name in moved and moved[name] not in allowed:
                moved[name] = next(key for key in self.topology.keys if key in allowed)
        return moved
