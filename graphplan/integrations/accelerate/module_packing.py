"""Packing modules into devices by their bytes alone, in the order in which they are registered.

What is in a device map for accelerate's hooks is a packing: no operations, no activations. Blocks that fit
the accelerators together are never offloaded. Where they do not, the hooks bring each offloaded module to
one accelerator, the main one, when it runs: room for the largest of them is kept there, and for no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import eye as identity
from scipy.sparse import kron, vstack

from graphplan.integrations.accelerate.highs_output import milp

_SECONDS = 5.0  # that the exact search may take
_LARGEST = 4000  # blocks times devices from which on it is not tried


@dataclass(frozen=True, slots=True)
class Block:
    """Modules that go to one device together.

    Attributes:
        names: of the modules or tensors.
        nbytes: of all their tensors, each once.
        loaded: bytes that are copied to the main device at once when it is offloaded.
        kept: bytes that stay on the main device even then (buffers that are not offloaded).
    """

    names: tuple[str, ...]
    nbytes: int
    loaded: int
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Packing:
    """Where blocks go.

    Attributes:
        places: for each block, the index of its accelerator; None where it is offloaded.
        reserved: bytes that are kept free on the main device for offloaded blocks.
    """

    places: tuple[int | None, ...]
    reserved: int = 0


def pack(blocks: Sequence[Block], capacities: Sequence[int], main: int = 0) -> Packing:
    """Blocks onto accelerators, as many bytes as can be found.

    Args:
        blocks: in order.
        capacities: bytes of each accelerator, in the order of preference.
        main: the accelerator that offloaded blocks are copied to.
    """
    sizes = [block.nbytes for block in blocks]
    whole = _fit_all(sizes, capacities)
    if whole is not None:
        return Packing(tuple(whole))
    found = (
        []
        if not capacities
        else [
            packing
            for largest_first in (False, True)
            for limit in sorted({block.loaded for block in blocks}, reverse=True)
            if (packing := _with_offload(blocks, capacities, main, limit, largest_first)) is not None
        ]
    )
    if not found:
        return Packing((None,) * len(blocks))
    return max(found, key=lambda packing: _bytes_placed(blocks, packing))


def _bytes_placed(blocks: Sequence[Block], packing: Packing) -> int:
    return sum(b.nbytes for b, place in zip(blocks, packing.places, strict=True) if place is not None)


def _fit_all(sizes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """All of them on accelerators: one after another, else wherever there is room, else by search."""
    if sum(sizes) > sum(capacities) or max(sizes, default=0) > max(capacities, default=0):
        return None
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    return (
        _one_after_another(sizes, capacities)
        or _first_fit(sizes, capacities, range(len(sizes)))
        or _first_fit(sizes, capacities, by_size)
        or _search(sizes, capacities)
    )


def _one_after_another(sizes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    places, device, used = [], 0, 0
    for size in sizes:
        while device < len(capacities) and used + size > capacities[device]:
            device, used = device + 1, 0
        if device == len(capacities):
            return None
        places.append(device)
        used += size
    return places


def _first_fit(sizes: Sequence[int], capacities: Sequence[int], order: Sequence[int]) -> list[int] | None:
    free, places = list(capacities), [0] * len(sizes)
    for index in order:
        device = next((d for d, room in enumerate(free) if room >= sizes[index]), None)
        if device is None:
            return None
        places[index] = device
        free[device] -= sizes[index]
    return places


def _search(sizes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """By mixed-integer programming."""
    count, devices = len(sizes), len(capacities)
    if devices < 2 or count * devices > _LARGEST:
        return None
    placed = kron(identity(count), np.ones((1, devices)))
    filled = kron(np.asarray(sizes, float)[None, :], identity(devices))
    upper = np.concatenate([np.ones(count), np.asarray(capacities, float)])
    lower = np.concatenate([np.ones(count), np.zeros(devices)])
    constraint = LinearConstraint(vstack([placed, filled]).tocsr(), lower, upper)
    result = milp(
        np.tile(np.arange(devices, dtype=float), count),
        constraints=constraint,
        bounds=Bounds(0, 1),
        integrality=np.ones(count * devices),
        options={"time_limit": _SECONDS},
    )
    if result.x is None:
        return None
    places = [int(row.argmax()) for row in np.asarray(result.x).reshape(count, devices)]
    used = [sum(s for s, p in zip(sizes, places, strict=True) if p == d) for d in range(devices)]
    return places if all(u <= c for u, c in zip(used, capacities, strict=True)) else None


def _with_offload(
    blocks: Sequence[Block], capacities: Sequence[int], main: int, limit: int, largest_first: bool
) -> Packing | None:
    """Some are offloaded, none that takes more than ``limit`` bytes when it is copied back."""
    free = list(capacities)
    free[main] -= limit
    places: dict[int, int] = {}
    must = [index for index, block in enumerate(blocks) if block.loaded > limit]
    optional = [index for index, block in enumerate(blocks) if block.loaded <= limit]
    kept = sum(blocks[index].kept for index in optional)  # given back as blocks are placed
    free[main] -= kept
    for index in sorted(must, key=lambda index: -blocks[index].nbytes):
        device = next((d for d, room in enumerate(free) if room >= blocks[index].nbytes), None)
        if device is None:
            return None
        places[index] = device
        free[device] -= blocks[index].nbytes
    for index in sorted(optional, key=lambda index: -blocks[index].nbytes) if largest_first else optional:
        block = blocks[index]
        for device, room in enumerate(free):
            if room + (block.kept if device == main else 0) >= block.nbytes:
                places[index] = device
                free[device] -= block.nbytes
                free[main] += block.kept
                break
    return (
        Packing(tuple(places.get(index) for index in range(len(blocks))), limit) if free[main] >= 0 else None
    )


def spill(blocks: Mapping[int, Block], capacity: int) -> set[int]:
    """Which offloaded blocks the CPU holds; the others go to disk, and pass through the CPU one by one."""
    if sum(block.nbytes for block in blocks.values()) <= capacity:
        return set(blocks)
    room = capacity - max(block.loaded for block in blocks.values())
    held: set[int] = set()
    for index, block in blocks.items():
        if block.nbytes <= room:
            held.add(index)
            room -= block.nbytes
    return held
