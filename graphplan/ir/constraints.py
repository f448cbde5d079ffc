"""The caller's constraints on a placement, in the caller's names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphplan.devices.topology import DeviceKey
from graphplan.ir.graph import Graph

Group = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on a placement, in the caller's names.

    Attributes:
        pin: module, operation, parameter or buffer -> device key. A module runs there and its weights reside
            there; a parameter or buffer resides there.
        together: modules (or lists of names) that must not be split over devices.
        offload: False: raise an error if the accelerators alone do not hold the model.
        cpu_compute: False: the CPU may hold weights, but not compute.
        balance: whether to spread the work evenly over the accelerators.
    """

    pin: Mapping[str, DeviceKey] = field(default_factory=dict)
    together: Sequence[Group] = ()
    offload: bool = True
    cpu_compute: bool = True
    balance: bool = False

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The names in each item of ``together``."""
        return [(group,) if isinstance(group, str) else tuple(group) for group in self.together]

    def within(self, graph: Graph) -> Constraints:
        """Return the constraints whose names are in this graph, which may be one of several."""
        pin = {n: key for n, key in self.pin.items() if _runs(graph, n) or weights_within(graph, n)}
        running = [tuple(name for name in group if _runs(graph, name)) for group in self.groups]
        return replace(self, pin=pin, together=tuple(group for group in running if group))


def _runs(graph: Graph, name: str) -> bool:
    return graph.weight_named(name) is not None or bool(operations_named(graph, name))


def depth(graph: Graph, name: str) -> tuple[bool, int]:
    """Return a sort key for a name: modules by depth, then operations, which may have the same names."""
    paths = (operation.module_path for operation in graph.operations.values())
    module = any(path == name or path.startswith(name + ".") for path in paths)
    module = module or bool(weights_within(graph, name))
    return not module, len(name.split(".")) if name else 0


def weights_within(graph: Graph, module: str) -> list[str]:
    """Return the first names of the parameters and buffers of a module."""
    return [
        weight.name
        for weight in graph.weights.values()
        if weight.is_own
        and (not module or any(name.startswith(module + ".") for name in (weight.name, *weight.names)))
    ]


def names_in(graph: Graph) -> list[str]:
    """Return the names of all modules, operations and weights, sorted."""
    paths = {operation.module_path for operation in graph.operations.values()}
    above = {".".join(path.split(".")[:i]) for path in paths for i in range(1, path.count(".") + 1)}
    tied = {name for weight in graph.weights.values() for name in weight.names}
    return sorted((paths | above | tied | set(graph.weights) | set(graph.operations)) - {""})


def did_you_mean(graph: Graph, name: str) -> str:
    """Return names similar to an unknown one, as the end of a message."""
    close = difflib.get_close_matches(name, names_in(graph), 3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def operations_named(graph: Graph, name: str) -> list[str]:
    """Return the operations of a module, or the one of this name; all of them for an empty name."""
    return [
        operation.name
        for operation in graph.operations.values()
        if operation.name == name
        or operation.module_path == name
        or operation.module_path.startswith(name + ".")
        or not name
    ]
