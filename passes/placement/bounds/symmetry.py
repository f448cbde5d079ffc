"""Devices and operations that nothing tells apart.

Two devices are of one class if exchanging them changes nothing that the objective or a constraint reads:
speed, budget, every link in both directions, the operations that may run there, weights that are fixed
there, prefetch buffers that exist. A key that left any of these out would make lower bounds false.
"""

from __future__ import annotations

from graphplan.devices.topology import DeviceSpec
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.problem import Problem


def device_classes(arrays: Arrays) -> list[list[int]]:
    """Indices of the devices that compute, those together that can be exchanged; in the caller's order."""
    classes: list[list[int]] = []
    for device in range(arrays.computing):
        for members in classes:
            if all(_exchangeable(arrays, other, device) for other in members):
                members.append(device)
                break
        else:
            classes.append([device])
    return classes


def _exchangeable(arrays: Arrays, one: int, other: int) -> bool:
    if _own(arrays.problem, arrays.specs[one]) != _own(arrays.problem, arrays.specs[other]):
        return False
    if not _named(arrays.problem).isdisjoint((arrays.keys[one], arrays.keys[other])):
        return False
    swapped = list(range(len(arrays.keys)))
    swapped[one], swapped[other] = other, one
    for table in (arrays.latency, arrays.per_byte):
        if (table[swapped][:, swapped] != table).any():
            return False
    return bool((arrays.compute[one] == arrays.compute[other]).all())


def _own(problem: Problem, spec: DeviceSpec) -> object:
    """What is known of a device by itself; seconds of operations are compared apart."""
    buffers, limits = problem.prefetch_bytes.get(spec.key), problem.prefetch_limits.get(spec.key)
    return spec.type, spec.room, buffers, limits


def _named(problem: Problem) -> set[object]:
    """Devices that the problem names: the host's, and homes of fixed weights."""
    return {problem.host, *problem.fixed_weights.values()}
