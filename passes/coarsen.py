"""Operations that a search of streamed weights need not part: light ones go with the heavy one beside them.

Where an operation runs that reads few weights is decided by what lies around it. Between two heavy operations
the order is cut where the fewest bytes cross.
"""

from __future__ import annotations

from collections import Counter
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

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_SMALL = 100  # operations up to which each is placed by itself
_LIGHT = 0.05  # of the weights that an operation reads on average, up to which it goes with its neighbours
_LONGEST = 16  # operations that are placed as one


def coarsen(problem: Problem, chain: Chain) -> Problem:
    """The same problem with pieces of its order tied together; each has one heavy operation at most.

    But for groups, whose pieces become one. A placement of it is one of ``problem``, which has others beside.
    """
    if chain.count <= _SMALL:
        return problem
    cuts = [0, *_Order(problem, chain).cuts(), chain.count]
    pieces = ([operation.name for operation in chain.operations[a:b]] for a, b in pairwise(cuts))
    return replace(problem, graph=problem.graph.tied(pieces))


class _Order:
    """What is known of an order to cut it."""

    def __init__(self, problem: Problem, chain: Chain) -> None:
        self.problem, self.chain = problem, chain
        self.allowed = self._apart()

    def _apart(self) -> Bools:
        """(positions,) where no group is parted, but for those that are spread out."""
        found = np.ones(self.chain.count + 1, dtype=bool)
        for group in self.problem.graph.together:
            members = [self.chain.index[name] for name in group]
            if max(members) - min(members) < _LONGEST:
                found[min(members) + 1 : max(members) + 1] = False
        return found

    def cuts(self) -> list[int]:
        """Positions at which to cut, in order."""
        found = {0, self.chain.count, *self._rule_changes()}
        for before, after in pairwise([*self._heavy, self.chain.count]):
            position = self._lowest(before + 1, after)
            if position is not None:
                found.add(position)
        for index in self._heavy:
            if self._is_apart(index):
                found |= {self._first_view(index), index + 1}
        for first, last in pairwise(sorted(found)):
            found.update(self._further(first, last))
        return sorted(found - {0, self.chain.count})

    def _rule_changes(self) -> Iterator[int]:
        """Positions between operations that may not run on the same devices."""
        rules = [self.problem.allowed.get(operation.name) for operation in self.chain.operations]
        for position, (before, after) in enumerate(pairwise(rules), 1):
            if before != after:
                yield position

    @cached_property
    def _reads(self) -> list[frozenset[str]]:
        """The weights whose data each operation reads."""
        return [self.problem.graph.weights_read(operation.name) for operation in self.chain.operations]

    @cached_property
    def _nbytes(self) -> Floats:
        """(operations,) bytes of weights that each reads."""
        weights = self.problem.graph.weights
        return np.array([float(sum(weights[name].nbytes for name in names)) for names in self._reads])

    @cached_property
    def _heavy(self) -> list[int]:
        reading = self._nbytes[self._nbytes > 0]
        least = _LIGHT * float(reading.mean()) if len(reading) else 0.0
        return [int(index) for index in np.nonzero(self._nbytes > least)[0]]

    @cached_property
    def _bandwidth(self) -> float:
        """Bytes per second at which an accelerator can be brought weights."""
        topology = self.problem.topology
        cpu = cpu_key(topology)
        accelerators = [spec.key for spec in topology.devices if spec.is_accelerator]
        links = [] if cpu is None else [topology.link(cpu, key) for key in accelerators]
        return max((link.bandwidth for link in links), default=np.inf)

    def _is_apart(self, index: int) -> bool:
        """Whether an operation is to be placed without its neighbours.

        The CPU computes it before its weights could be copied, or others settle where its weights are.
        """
        if self._reads[index] & self._shared:
            return True
        cpu = cpu_key(self.problem.topology)
        if cpu is None:
            return False
        seconds = self.problem.seconds(self.chain.operations[index], self.problem.topology[cpu])
        return bool(seconds < self._nbytes[index] / self._bandwidth)

    @cached_property
    def _shared(self) -> frozenset[str]:
        """Weights that several operations read."""
        counts = Counter(name for names in self._reads for name in names)
        return frozenset(name for name, count in counts.items() if count > 1)

    def _first_view(self, index: int) -> int:
        """The first operation that makes a view of what one reads, shortly before it; or itself."""
        graph, chain, first = self.problem.graph, self.chain, index
        for name in chain.operations[index].inputs:
            while name in graph.producer and graph.root(name) in graph.weights:
                made = graph.values[name]
                if index - chain.index[graph.producer[name]] < _LONGEST:
                    first = min(first, chain.index[graph.producer[name]])
                if made.alias_of is None:
                    break
                name = made.alias_of
        return first

    def _lowest(self, first: int, last: int) -> int | None:
        """The position from ``first`` to ``last`` that the fewest bytes cross; the first of equals."""
        positions = [p for p in range(first, last + 1) if self.allowed[p]]
        return min(positions, key=lambda p: self.chain.crossing[p], default=None)

    def _further(self, first: int, last: int) -> Iterator[int]:
        """Cuts of a piece that is too long."""
        while last - first > _LONGEST:
            position = self._lowest(first + _LONGEST // 2, min(first + _LONGEST, last - 1))
            if position is None:
                position = next((p for p in range(first + _LONGEST + 1, last) if self.allowed[p]), last)
            if position < last:
                yield position
            first = position
