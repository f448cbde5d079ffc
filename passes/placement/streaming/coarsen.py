"""Coarser macro-operations for streamed searches: light operations are tied to a heavy neighbour.

An operation is heavy if it reads many bytes of weights. The order is cut between every two heavy operations,
where the fewest bytes cross. A placement of the coarse problem is one of the problem itself. Bounds are of
the problem itself.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from graphplan.passes.placement.arrays import Arrays, Bools, Floats
from graphplan.passes.placement.params import PARAMS
from graphplan.passes.placement.problem import Problem


def coarsen(arrays: Arrays) -> Problem:
    """Return the problem with pieces of its order tied together."""
    problem = arrays.problem
    if arrays.count <= PARAMS.coarse_least:
        return problem
    cuts = [0, *_cuts(arrays), arrays.count]
    names = [operation.name for operation in arrays.operations]
    return replace(problem, graph=problem.graph.tied(names[a:b] for a, b in pairwise(cuts)))


def _cuts(arrays: Arrays) -> list[int]:
    count, crossing, allowed = arrays.count, arrays.crossing, _allowed(arrays)
    nbytes, longest = bytes_read(arrays), PARAMS.coarse_longest
    threshold = PARAMS.negligible * nbytes[nbytes > 0].mean() if nbytes.any() else 0.0
    heavy = np.flatnonzero(nbytes > threshold).tolist()
    positions = {0, count}
    runs_on = np.isfinite(arrays.compute)
    positions |= set((np.flatnonzero((runs_on[:, 1:] != runs_on[:, :-1]).any(axis=0)) + 1).tolist())
    for left, right in pairwise([*heavy, count]):
        if (position := _lowest_crossing(crossing, allowed, left + 1, right)) is not None:
            positions.add(position)
    alone = _placed_alone(arrays, nbytes)
    for index in heavy:
        if alone[index]:
            positions |= {index, index + 1}
    for first, last in pairwise(sorted(positions)):
        while last - first > longest:
            position = _lowest_crossing(
                crossing, allowed, first + longest // 2, min(first + longest, last - 1)
            )
            if position is None:
                break
            positions.add(position)
            first = position
    return sorted(positions - {0, count})


def _lowest_crossing(crossing: Floats, allowed: Bools, first: int, last: int) -> int | None:
    positions = first + np.flatnonzero(allowed[first : last + 1])
    return int(positions[crossing[positions].argmin()]) if len(positions) else None


def bytes_read(arrays: Arrays) -> Floats:
    """(operations,) bytes of the weights that each reads."""
    of_weights = (arrays.item >= arrays.values) & (arrays.reader < arrays.count)
    nbytes = np.bincount(arrays.reader[of_weights], arrays.nbytes[arrays.item[of_weights]], arrays.count)
    return np.asarray(nbytes, dtype=float)


def _placed_alone(arrays: Arrays, nbytes: Floats) -> Bools:
    """(operations,) whether each shares a weight, or the CPU computes it before its weights could be copied.

    Its weights count less its results: so a view or cast of a weight stays with its reader.
    """
    several = [item for item, units in arrays.readers.items() if item >= arrays.values and len(units) > 1]
    shared = np.zeros(arrays.count + 1, dtype=bool)
    shared[arrays.reader[np.isin(arrays.item, several)]] = True
    shared = shared[:-1]  # without the end, which reads the results
    assert arrays.cpu is not None
    fastest = arrays.per_byte[arrays.cpu, : arrays.computing][arrays.accelerates].min()
    sources = arrays.source[: arrays.values]
    results = np.bincount(sources[sources >= 0], arrays.nbytes[: arrays.values][sources >= 0], arrays.count)
    return np.asarray(shared | (arrays.compute[arrays.cpu] < (nbytes - results) * fastest))


def _allowed(arrays: Arrays) -> Bools:
    """(positions,) whether a cut separates no macro-operation, apart from those that span many operations."""
    allowed = np.ones(arrays.count + 1, dtype=bool)
    for members in arrays.units:
        if members[-1] - members[0] < PARAMS.coarse_longest:
            allowed[members[0] + 1 : members[-1] + 1] = False
    return allowed
