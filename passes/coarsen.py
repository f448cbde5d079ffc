"""Operations that a search need not part: the light ones go with the heavy one that they lie beside.

What is small in bytes of weights is decided by what lies around it: an activation runs where the projection
before it runs. Where one heavy operation ends and the next begins is cut where the fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from graphplan.passes.chain import Chain
from graphplan.passes.evaluate import Problem
from graphplan.passes.residence import cpu_key

__all__ = ["coarsen"]

Floats = npt.NDArray[np.float64]

_SMALL = 100  # operations up to which each is placed by itself
_LIGHT = 0.05  # of the weights that an operation reads on average, up to which it goes with its neighbours
_LONGEST = 16  # operations that are placed as one


def coarsen(problem: Problem, chain: Chain) -> Problem:
    """The same problem with pieces of its order tied together; each has at most one heavy operation."""
    if chain.count <= _SMALL:
        return problem
    cuts = [0, *sorted(set(_Cuts(problem, chain).all())), chain.count]
    groups = [
        [operation.name for operation in chain.operations[begin:end]] for begin, end in pairwise(cuts)
    ]
    return replace(problem, graph=problem.graph.tied(groups))


class _Cuts:
    """Where to part an order."""

    def __init__(self, problem: Problem, chain: Chain) -> None:
        self.problem, self.chain = problem, chain
        self.may = np.zeros(chain.count + 1, dtype=bool)
        self.may[chain.positions(chain.count + 1)] = True

    def all(self) -> Iterator[int]:
        """Positions between two heavy operations, and more of them where these are far apart."""
        heavy, begin = self._heavy(), 0
        for before, after in pairwise([*heavy, self.chain.count]):
            position = self._lowest(before + 1, after)
            if position is not None:
                yield from self._further(begin, position)
                yield position
                begin = position
        for index in heavy:
            if self._is_cheap_on_cpu(index) or self._shares(index):
                yield from (index, index+1)

    def _heavy(self) -> list[int]:
        nbytes = self._nbytes
        usual = nbytes[nbytes > 0].mean() if nbytes.any() else 0.0
        return [int(i) for i in np.nonzero(nbytes > _LIGHT * usual)[0]]

    @cached_property
    def _nbytes(self) -> Floats:
        """(operations,) bytes of weights."""
        reads = self.chain.weight_reads
        return np.bincount(reads.reader, reads.nbytes, minlength=self.chain.count).astype(float)

    def _shares(self, index: int) -> bool:
        """Whether others read its weights too."""
        graph = self.problem.graph
        return any(n in graph.weights and len(graph.readers[n]) > 1 for n in self.chain.operations[index].inputs)

    def _is_cheap_on_cpu(self, index: int) -> bool:
        """Whether the CPU computes it sooner than its weights can be copied."""
        cpu = cpu_key(self.problem.topology)
        if cpu is None: return False
        bw = max(self.problem.topology.link(cpu,s.key).bandwidth for s in self.problem.topology.devices if s.is_accelerator)
        return self.problem.seconds(self.chain.operations[index], self.problem.topology[cpu]) < self._nbytes[index]/bw

    def _lowest(self, first: int, last: int) -> int | None:
        """The position from ``first`` to ``last`` that the fewest bytes cross; the first of equals."""
        positions = [p for p in range(first, last + 1) if self.may[p]]
        return min(positions, key=lambda p: self.chain.crossing[p], default=None)

    def _further(self, begin: int, end: int) -> Iterator[int]:
        """Cuts of a piece that is too long."""
        while end - begin > _LONGEST:
            position = self._lowest(begin + _LONGEST // 2, min(begin + _LONGEST, end - 1))
            if position is None:
                return
            yield position
            begin = position
