"""Operations by sort: those that nothing tells apart, where they are in the order, and what they pass on."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphplan.passes.shares import Shares

__all__ = ["Arrival", "Sort", "bytes_read", "find_arrivals", "make_windows", "sort_units"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_LARGEST = 4  # operations at which the order is cut in any case, if there are no more of these
_LARGE = 0.02  # of all weights that such an operation reads at least
_TELLING = 0.002  # share of all weights from which one that several operations read is followed


@dataclass(frozen=True, slots=True)
class Sort:
    """Operations that nothing tells apart.

    Attributes:
        window: of the order; -1 for one that belongs to no single window.
        units: of ``shares``, in their order.
        own: items that are weights which only the first of them reads; the others have the like.
        read: items that are weights which others read too.
    """

    window: int
    units: tuple[int, ...]
    own: tuple[int, ...]
    read: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Values that operations of one sort make, one each, and operations of others read, one each.

    Attributes:
        count: of values.
        maker: index of the sort that makes them.
        readers: those that read them, and how many operations of each read one value.
        seconds: (kinds,) of a copy, at least.
    """

    count: int
    maker: int
    readers: tuple[tuple[int, int], ...]
    seconds: Floats


def sort_units(shares: Shares, window: Ints) -> list[Sort]:
    """Units by their window, and by what they cost, need and read."""
    readers: dict[int, int] = defaultdict(int)
    items: dict[int, list[int]] = defaultdict(list)
    for unit, item in shares.needs:
        readers[item] += 1
        items[unit].append(item)
    least = _TELLING * float(shares.nbytes.sum())
    sorts: dict[object, list[int]] = defaultdict(list)
    parts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for unit in range(shares.units):
        own = [item for item in items[unit] if readers[item] == 1]
        own = [item for item in [unit, *own] if shares.nbytes[item]]
        read = tuple(i for i in items[unit] if readers[i] > 1 and shares.nbytes[i] >= least)
        parts[unit] = tuple(own), read
        looks = sorted(_look(shares, item) for item in own)
        working = shares.working[:, unit].tobytes()
        sorts[int(window[unit]), int(shares.group[unit]), tuple(looks), read, working].append(unit)
    return [Sort(int(window[units[0]]), tuple(units), *parts[units[0]]) for units in sorts.values()]


def _look(shares: Shares, item: int) -> tuple[float | bytes, ...]:
    arrays = (shares.clock, shares.queue, shares.aside.clock, shares.aside.queue)
    columns = (np.ascontiguousarray(array[:, item].round(12)).tobytes() for array in arrays)
    return (float(shares.nbytes[item]), *columns)


def make_windows(shares: Shares, count: int) -> Ints:
    """(units,) windows with as many units that may be streamed, cut at the largest weights as well.

    -1 for a unit of more than one window.
    """
    at = {name: index for index, name in enumerate(shares.graph.operations)}
    first = np.array([at[shares.items[unit].members[0]] for unit in range(shares.units)])
    last = np.array([at[shares.items[unit].members[-1]] for unit in range(shares.units)])
    parts = [part for part in np.array_split(np.sort(first[_copied(shares)]), count) if len(part)]
    large = np.nonzero(bytes_read(shares) >= _LARGE * shares.nbytes.sum())[0]
    large = large[: _LARGEST * (len(large) <= _LARGEST)]  # many are a stack of their own
    starts = np.unique([*(part[0] for part in parts), *first[large], *(last[large] + 1)])
    starts = starts[starts > first.min()]
    begun = np.searchsorted(starts, first, side="right")
    return np.where(begun == np.searchsorted(starts, last, side="right"), begun, -1)


def bytes_read(shares: Shares) -> Ints:
    """(units,) bytes of the weights that each reads."""
    found = shares.nbytes[: shares.units].copy()
    for unit, item in shares.needs:
        found[unit] += shares.nbytes[item]
    return found


def _copied(shares: Shares) -> Bools:
    """(units,) whether weights may be copied for it beside other operations."""
    brought = np.isfinite(shares.aside.queue) & (shares.aside.queue > 0)
    able: Bools = np.any(brought | (shares.queue > 0), axis=0)
    found = able[: shares.units].copy()
    for unit, item in shares.needs:
        found[unit] |= able[item]
    return found


def find_arrivals(shares: Shares, sorts: list[Sort]) -> list[Arrival]:
    """Values that pass from one sort to others, where each operation makes and reads one at most."""
    sort_of = {unit: index for index, sort in enumerate(sorts) for unit in sort.units}
    readers: dict[int, list[int]] = defaultdict(list)
    for unit, item in shares.needs:
        readers[item].append(unit)
    alike: dict[tuple[int, ...], list[tuple[int, list[int], Floats]]] = defaultdict(list)
    for (maker, item), table in shares.tables.items():
        read_by = [item] if item < shares.units else readers[item]
        if maker in sort_of:
            key = (sort_of[maker], *sorted(sort_of[unit] for unit in read_by))
            alike[key].append((maker, read_by, table[:, 0, 1]))
    found = []
    for (maker, *others), values in alike.items():
        made = {one for one, _, _ in values}
        read = [unit for _, units, _ in values for unit in units]
        if len(set(read)) == len(read) and len(made) == len(values):
            least = np.min([seconds for *_, seconds in values], axis=0)
            found.append(Arrival(len(values), maker, tuple(Counter(others).items()), least))
    return found
