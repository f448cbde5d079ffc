"""Coarser macro-operations for streamed searches: light operations go with the heavy one beside them.

Where an operation runs that reads few weights is decided by what lies around it. The order is cut between
every two heavy operations, where the fewest bytes cross. A placement of the coarse problem is one of the
problem itself; bounds are proven on the problem itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from graphplan.passes.placement.arrays import Arrays, Bools, Floats
from graphplan.passes.placement.params import PARAMS
from graphplan.passes.placement.problem import Problem


def coarsen(arrays: Arrays) -> Problem:
    """The same problem with pieces of its order tied together."""
    problem = arrays.problem
    if arrays.count <= PARAMS.coarse_least:
        return problem
    cuts = [0, *_cuts(arrays), arrays.count]
    names = [operation.name for operation in arrays.operations]
    return replace(problem, graph=problem.graph.tied(names[a:b] for a, b in pairwise(cuts)))


def _cuts(arrays: Arrays) -> list[int]:
    """Positions in order, without the ends."""
    count, crossing, allowed = arrays.count, arrays.crossing, _allowed(arrays)
    nbytes, longest = bytes_read(arrays), PARAMS.coarse_longest
    least = PARAMS.negligible * nbytes[nbytes > 0].mean() if nbytes.any() else 0.0
    heavy = np.flatnonzero(nbytes > least).tolist()
    found = {0, count}
    runs_on = np.isfinite(arrays.compute)
    found |= set((np.flatnonzero((runs_on[:, 1:] != runs_on[:, :-1]).any(axis=0)) + 1).tolist())
    for before, after in pairwise([*heavy, count]):
        if (position := _lowest(crossing, allowed, before + 1, after)) is not None:
            found.add(position)
    apart = _apart(arrays, nbytes)
    for index in heavy:
        if apart[index]:
            found |= {index, index + 1}
    for first, last in pairwise(sorted(found)):
        while last - first > longest:
            position = _lowest(crossing, allowed, first + longest // 2, min(first + longest, last - 1))
            if position is None:
                break
            found.add(position)
            first = position
    return sorted(found - {0, count})


def _lowest(crossing: Floats, allowed: Bools, first: int, last: int) -> int | None:
    positions = first + np.flatnonzero(allowed[first : last + 1])
    return int(positions[crossing[positions].argmin()]) if len(positions) else None


def bytes_read(arrays: Arrays) -> Floats:
    """(operations,) bytes of weights."""
    mine = (arrays.item >= arrays.values) & (arrays.reader < arrays.count)
    found = np.bincount(arrays.reader[mine], arrays.nbytes[arrays.item[mine]], arrays.count)
    return np.asarray(found, dtype=float)


def _apart(arrays: Arrays, nbytes: Floats) -> Bools:
    """(operations,) that share a weight with others, or whose results come from the CPU before it could.

    Others are those of other macro-operations. A view of a weight, or its cast, goes with its reader.
    """
    several = [item for item, units in arrays.readers.items() if item >= arrays.values and len(units) > 1]
    shared = np.zeros(arrays.count + 1, dtype=bool)
    shared[arrays.reader[np.isin(arrays.item, several)]] = True
    shared = shared[:-1]  # without the end, where results are read
    if arrays.cpu is None:
        return shared
    per_byte = arrays.per_byte[arrays.cpu, : arrays.computing][arrays.accelerates]
    fastest = per_byte.min() if len(per_byte) else 0.0
    made = arrays.source[: arrays.values]
    results = np.bincount(made[made >= 0], arrays.nbytes[: arrays.values][made >= 0], arrays.count)
    return np.asarray(shared | (arrays.compute[arrays.cpu] < (nbytes - results) * fastest))


def _allowed(arrays: Arrays) -> Bools:
    """(positions,) that part no group, but for those that are spread out."""
    found = np.ones(arrays.count + 1, dtype=bool)
    for members in arrays.units:
        if members[-1] - members[0] < PARAMS.coarse_longest:
            found[members[0] + 1 : members[-1] + 1] = False
    return found
