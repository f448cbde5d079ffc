"""Local search: shift pieces of the sequence between devices while that helps.

A change is priced by what it touches (compute of the operations that move, copies of the values and
weights at their edges); only one that is cheaper is put before the evaluator, which knows the bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as joined

from graphplan.cost import move_seconds
from graphplan.device import DeviceKey
from graphplan.graph import Operation
from graphplan.passes.chain import Chain
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.residence import cpu_key, reside

__all__ = ["refine", "repair"]

_EPSILON = 1e-12
_RELIEFS = 12  # moves off a full device that are judged at a time
_HIDDEN = 0.9  # share of a call that streaming may take and still count as hidden


def refine(
    problem: Problem,
    chain: Chain,
    start: Evaluation,
    work: int = 200_000,
    deadline: float | None = None,
) -> Evaluation:
    """A placement at least as good as ``start``.

    Args:
        problem: what is placed.
        chain: its graph in order.
        start: a feasible placement.
        work: operations and steps that may be looked at; more searches longer. The result depends
            on the input and on this, not on the clock.
        deadline: ``time.monotonic()`` at which to stop, or None.
    """
    search = _Search(problem, chain, start, work, deadline)
    improved = True
    while improved and not search.over:
        improved = search.sweep()
    return search.best


def repair(
    problem: Problem,
    chain: Chain,
    start: Evaluation,
    work: int = 100_000,
    deadline: float | None = None,
) -> Evaluation:
    """A placement that passes its budgets by fewer bytes than ``start``, by none if one is found.

    Args:
        problem: what is placed.
        chain: its graph in order.
        start: a placement that passes a budget.
        work: as in :func:`refine`.
        deadline: as in :func:`refine`.
    """
    search = _Search(problem, chain, start, work, deadline)
    while search.best.excess and not search.over and search.relieve():
        pass
    return search.best


@dataclass(frozen=True, slots=True)
class _Relief:
    """Operations that could leave a full device for ``target``.

    ``seconds`` are what it adds, a second more where the ``freed`` bytes are not enough.
    """

    names: tuple[str, ...]
    target: DeviceKey
    seconds: float
    freed: int


class _Search:
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
        self.near = [self._near(operation) for operation in chain.operations]
        self.names = {op.name: (*op.inputs, *op.outputs) for op in chain.operations}
        self.readers = self.graph.readers
        self._ends: dict[str, frozenset[str]] = {}
        self._adopt(start)

    @property
    def over(self) -> bool:
        """Whether the work is done or time is up."""
        return self.left <= 0 or (self.deadline is not None and time.monotonic() >= self.deadline)

    def _adopt(self, evaluation: Evaluation) -> None:
        self.best = evaluation
        self.device = dict(evaluation.schedule.assignment.operations)
        homes = evaluation.schedule.assignment.weights
        self.fetched = {
            name
            for name, key in homes.items()
            if any(self.device[r] != key for r in self._readers(name)) and key == self.cpu
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

    def _readers(self, name: str) -> tuple[str, ...]:
        return self.readers.get(name, ())

    def sweep(self) -> bool:
        """Try every change once; whether one helped."""
        improved = self._bring_home()
        cuts = [int(cut) for cut in self.chain.positions(256, part_groups=True)]
        for start, end in self._intervals(cuts):
            names = self._closure(start, end)
            for target in self._targets(start, end):
                if self.over:
                    return improved
                improved |= self._try(names, target)
        return improved

    def relieve(self) -> bool:
        """Move what costs least off a device that is over its budget; whether that helped."""
        before = sum(self.best.excess.values())
        trials = sorted(self._reliefs(), key=lambda trial: trial.seconds)
        for trial in trials[:_RELIEFS]:
            if self.over:
                return False
            if self._lighten({**self.device, **dict.fromkeys(trial.names, trial.target)}, before):
                return True
        return any(
            self._lighten({**self.device, **dict.fromkeys(trial.names, trial.target)}, before)
            for trial in sorted(trials, key=lambda trial: -trial.freed)[:_RELIEFS]
            if not self.over
        )

    def _reliefs(self) -> Iterator[_Relief]:
        """Pieces on a device that is over its budget, where they may go, and what that adds."""
        heavy = sorted(set(self.chain.weight_reads.reader.tolist()))
        cuts = [int(cut) for cut in self.chain.positions(256, part_groups=True)]
        seen: set[tuple[str, ...]] = set()
        for pieces in ([(i, i + 1) for i in heavy], *self._intervals_by_length(cuts)):
            sufficed = True  # longer pieces are for what these do not free
            for start, end in pieces:
                if self.over:
                    return
                names = tuple(self._closure(start, end))
                over = {self.device[name] for name in names} & self.best.excess.keys()
                freed = 0 if not over or names in seen else self._freed(names, over)
                if not freed:
                    continue
                seen.add(names)
                self.left -= len(names)
                enough = freed >= sum(self.best.excess[key] for key in over)
                sufficed &= enough
                yield from self._relieve_by(names, over, freed, enough)
            if sufficed and seen:
                return

    def _relieve_by(
        self, names: tuple[str, ...], over: set[DeviceKey], freed: int, enough: bool
    ) -> Iterator[_Relief]:
        """The devices that these operations may go to."""
        here = self._local_seconds(names)
        for spec in self.devices:
            if spec.key in over or self._overfills(spec.key, self._weights_of(names)):
                continue
            changed = {**self.device, **dict.fromkeys(names, spec.key)}
            seconds = self._moved_seconds(names, spec.key, changed, self.fetched) - here
            if math.isfinite(seconds):
                yield _Relief(names, spec.key, seconds if enough else seconds + 1.0, freed)

    def _weights_of(self, names: Sequence[str]) -> set[str]:
        return {w for name in names for w in self.graph.operations[name].inputs if w in self.graph.weights}

    def _freed(self, names: Sequence[str], over: Iterable[DeviceKey]) -> int:
        """Bytes of weights that leave the devices ``over`` with these operations."""
        homes, going = self.best.schedule.assignment.weights, set(names)
        return sum(
            self.graph.weights[w].nbytes
            for w in self._weights_of(names)
            if homes[w] in over and going.issuperset(self._readers(w))
        )

    def _lighten(self, device: Mapping[str, DeviceKey], before: int) -> bool:
        found = evaluate(self.problem, reside(self.problem, device, self.fetched))
        self.left -= len(found.schedule.steps)
        if sum(found.excess.values()) >= before:
            return False
        self._adopt(found)
        return True

    def _intervals(self, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
        for pieces in self._intervals_by_length(cuts):
            yield from pieces

    def _intervals_by_length(self, cuts: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
        length = 1
        while length < len(cuts):
            yield [(cuts[i], cuts[i + length]) for i in range(len(cuts) - length)]
            length *= 2

    def _closure(self, start: int, end: int) -> list[str]:
        names = self.order[start:end]
        if not self.together:
            return names
        return list(
            dict.fromkeys(joined.from_iterable((name, *self.together.get(name, ())) for name in names))
        )

    def _targets(self, start: int, end: int) -> list[DeviceKey]:
        """Devices worth trying: the neighbours', and any accelerator for what the CPU computes."""
        around = [self.order[at] for at in (start - 1, end) if 0 <= at < len(self.order)]
        near = joined(around, joined.from_iterable(self.near[start:end]))
        found = dict.fromkeys(map(self.device.__getitem__, near))
        if any(self.device[name] == self.cpu for name in self.order[start:end]):
            found.update(dict.fromkeys(spec.key for spec in self.devices if spec.is_accelerator))
        return list(found)

    def _near(self, operation: Operation) -> tuple[str, ...]:
        """What makes the inputs of an operation, and the first to read them."""
        found: dict[str, None] = {}
        for name in operation.inputs:
            made = [self.graph.producer[name]] if name in self.graph.producer else []
            found.update(dict.fromkeys((*made, *self.graph.consumers.get(name, ())[:2])))
        return tuple(found)

    def _try(self, names: Sequence[str], target: DeviceKey) -> bool:
        moving = [name for name in names if self.device[name] != target]
        if not moving:
            return False
        self.left -= 2 * len(moving)
        before = self._local_seconds(moving)
        changed = dict(self.device)
        changed.update(dict.fromkeys(moving, target))
        weights = {
            w
            for name in moving
            for w in self.graph.operations[name].inputs
            if w in self.graph.weights and self.graph.weights[w].kind != "buffer"
        }
        for fetched in (self.fetched - weights, self.fetched | weights):
            if fetched and (self.cpu is None or not self.problem.offload):
                continue
            if not weights <= fetched and self._overfills(target, weights):
                continue
            if self._moved_seconds(moving, target, changed, fetched) >= before - _EPSILON:
                continue
            if self._judge(changed, fetched):
                return True
        return False

    def _overfills(self, target: DeviceKey, weights: set[str]) -> bool:
        """Whether these weights alone, beside those that are there, pass the budget of ``target``."""
        homes = self.best.schedule.assignment.weights
        coming = sum(self.graph.weights[name].nbytes for name in weights if homes[name] != target)
        return self.best.peak(target).weights + coming > self.room[target]

    def _bring_home(self) -> bool:
        """Let fetched weights live where they are read, where there is room after all.

        That is worth it even where their copies are hidden: nothing is offloaded that fits.
        """
        improved = False
        fetched = [weight for weight in self.graph.weights.values() if weight.name in self.fetched]
        for name in (weight.name for weight in sorted(fetched, key=lambda weight: -weight.nbytes)):
            if self.over:
                break
            improved |= self._judge(self.device, self.fetched - {name}, tie=True)
        return improved

    def _judge(self, device: Mapping[str, DeviceKey], fetched: set[str], *, tie: bool = False) -> bool:
        """Adopt a placement that is faster; with ``tie`` also one as fast that copies fewer bytes."""
        found = evaluate(self.problem, reside(self.problem, device, fetched))
        self.left -= len(found.schedule.steps)
        if not found.feasible:
            return False
        faster = found.seconds < self.best.seconds - _EPSILON
        as_fast = found.seconds <= self.best.seconds + _EPSILON
        if not faster and not (tie and as_fast and _copied(found) < _copied(self.best)):
            return False
        self._adopt(found)
        return True

    def _local_seconds(self, moving: Sequence[str]) -> float:
        """Seconds of everything that moving these operations can change."""
        total = sum(self.seconds[self.device[name]][self.chain.index[name]] for name in moving)
        for name in dict.fromkeys(joined.from_iterable(map(self.names.__getitem__, moving))):
            paid = self._paid.get(name)
            if paid is None:
                paid = self._paid[name] = self._copy_seconds(name, self.device, self.fetched)
            total += paid
        return total

    def _moved_seconds(
        self, moving: Sequence[str], target: DeviceKey, device: Mapping[str, DeviceKey], fetched: set[str]
    ) -> float:
        """The same when they are on ``target``, as in ``device``."""
        seconds, index, moved = self.seconds[target], self.chain.index, set(moving)
        total = sum(seconds[index[name]] for name in moving)
        for name in dict.fromkeys(joined.from_iterable(map(self.names.__getitem__, moving))):
            if not self._inside(name) <= moved:  # else made and read in one place
                total += self._copy_seconds(name, device, fetched)
        return total

    def _inside(self, name: str) -> frozenset[str]:
        """The operations that must be on one device for a value not to be copied."""
        found = self._ends.get(name)
        if found is None:
            maker = self.graph.producer.get(name, "")
            leaves = name in self.graph.outputs and self.problem.returns_to_host
            found = frozenset(["" if leaves else maker, *self._readers(name)])
            self._ends[name] = found
        return found

    def _copy_seconds(self, name: str, device: Mapping[str, DeviceKey], fetched: set[str]) -> float:
        graph, topology = self.graph, self.problem.topology
        readers = set(map(device.__getitem__, self._readers(name)))
        weight = graph.weights.get(name)
        if weight is not None:
            first = self._readers(name)
            fixed = self.problem.fixed_weights.get(name)
            home = fixed if fixed is not None else self.cpu if name in fetched else device[first[0]]
            nbytes = weight.nbytes
            if home == self.cpu and name in graph.streamable:
                readers -= self.hidden  # the evaluator knows what does not overlap after all
        else:
            value = graph.values[name]
            if not value.is_tensor:
                return 0.0
            made = graph.producer.get(name)
            home = self.problem.host if made is None else device[made]
            nbytes = value.copy_bytes
            if name in graph.outputs and self.problem.returns_to_host:
                readers.add(self.problem.host)
        assert home is not None
        readers.discard(home)
        return math.fsum(topology.link(home, key).seconds(nbytes) for key in readers) if readers else 0.0


def _copied(evaluation: Evaluation) -> int:
    return sum(load.nbytes for load in evaluation.schedule.loads())
