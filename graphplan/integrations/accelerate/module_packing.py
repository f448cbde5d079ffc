"""Packing modules into devices by their bytes alone, in the order in which they are registered.

What is in a device map for accelerate's hooks is a packing: no operations, no activations. Blocks that fit
the accelerators together are never offloaded. Where they do not, the hooks bring each offloaded module to
one accelerator, the main one, when it runs: room for the largest of them is kept there, and for no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STATES = 50_000  # partial packings after which the exact search gives up


@dataclass(frozen=True, slots=True)
class Block:
    """Modules that go to one device together."""

    names: tuple[str, ...]  # of the modules or tensors
    nbytes: int  # of all their tensors, each once
    loaded: int  # bytes that are copied to the main device at once when it is offloaded
    kept: int = 0  # bytes that stay on the main device even then (buffers that are not offloaded)


Places = Sequence[int | None]
"""For each block, the index of its accelerator; None where it is offloaded."""


def pack(blocks: Sequence[Block], capacities: Sequence[int], main: int = 0) -> Places:
    """Blocks onto accelerators, as many bytes as can be found.

    ``capacities`` are in the order of preference; offloaded blocks are copied to the ``main`` one.
    """
    sizes = [block.nbytes for block in blocks]
    whole = _fit_all(sizes, capacities)
    if whole is not None:
        return whole
    limits = sorted({block.loaded for block in blocks}, reverse=True) if capacities else []
    ways = [(limit, largest_first) for largest_first in (False, True) for limit in limits]
    found = [places for way in ways if (places := _with_offload(blocks, capacities, main, *way)) is not None]
    return max(found, key=lambda places: _bytes_placed(blocks, places), default=[None] * len(blocks))


def _bytes_placed(blocks: Sequence[Block], places: Places) -> int:
    return sum(block.nbytes for block, place in zip(blocks, places, strict=True) if place is not None)


def _fit_all(sizes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """All of them on accelerators: one after another, else wherever there is room."""
    if sum(sizes) > sum(capacities) or max(sizes, default=0) > max(capacities, default=0):
        return None
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    return (
        _one_after_another(sizes, capacities)
        or _search(sizes, capacities, range(len(sizes)))
        or _search(sizes, capacities, by_size)
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


def _search(sizes: Sequence[int], capacities: Sequence[int], order: Sequence[int]) -> list[int] | None:
    """Depth-first search, first fit first: it takes up no two packings that leave the same rooms."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    unfinished: list[tuple[int, tuple[int, ...], Any]] = [(0, tuple(capacities), None)]
    while unfinished and len(seen) < _STATES:
        count, free, placed = unfinished.pop()
        if count == len(order):
            return _places(order, placed)
        if (count, tuple(sorted(free))) in seen:
            continue
        seen.add((count, tuple(sorted(free))))
        size = sizes[order[count]]
        for device in reversed(range(len(free))):
            if free[device] >= size:
                left = (*free[:device], free[device] - size, *free[device + 1 :])
                unfinished.append((count + 1, left, (device, placed)))
    return None


def _places(order: Sequence[int], placed: Any) -> list[int]:
    """The device of each block; ``placed`` has that of the last in ``order``, and the ones before it."""
    places = [0] * len(order)
    for index in reversed(order):
        places[index], placed = placed
    return places


def _with_offload(
    blocks: Sequence[Block], capacities: Sequence[int], main: int, limit: int, largest_first: bool
) -> Places | None:
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
    return [places.get(index) for index in range(len(blocks))] if free[main] >= 0 else None


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
