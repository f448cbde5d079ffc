"""The caller's constraints as rules for the planner: allowed devices, fixed weights, tied operations.

::

    pin={"lm_head": 0}            operations of lm_head run on 0, its weights reside there
    together=["model.layers.3"]   operations of that module share a device
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from graphplan.devices.topology import DISK, DeviceKey, Topology, round_up
from graphplan.errors import PlanError
from graphplan.ir.constraints import Constraints, depth, did_you_mean, operations_named, weights_within
from graphplan.ir.graph import Graph
from graphplan.passes.placement.problem import Problem


def constrain(problem: Problem, constraints: Constraints) -> Problem:
    """Return the problem with the caller's constraints.

    Raises:
        PlanError: a name is not in the graph, a device is not in the plan, or constraints contradict.
    """
    graph = _tied(problem.graph, constraints.groups)
    allowed: dict[str, frozenset[DeviceKey]] = {}
    fixed: dict[str, DeviceKey] = dict(problem.fixed_weights)
    accelerators = problem.topology.accelerator_keys
    if not constraints.offload:
        _check_no_offload(constraints, problem.topology, accelerators)
    if not (constraints.cpu_compute and constraints.offload) and accelerators:
        allowed.update(dict.fromkeys(graph.operations, accelerators))
    allowed.update(_homes_of_fixed_weights(graph, fixed))
    cpu = problem.topology.cpu
    if cpu is not None:
        offloading = (name for name, operation in graph.operations.items() if operation.offloads)
        allowed.update(dict.fromkeys(offloading, frozenset({cpu})))
    pinned = _Pinned(graph, problem.topology, fixed)
    for name in sorted(constraints.pin, key=partial(depth, graph), reverse=True):
        pinned.pin(name, constraints.pin[name])
    allowed.update(pinned.allowed)
    _intersect(graph, allowed, constraints)
    return where_buffers_suffice(
        replace(
            problem,
            graph=graph,
            fixed_weights=fixed,
            allowed=allowed,
            offload=constraints.offload,
            balance=constraints.balance,
        )
    )


def where_buffers_suffice(problem: Problem) -> Problem:
    """Return the problem with readers kept off accelerators whose prefetch limit is too small for a weight.

    The weights are in CPU memory or on disk by an earlier plan. A rule that leaves no device is dropped.
    """
    if not problem.streaming:
        return problem
    graph, topology, allowed = problem.graph, problem.topology, dict(problem.allowed)
    streamed = [name for name, key in problem.fixed_weights.items() if key in (topology.cpu, DISK)]
    limits = {key: limit for key, limit in problem.prefetch_limits.items() if topology[key].is_accelerator}
    for name in (name for name in streamed if name in graph.streamable):
        nbytes = round_up(graph.weights[name].nbytes)
        too_small = {key for key, limit in limits.items() if nbytes > limit}
        if not too_small:
            continue
        for reader in graph.readers.get(name, ()):
            able = allowed.get(reader, frozenset(spec.key for spec in topology.computing))
            for member in graph.group_of.get(reader, (reader,)):
                allowed[member] = able - too_small or able
    return replace(problem, allowed=allowed)


def _homes_of_fixed_weights(graph: Graph, fixed: Mapping[str, DeviceKey]) -> dict[str, frozenset[DeviceKey]]:
    """Return operation -> the home of a fixed weight that it reads and that is never streamed."""
    homes: dict[str, dict[DeviceKey, str]] = {}
    for name, key in fixed.items():
        if name in graph.weights and not graph.weights[name].streamable:
            for reader in graph.readers.get(name, ()):
                homes.setdefault(reader, {})[key] = name
    for operation, sources in homes.items():
        if len(sources) > 1:
            listed = ", ".join(f"{name!r} on {key!r}" for key, name in sources.items())
            raise PlanError(
                f"{operation!r} writes to tensors on different devices: {listed}. An earlier plan, of a "
                "call that only reads these weights, has placed them: pin them to one device, or partition "
                "the model in the mode of this call. Keys and values of one layer of a cache must be on "
                "one device"
            )
    return {operation: frozenset(sources) for operation, sources in homes.items()}


def _check_no_offload(
    constraints: Constraints, topology: Topology, accelerators: frozenset[DeviceKey]
) -> None:
    if not accelerators:
        raise PlanError("offload=False needs accelerators, and max_memory names none: add one")
    for name, key in constraints.pin.items():
        if key in topology and key not in accelerators:
            raise PlanError(f"pin={{{name!r}: {key!r}}} contradicts offload=False: leave one of them out")


@dataclass(frozen=True, slots=True)
class _Pinned:
    """Applies pins. Pins are given innermost first, and an inner pin wins over those that enclose it.

    Attributes:
        graph: the graph whose operations and weights are pinned.
        topology: the devices.
        fixed: weight -> its device, by pins and by earlier plans.
        allowed: operation -> the device of its pin.
        names: weight -> names of the pins that have fixed it; all of its own names if it is pinned itself.
    """

    graph: Graph
    topology: Topology
    fixed: dict[str, DeviceKey]
    allowed: dict[str, frozenset[DeviceKey]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)

    def pin(self, name: str, key: DeviceKey) -> None:
        """Pin a weight, operation or module to a device, except where an inner pin applies."""
        graph, topology = self.graph, self.topology
        if key not in topology:
            listed = ", ".join(map(repr, topology.keys))
            raise PlanError(f"pin={{{name!r}: {key!r}}}: no such device, max_memory has {listed}")
        if not topology[key].computes:
            raise PlanError(f"pin={{{name!r}: {key!r}}}: weights cannot be pinned to {DISK!r}")
        weight = graph.weight_named(name)
        if weight is not None:
            self.fixed[weight.name], self.names[weight.name] = key, [weight.name, *weight.names]
            readers = [] if weight.streamable else list(graph.consumers.get(weight.name, ()))
        else:
            owned, readers = weights_within(graph, name), operations_named(graph, name)
            if not owned and not readers:
                raise _unknown(graph, name, f"pin={{{name!r}: {key!r}}}")
            for owned_weight in owned:
                self._pin_weight(owned_weight, name, key)
        for reader in readers:
            self.allowed.setdefault(reader, frozenset({key}))

    def _pin_weight(self, weight: str, module: str, key: DeviceKey) -> None:
        inner = self.names.setdefault(weight, [])
        if any(not module or name.startswith(module + ".") for name in inner):
            return
        if self.fixed.setdefault(weight, key) != key:
            earlier = self.fixed[weight]
            raise PlanError(f"pin puts {weight!r} on {earlier!r} and, through {module!r}, on {key!r}")
        inner.append(module)


def _operations(graph: Graph, name: str, where: str) -> list[str]:
    """Return the operations of a module, or the one with this name; raise `PlanError` if there are none."""
    operations = operations_named(graph, name)
    if not operations:
        raise _unknown(graph, name, where)
    return operations


def _unknown(graph: Graph, name: str, where: str) -> PlanError:
    hint = did_you_mean(graph, name)
    return PlanError(f"{where}: no module, operation or weight of that name runs in this graph{hint}")


def _tied(graph: Graph, groups: Sequence[Sequence[str]]) -> Graph:
    """Return the graph with the caller's groups in addition to those that aliasing requires."""
    if not groups:
        return graph
    members = (
        [op for name in names for op in _operations(graph, name, f"together={list(names)!r}")]
        for names in groups
    )
    return graph.tied(members)


def _intersect(graph: Graph, allowed: dict[str, frozenset[DeviceKey]], constraints: Constraints) -> None:
    """Restrict every member of a group to the devices that all members may run on."""
    for group in graph.together:
        rules = [allowed[name] for name in group if name in allowed]
        if not rules:
            continue
        common = frozenset.intersection(*rules)
        if not common:
            raise PlanError(_contradiction(graph, group, constraints))
        allowed.update(dict.fromkeys(group, common))


def _contradiction(graph: Graph, group: frozenset[str], constraints: Constraints) -> str:
    """Return the message of the constraints that send members of a group to different devices."""
    groups = [list(names) for names in constraints.groups if any(_concerns(graph, n, group) for n in names)]
    pins = {name: key for name, key in constraints.pin.items() if _concerns(graph, name, group)}
    rules = [f"together={names!r}" for names in groups]
    if pins:
        rules.append(f"pin={pins!r}")
    if not constraints.cpu_compute:
        rules.append("cpu_compute=False")
    if len(set(pins.values())) < 2:  # weights that are written stay where an earlier plan has put them
        rules.append("the device of weights that they write to")
    listed = ", ".join(sorted(group)[:4]) + (", ..." if len(group) > 4 else "")
    return f"{' and '.join(rules)} contradict each other: {listed} must share a device"


def _concerns(graph: Graph, name: str, group: frozenset[str]) -> bool:
    weight = graph.weight_named(name)
    readers = graph.consumers.get(weight.name, ()) if weight is not None and not weight.streamable else ()
    return not group.isdisjoint([*operations_named(graph, name), *readers])
