"""Mend a placement that passes a budget: move what costs least off the devices that are over theirs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphplan.device import DeviceKey
from graphplan.passes.chain import Chain
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.local_search import Edge, LocalSearch
from graphplan.passes.residence import reside

__all__ = ["repair"]

_RELIEFS = 12  # moves off a full device that are judged at a time


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
    search = _Repair(problem, chain, start, work, deadline)
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


class _Repair(LocalSearch):
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
        for pieces in ([(i, i + 1) for i in heavy], *self.intervals_by_length(cuts)):
            sufficed = True  # longer pieces are for what these do not free
            for start, end in pieces:
                if self.over:
                    return
                names = tuple(self.closure(start, end))
                over = {self.device[name] for name in names} & self.best.excess.keys()
                weights = self.weights_of(names) if over and names not in seen else set[str]()
                freed = self._freed(names, weights, over)
                if not freed:
                    continue
                seen.add(names)
                self.left -= len(names)
                enough = freed >= sum(self.best.excess[key] for key in over)
                sufficed &= enough
                yield from self._relieve_by(names, weights, over, freed, enough)
            if sufficed and seen:
                return

    def _relieve_by(
        self, names: tuple[str, ...], weights: set[str], over: set[DeviceKey], freed: int, enough: bool
    ) -> Iterator[_Relief]:
        """The devices that these operations may go to."""
        here, border, at = None, list[Edge](), self.bytes_at(weights)
        for spec in self.devices:
            if spec.key in over or self.overfills(spec.key, at):
                continue
            if here is None:
                here, border = self.local_seconds(names), self.border(names, self.fetched)
            seconds = self.moved_seconds(names, spec.key, border) - here
            if math.isfinite(seconds):
                yield _Relief(names, spec.key, seconds if enough else seconds + 1.0, freed)

    def _freed(self, names: Sequence[str], weights: set[str], over: set[DeviceKey]) -> int:
        """Bytes of these weights that leave the devices ``over`` with these operations."""
        homes, going = self.best.schedule.assignment.weights, set(names)
        return sum(
            self.graph.weights[name].nbytes
            for name in weights
            if homes[name] in over and going.issuperset(self.readers_of(name))
        )

    def _lighten(self, device: Mapping[str, DeviceKey], before: int) -> bool:
        found = evaluate(self.problem, reside(self.problem, device, self.fetched))
        self.left -= len(found.schedule.steps)
        if sum(found.excess.values()) >= before:
            return False
        self.adopt(found)
        return True
