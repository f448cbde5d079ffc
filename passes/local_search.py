"""A placement that a local search changes, and what changes cost.

A change is priced by what it touches: compute of the operations that move, copies of the values and weights
at their edges. Only one that is cheaper is put before the evaluator, which knows the bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain as joined

from graphplan.cost import move_seconds
from graphplan.device import DeviceKey
from graphplan.passes.chain import Chain
from graphplan.passes.evaluate import Evaluation, Problem
from graphplan.passes.residence import cpu_key

__all__ = ["Edge", "LocalSearch"]

_HIDDEN = 0.9  # share of a call that streaming may take and still count as hidden


@dataclass(frozen=True, slots=True)
class Edge:
    """A value or weight that some operations read or make which may move to another device.

    Attributes:
        nbytes: of a copy.
        home: where it is; None where it moves with them.
        readers: devices where others read it.
        read: whether those that move read it.
        hidden: devices for which a copy costs nothing.
    """

    nbytes: int
    home: DeviceKey | None
    readers: set[DeviceKey]
    read: bool
    hidden: set[DeviceKey]


class LocalSearch:
    """What refining and mending have in common.

    Args:
        problem: what is placed.
        chain: its graph in order.
        start: a placement.
        work: operations and steps that may be looked at.
        deadline: ``time.monotonic()`` at which to stop, or None.

    Attributes:
        best: the placement that is changed.
        left: operations and steps that may still be looked at.
        device: operation -> where it runs in ``best``.
        fetched: weights that live on the CPU there, and are read elsewhere.
    """

    def __init__(
        self, problem: Problem, chain: Chain, start: Evaluation, work: int, deadline: float | None
    ) -> None:
        self.problem, self.chain, self.best, self.left = problem, chain, start, work
        self.deadline = deadline
        self.graph = problem.graph
        self.devices = [spec for spec in problem.topology.devices if spec.computes]
        self.cpu = cpu_key(problem.topology)
        self.room = {spec.key: spec.room for spec in self.devices}
        self.seconds = {spec.key: list(problem.clock(spec).values()) for spec in self.devices}
        groups = [sorted(group, key=chain.index.__getitem__) for group in self.graph.together]
        self.together = {name: group for group in groups for name in group}
        self.order = [operation.name for operation in chain.operations]
        self.names = {op.name: (*op.inputs, *op.outputs) for op in chain.operations}
        self.readers = self.graph.readers
        weights = self.graph.weights
        self.weights_read = {
            operation.name: tuple(name for name in operation.inputs if name in weights)
            for operation in chain.operations
        }
        self._ends: dict[str, frozenset[str]] = {}
        self.adopt(start)

    @property
    def over(self) -> bool:
        """Whether the work is done or time is up."""
        return self.left <= 0 or (self.deadline is not None and time.monotonic() >= self.deadline)

    def adopt(self, evaluation: Evaluation) -> None:
        """Go on from a placement."""
        self.best = evaluation
        self.device = dict(evaluation.schedule.assignment.operations)
        homes = evaluation.schedule.assignment.weights
        self.fetched = {
            name
            for name, key in homes.items()
            if any(self.device[r] != key for r in self.readers_of(name)) and key == self.cpu
        }
        self.hidden = self._hidden_queues(evaluation)
        self._paid: dict[str, float] = {}  # seconds of copying each value and weight, as things are

    def _hidden_queues(self, evaluation: Evaluation) -> set[DeviceKey]:
        """Accelerators whose weights are streamed in less time than the call takes."""
        busy: dict[DeviceKey, float] = {}
        for load in evaluation.schedule.loads():
            seconds = move_seconds(load, self.problem.topology)
            busy[load.device] = busy.get(load.device, 0.0) + seconds
        accelerators = (spec.key for spec in self.devices if spec.is_accelerator)
        return {key for key in accelerators if busy.get(key, 0.0) < _HIDDEN * evaluation.seconds}

    def readers_of(self, name: str) -> tuple[str, ...]:
        """The operations that read a value or a weight."""
        return self.readers.get(name, ())

    def intervals(self, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pieces of the order between cuts, the shortest first; lengths double."""
        for pieces in self.intervals_by_length(cuts):
            yield from pieces

    def intervals_by_length(self, cuts: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
        """The same, those of a length together."""
        length = 1
        while length < len(cuts):
            yield [(cuts[i], cuts[i + length]) for i in range(len(cuts) - length)]
            length *= 2

    def closure(self, start: int, end: int) -> list[str]:
        """The operations of a piece, and those that stay together with them."""
        names = self.order[start:end]
        if not self.together:
            return names
        return list(
            dict.fromkeys(joined.from_iterable((name, *self.together.get(name, ())) for name in names))
        )

    def weights_of(self, names: Sequence[str]) -> set[str]:
        """What these operations read of weights."""
        return set(joined.from_iterable(map(self.weights_read.__getitem__, names)))

    def bytes_at(self, weights: Iterable[str]) -> dict[DeviceKey, int]:
        """Bytes of these weights by where they live."""
        homes, found = self.best.schedule.assignment.weights, dict[DeviceKey, int]()
        for name in weights:
            found[homes[name]] = found.get(homes[name], 0) + self.graph.weights[name].nbytes
        return found

    def overfills(self, target: DeviceKey, at: Mapping[DeviceKey, int]) -> bool:
        """Whether bytes of weights that live elsewhere alone, beside what is there, pass its budget."""
        coming = sum(at.values()) - at.get(target, 0)
        return self.best.peak(target).weights + coming > self.room[target]

    def local_seconds(self, moving: Sequence[str]) -> float:
        """Seconds of everything that moving these operations can change."""
        total = sum(self.seconds[self.device[name]][self.chain.index[name]] for name in moving)
        for name in dict.fromkeys(joined.from_iterable(map(self.names.__getitem__, moving))):
            paid = self._paid.get(name)
            if paid is None:
                paid = self._paid[name] = self._copy_seconds(self._edge(name, set(), self.fetched))
            total += paid
        return total

    def moved_seconds(self, moving: Sequence[str], target: DeviceKey, border: Sequence[Edge]) -> float:
        """The same when they are on ``target``, where only what is at their ``border`` is copied."""
        seconds, index = self.seconds[target], self.chain.index
        total = sum(seconds[index[name]] for name in moving)
        for edge in border:
            total += self._copy_seconds(edge, target)
        return total

    def border(self, moving: Sequence[str], fetched: Set[str]) -> list[Edge]:
        """What these operations read or make that is not made and read by them alone."""
        moved = set(moving)
        touched = dict.fromkeys(joined.from_iterable(map(self.names.__getitem__, moving)))
        border = (name for name in touched if name in fetched or not self._inside(name) <= moved)
        return [self._edge(name, moved, fetched) for name in border]

    def _inside(self, name: str) -> frozenset[str]:
        """The operations that must be on one device for a value not to be copied, nor a weight to it."""
        found = self._ends.get(name)
        if found is None:
            found = frozenset(self.readers_of(name))
            leaves = name in self.graph.outputs and self.problem.returns_to_host
            if leaves or name in self.problem.fixed_weights:
                found |= {""}
            elif name not in self.graph.weights:
                found |= {self.graph.producer.get(name, "")}
            self._ends[name] = found
        return found

    def _edge(self, name: str, moved: Set[str], fetched: Set[str]) -> Edge:
        """Where a value or weight comes from and who reads it, while the operations ``moved`` are moving."""
        readers = self.readers_of(name)
        elsewhere = {self.device[reader] for reader in readers if reader not in moved}
        read = not moved.isdisjoint(readers)
        weight = self.graph.weights.get(name)
        home: DeviceKey | None
        if weight is not None:
            fixed = self.problem.fixed_weights.get(name)
            at_first = None if readers[0] in moved else self.device[readers[0]]
            home = fixed if fixed is not None else self.cpu if name in fetched else at_first
            # the evaluator knows what does not overlap after all
            hidden = self.hidden if home == self.cpu and name in self.graph.streamable else set[DeviceKey]()
            return Edge(weight.nbytes, home, elsewhere, read, hidden)
        value = self.graph.values[name]
        if not value.is_tensor:
            return Edge(0, None, set(), False, set())
        made = self.graph.producer.get(name)
        home = self.problem.host if made is None else None if made in moved else self.device[made]
        if name in self.graph.outputs and self.problem.returns_to_host:
            elsewhere.add(self.problem.host)
        return Edge(value.copy_bytes, home, elsewhere, read, set())

    def _copy_seconds(self, edge: Edge, target: DeviceKey | None = None) -> float:
        home = target if edge.home is None else edge.home
        readers = edge.readers | {target} if edge.read else edge.readers
        readers = readers - edge.hidden - {home}
        if not readers or home is None:
            return 0.0
        topology = self.problem.topology
        return math.fsum(topology.link(home, key).seconds(edge.nbytes) for key in readers if key is not None)
