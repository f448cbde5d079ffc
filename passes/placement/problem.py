"""What is asked of the planner, and what it answers."""

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
        graph: operations in a fixed order, their values and weights.
        topology: devices, budgets (bytes), links.
        host: key or name of the caller's device, where inputs are.
        returns_to_host: whether outputs are moved back there.
        fixed_weights: weights that have a home already: pinned by the caller, or placed by an
            earlier plan of the same model.
        allowed: operation -> devices that it may run on; one that is not named may run on all.
        offload: whether the CPU may compute, and hold weights that accelerators read, where the
            accelerators do not hold the model.
        balance: minimise the longest stage instead of the sum.
        prefetch_bytes: device -> bytes of the prefetch buffer that plans of other calls have there already.
        prefetch_limits: device -> bytes that these may have at most, where those calls leave no more room.
        further_calls: whether calls of other kinds are placed over the same weights.
        streaming: False where autograd keeps weights after the call: they are then copied one by one.
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
    # what every evaluation asks for: steps that schedules share; seconds of each operation by device
    runs: Runs = field(init=False, default_factory=Runs, repr=False, compare=False)
    _clocks: dict[DeviceKey, tuple[DeviceSpec, dict[str, float]]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def seconds(self, operation: Operation, spec: DeviceSpec) -> float:
        """Seconds of an operation on a device, infinite where it may not run."""
        return self.clock(spec)[operation.name]

    def clock(self, spec: DeviceSpec) -> Mapping[str, float]:
        """The same of each operation, in the graph's order."""
        known = self._clocks.get(spec.key)
        if known is None or (known[0] is not spec and known[0] != spec):
            found = {name: operation_seconds(one, spec) for name, one in self.graph.operations.items()}
            for name, allowed in self.allowed.items():
                if spec.key not in allowed and name in found:
                    found[name] = math.inf
            known = self._clocks[spec.key] = spec, found
        return known[1]

    def on(self, keys: frozenset[DeviceKey]) -> Problem:
        """The same problem with every operation that may on one of these devices."""
        allowed = {name: self.allowed.get(name, keys) for name in self.graph.operations}
        return replace(self, allowed={name: (rule & keys) or rule for name, rule in allowed.items()})

    def obey(self, operations: Mapping[str, DeviceKey]) -> dict[str, DeviceKey]:
        """The same devices, but for operations that may not run there: those go where they may."""
        obeyed = dict(operations)
        for name, allowed in self.allowed.items():
            if name in obeyed and obeyed[name] not in allowed:
                obeyed[name] = next(key for key in self.topology.keys if key in allowed)
        return obeyed
