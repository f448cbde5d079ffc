"""Activations in knapsacks: how much a device must leave free for what runs on it.

That is the most that any of its moments needs, which no knapsack can know beforehand. So there is one for
each band of needs: with room for the least of the band, and without whatever needs more than its most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceSpec
from graphplan.graph import Graph
from graphplan.passes.occupancy import Held, Occupancy

__all__ = ["Band", "Crowd", "find_crowds", "make_bands"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MEMBERS = 6  # units of a crowd at most: each is a dimension of a table
_SOON = 8  # places in the order within which the reader of a waiting value comes
_WINDOWS = 24  # pieces of the order, each of which has a typical need
_NEGLIGIBLE = 1e-3  # share of the room that activations may take without being counted


@dataclass(frozen=True, slots=True)
class Crowd:
    """Units that need bytes when they are on one device: one that runs, others that make it wait.

    Attributes:
        units: in order.
        nbytes: (kinds,) at least, beside weights.
        runs: the unit that runs at that moment.
    """

    units: tuple[int, ...]
    nbytes: Ints
    runs: int


@dataclass(frozen=True, slots=True)
class Band:
    """Shares of a kind of device whose neediest moment needs between ``low`` and ``high`` bytes."""

    kind: int
    low: int
    high: int


def find_crowds(
    graph: Graph, unit_of: dict[str, int], specs: Sequence[DeviceSpec], is_host: Sequence[bool]
) -> list[Crowd]:
    """One for each operation that runs while values wait that it does not read.

    Args:
        graph: in order.
        unit_of: operation -> the unit that it is placed with.
        specs: (kinds,) devices.
        is_host: (kinds,) whether the caller's tensors are there.
    """
    occupancy = Occupancy(graph, unit_of)
    place = {
        unit: i for i, unit in enumerate(dict.fromkeys(unit_of[n] for n in graph.operations if n in unit_of))
    }
    found = []
    for name in graph.operations:
        if name not in unit_of:
            continue
        crowd = _crowd(occupancy, name, place, specs, is_host)
        if crowd is not None:
            found.append(crowd)
    return found


def _crowd(
    occupancy: Occupancy,
    name: str,
    place: dict[int, int],
    specs: Sequence[DeviceSpec],
    is_host: Sequence[bool],
) -> Crowd | None:
    own = occupancy.unit_of[name]
    types = {spec.type for spec in specs}
    if len(types) > 1 and "cpu" in types:
        types -= {"cpu"}
    held = occupancy.during(name, sorted(types)[0])
    sure, waiting = list[Held](), list[Held]()
    for one in held:
        (sure if any(units <= {own} for units in one.units) else waiting).append(one)
    units = {own}
    latest = place[own] + _SOON
    for one in sorted(waiting, key=lambda one: -sum(one.nbytes)):
        near = [s for s in one.units if all(place[u] <= latest for u in s)]
        best = min(near, key=lambda s: (len(s - units), max(place[u] for u in s)), default=None)
        if best is not None and len(units | best) <= _MEMBERS:
            units |= best
            sure.append(one)
    if len(units) == 1:
        return None
    nbytes = [
        sum(one.allocated(spec) for one in sure if not (host and one.is_input))
        for spec, host in zip(specs, is_host, strict=True)
    ]
    return Crowd(tuple(sorted(units)), np.array(nbytes, dtype=np.int64), own)


def make_bands(working: Ints, crowds: Sequence[Crowd], nbytes: Ints, room: Floats) -> list[Band]:
    """The bands of each kind of device.

    Args:
        working: (kinds, units) bytes that a unit needs by itself.
        crowds: what several units need together.
        nbytes: (units,) weights of each.
        room: (kinds,) bytes for weights and activations.
    """
    bands = []
    for kind in range(len(working)):
        together = [int(crowd.nbytes[kind]) for crowd in crowds]
        needs = np.unique(np.array([*working[kind].tolist(), *together], dtype=np.int64))
        if not len(needs):
            bands.append(Band(kind, 0, 0))
            continue
        splits = {int(needs[-1])}
        if needs[-1] > _NEGLIGIBLE * room[kind]:
            splits.update(_typical(working[kind], crowds, kind, needs))
            splits.add(_carried(working[kind], nbytes))
        low = int(needs[0])
        for high in sorted(splits):
            bands.append(Band(kind, low, high))
            above = needs[needs > high]
            low = int(above[0]) if len(above) else high
    return bands


def _carried(working: Ints, nbytes: Ints) -> int:
    """What units need that have half of all weights."""
    order = np.argsort(working, kind="stable")
    total = np.cumsum(nbytes[order])
    return int(working[order[min(int(np.searchsorted(total, total[-1] / 2)), len(order) - 1)]])


def _typical(working: Ints, crowds: Sequence[Crowd], kind: int, needs: Ints) -> Iterator[int]:
    """Right below what every piece of the order needs, and what half of the pieces do not pass."""
    level = working.copy()
    for crowd in crowds:
        level[crowd.runs] = max(level[crowd.runs], crowd.nbytes[kind])
    peaks = sorted(int(piece.max()) for piece in np.array_split(level, _WINDOWS) if len(piece))
    below = needs[needs < peaks[0]]
    if len(below):
        yield int(below[-1])
    yield peaks[len(peaks) // 2]
