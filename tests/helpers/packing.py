"""How many bytes of weights accelerators can hold at most: the yardstick for their use.

Only weights that a call reads count, with what they take of an accelerator's one allocation of weights.
Whether all fits is asked of items: weights that one operation reads together, which must lie on one
accelerator. Where weights are streamed, each may be kept or not, so that the most is asked of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from graphplan.devices.topology import round_up
from graphplan.ir.graph import Graph

_UNITS = 2_000_000  # steps in which a capacity is counted


@dataclass(frozen=True, slots=True)
class Packing:
    """Bounds on a graph's weights within capacities.

    Attributes:
        most: bytes that no packing passes.
        everything: whether all fits: True where a packing was found, False where none exists, None
            where neither was shown.
    """

    most: int
    everything: bool | None


def sizes_of(graph: Graph) -> dict[str, int]:
    """Bytes that each weight that is read takes of a device's allocation."""
    read = [weight for weight in graph.weights.values() if weight.name in graph.consumers]
    return {weight.name: round_up(weight.nbytes) for weight in read}


def items(graph: Graph, kept: Mapping[str, int]) -> list[int]:
    """Bytes of each set of weights that must lie together, largest first; ``kept``: weight -> bytes."""
    together = nx.Graph()
    together.add_nodes_from(kept)
    for operation in graph.operations.values():
        nx.add_path(together, [name for name in operation.inputs if name in kept])
    groups = nx.connected_components(together)
    return sorted((sum(kept[name] for name in group) for group in groups), reverse=True)


def pack(sizes: Sequence[int], capacities: Sequence[int]) -> Packing:
    """The most bytes of ``sizes`` (largest first) that ``capacities`` can hold.

    For one capacity it is the best subset sum, to a few millionths; for several, that of their sum,
    of the items that fit the largest.
    """
    if _first_fit(sizes, capacities):
        return Packing(sum(sizes), True)
    possible = [size for size in sizes if size <= max(capacities)]
    together = sum(capacities)
    everything = False if len(possible) < len(sizes) or sum(sizes) > together else None
    return Packing(min(sum(possible), _subset_sum(possible, together)), everything)


def _first_fit(sizes: Sequence[int], capacities: Sequence[int]) -> bool:
    left = list(capacities)
    for size in sizes:
        chosen = next((i for i, room in enumerate(left) if size <= room), None)
        if chosen is None:
            return False
        left[chosen] -= size
    return True


def _subset_sum(sizes: Sequence[int], capacity: int) -> int:
    """An upper bound of the largest sum within ``capacity``, from sizes rounded down to whole units."""
    unit = max(1, capacity // _UNITS)
    limit = capacity // unit
    within = (1 << (limit + 1)) - 1
    reachable = 1  # bit i: some subset takes i units
    for size in sizes:
        reachable |= (reachable << (size // unit)) & within
    rounding = (unit - 1) * len(sizes)
    return min(capacity, (reachable.bit_length() - 1) * unit + rounding)
