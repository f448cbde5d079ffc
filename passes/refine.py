"""Local search: shift pieces of the sequence between devices while that helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain as joined

from graphplan.device import DeviceKey
from graphplan.graph import Operation
from graphplan.passes.chain import Chain
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.local_search import LocalSearch
from graphplan.passes.residence import reside

__all__ = ["refine"]

_EPSILON = 1e-12


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
    search = _Refinement(problem, chain, start, work, deadline)
    improved = True
    while improved and not search.over:
        improved = search.sweep()
    return search.best


class _Refinement(LocalSearch):
    def __init__(
        self, problem: Problem, chain: Chain, start: Evaluation, work: int, deadline: float | None
    ) -> None:
        super().__init__(problem, chain, start, work, deadline)
        self.near = [self._near(operation) for operation in chain.operations]

    def sweep(self) -> bool:
        """Try every change once; whether one helped."""
        improved = self._bring_home()
        cuts = [int(cut) for cut in self.chain.positions(256, part_groups=True)]
        for start, end in self.intervals(cuts):
            names = self.closure(start, end)
            for target in self._targets(start, end):
                if self.over:
                    return improved
                improved |= self._try(names, target)
        return improved

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
        before = self.local_seconds(moving)
        weights = {
            w
            for name in moving
            for w in self.graph.operations[name].inputs
            if w in self.graph.weights and self.graph.weights[w].kind != "buffer"
        }
        for fetched in (self.fetched - weights, self.fetched | weights):
            if fetched and (self.cpu is None or not self.problem.offload):
                continue
            if not weights <= fetched and self.overfills(target, self.bytes_at(weights)):
                continue
            if self.moved_seconds(moving, target, self.border(moving, fetched)) >= before - _EPSILON:
                continue
            if self._judge({**self.device, **dict.fromkeys(moving, target)}, fetched):
                return True
        return False

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
        self.adopt(found)
        return True


def _copied(evaluation: Evaluation) -> int:
    return sum(load.nbytes for load in evaluation.schedule.loads())
