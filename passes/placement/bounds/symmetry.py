"""Device classes: sets of exchangeable devices.

Two devices are of one class if exchanging them changes nothing that the objective or a constraint reads:
seconds of every operation, room, type, every link in both directions, existing prefetch buffers and their
limits; and neither is the host's or holds fixed weights. A comparison that left any of these out would make
lower bounds false.
"""

from __future__ import annotations

from graphplan.devices.topology import DeviceSpec
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.problem import Problem


def device_classes(arrays: Arrays) -> list[list[int]]:
    """Return the classes of exchangeable devices that compute, as indices in the caller's order."""
    classes: list[list[int]] = []
    for device in range(arrays.computing):
        for members in classes:
            if all(_exchangeable(arrays, other, device) for other in members):
                members.append(device)
                break
        else:
            classes.append([device])
    return classes


def _exchangeable(arrays: Arrays, first: int, second: int) -> bool:
    problem = arrays.problem
    if _properties(problem, arrays.specs[first]) != _properties(problem, arrays.specs[second]):
        return False
    if not {problem.host, *problem.fixed_weights.values()}.isdisjoint(
        (arrays.keys[first], arrays.keys[second])
    ):
        return False
    swapped = list(range(len(arrays.keys)))
    swapped[first], swapped[second] = second, first
    for table in (arrays.latency, arrays.per_byte):
        if (table[swapped][:, swapped] != table).any():
            return False
    return bool((arrays.compute[first] == arrays.compute[second]).all())


def _properties(problem: Problem, spec: DeviceSpec) -> object:
    """Return the properties of a device itself, apart from links and seconds of operations."""
    buffers, limits = problem.prefetch_bytes.get(spec.key), problem.prefetch_limits.get(spec.key)
    return spec.type, spec.room, buffers, limits
