"""Pack modules into devices by their bytes alone, in the order in which they are registered.

A device map for accelerate's hooks is such a packing, without operations and activations. Blocks that fit the
accelerators together are never offloaded. Otherwise the hooks copy each offloaded module to one accelerator,
the main one, when it runs: memory for the largest of them, and no more, is kept free there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STATES = 50_000  # most partial packings of the exact search


@dataclass(frozen=True, slots=True)
class Block:
    """Modules that must be on one device together."""

    names: tuple[str, ...]  # names of the modules or tensors
    nbytes: int  # bytes of all their tensors, each once
    loaded: int  # most bytes that are on the main device at once while it runs offloaded
    main_bytes: int = 0  # bytes that stay on the main device if it is offloaded, such as buffers


Places = Sequence[int | None]
"""For each block, the index of its accelerator; None if it is offloaded."""


def pack(blocks: Sequence[Block], capacities: Sequence[int], main: int = 0) -> Places:
    """Return places for the blocks, with as many bytes on accelerators as the heuristics find.

    ``capacities`` are in bytes, in the order of preference; offloaded blocks run on accelerator ``main``.
    """
    sizes = [block.nbytes for block in blocks]
    all_placed = _fit_all(sizes, capacities)
    if all_placed is not None:
        return all_placed
    limits = sorted({block.loaded for block in blocks}, reverse=True) if capacities else []
    tried = (
        _with_offload(blocks, capacities, main, limit, largest_first=largest_first)
        for largest_first in (False, True)
        for limit in limits
    )
    found = [places for places in tried if places is not None]
    return max(found, key=lambda places: _bytes_placed(blocks, places), default=[None] * len(blocks))


def _bytes_placed(blocks: Sequence[Block], places: Places) -> int:
    return sum(block.nbytes for block, place in zip(blocks, places, strict=True) if place is not None)


def _fit_all(sizes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    """Return places of all blocks on accelerators, contiguous if they fit in order; None if not found."""
    if sum(sizes) > sum(capacities) or max(sizes, default=0) > max(capacities, default=0):
        return None
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    return _search(sizes, capacities, range(len(sizes))) or _search(sizes, capacities, by_size)


def _search(sizes: Sequence[int], capacities: Sequence[int], order: Sequence[int]) -> list[int] | None:
    """Search depth-first, next fit first; partial packings that leave equal free bytes are pruned."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    unfinished: list[tuple[int, tuple[int, ...], Any]] = [(0, tuple(capacities), None)]
    while unfinished and len(seen) < _STATES:
        count, free, placed = unfinished.pop()
        if count == len(order):
            return _places(order, placed)
        if (count, tuple(sorted(free))) in seen:
            continue
        seen.add((count, tuple(sorted(free))))
        size, last = sizes[order[count]], placed[0] if placed else 0
        for device in reversed((*range(last, len(free)), *range(last))):
            if free[device] >= size:
                remaining = (*free[:device], free[device] - size, *free[device + 1 :])
                unfinished.append((count + 1, remaining, (device, placed)))
    return None


def _places(order: Sequence[int], placed: Any) -> list[int]:
    """Return the device of each block, from nested pairs (device of the last in ``order``, the rest)."""
    places = [0] * len(order)
    for index in reversed(order):
        places[index], placed = placed
    return places


def _with_offload(
    blocks: Sequence[Block], capacities: Sequence[int], main: int, limit: int, *, largest_first: bool
) -> Places | None:
    """Return places that offload only blocks with at most ``limit`` loaded bytes; None if none were found."""
    free = list(capacities)
    free[main] -= limit
    places: dict[int, int] = {}
    must = [index for index, block in enumerate(blocks) if block.loaded > limit]
    optional = [index for index, block in enumerate(blocks) if block.loaded <= limit]
    kept = sum(blocks[index].main_bytes for index in optional)  # freed as blocks are placed
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
            if room + (block.main_bytes if device == main else 0) >= block.nbytes:
                places[index] = device
                free[device] -= block.nbytes
                free[main] += block.main_bytes
                break
    return [places.get(index) for index in range(len(blocks))] if free[main] >= 0 else None


def spill(blocks: Mapping[int, Block], capacity: int) -> set[int]:
    """Return the offloaded blocks that the CPU holds; others go to disk, and pass the CPU one by one."""
    if sum(block.nbytes for block in blocks.values()) <= capacity:
        return set(blocks)
    room = capacity - max(block.loaded for block in blocks.values())
    held: set[int] = set()
    for index, block in blocks.items():
        if block.nbytes <= room:
            held.add(index)
            room -= block.nbytes
    return held
