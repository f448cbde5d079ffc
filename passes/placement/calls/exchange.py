"""Local search over several calls at once: move weights, and what reads them, between devices.

The weights of a layer move to another device, alone or in exchange for those of one that is there; in each
call the operations that read them go along, or stay and stream them, whichever is faster. What lowers the
weighted sum of seconds and keeps every call's budgets is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from graphplan.devices.topology import DeviceKey
from graphplan.ir.graph import Graph
from graphplan.passes.placement.calls.shared_buffers import evaluate_together, fit_together
from graphplan.passes.placement.evaluate import Evaluation
from graphplan.passes.placement.params import PARAMS, ROUNDING, Effort, Limits
from graphplan.passes.placement.problem import Problem


def exchange(
    problems: Sequence[Problem],
    weights: Sequence[float],
    start: Sequence[Evaluation],
    limits: Limits,
) -> list[Evaluation]:
    """Placements of which the weighted sum of seconds is at most that of ``start``.

    Args:
        problems: one for each call; weights of one name are one weight.
        weights: how much each call's seconds count.
        start: a feasible placement of each call, over the same homes of weights and the same buffers.
        limits: when to stop.
    """
    search = _ExchangeSearch(problems, weights, list(start), limits)
    while not search.effort.over and search.sweep():
        pass
    return search.best


def weighted_seconds(weights: Sequence[float], found: Sequence[Evaluation]) -> float:
    """The sum of the calls' seconds, each times its weight."""
    return sum(weight * one.seconds for weight, one in zip(weights, found, strict=True))


@dataclass
class _ExchangeSearch:
    problems: Sequence[Problem]
    weights: Sequence[float]
    best: list[Evaluation]
    limits: Limits

    def __post_init__(self) -> None:
        problems = self.problems
        operations = sum(len(problem.graph.operations) for problem in problems)
        visits = PARAMS.visits(operations) * self.limits.effort / 4  # placing the calls has the rest
        self.effort = Effort(visits, self.limits.deadline)
        self.keys = [spec.key for spec in problems[0].topology.computing]
        self.accelerators = problems[0].topology.accelerator_keys
        fixed = {name for problem in problems for name in problem.fixed_weights}
        self.layers = _layers(problems[0].graph, fixed)
        followers = [_followers(problem.graph, self.layers) for problem in problems]
        self.followers = {layer: [each[layer] for each in followers] for layer in self.layers}
        self.bound = [_bound(problem.graph) for problem in problems]
        self.seconds = weighted_seconds(self.weights, self.best)

    def sweep(self) -> bool:
        """Try every move once; whether one helped."""
        improved = False
        for layer in self.layers:
            for key in self.keys:
                if self._home(layer) != key:
                    improved |= any(self._improves(moved) for moved in self._moves(layer, key))
        return improved

    def _home(self, layer: str) -> DeviceKey:
        return self.best[0].assignment.weights[self.layers[layer][0]]

    def _moves(self, layer: str, key: DeviceKey) -> Iterator[dict[str, DeviceKey]]:
        """A layer goes to a device, alone or in exchange for one of that device's."""
        before = self._home(layer)
        yield {layer: key}
        for other in self.layers:
            if self._home(other) == key:
                yield {layer: key, other: before}

    def _improves(self, moved: Mapping[str, DeviceKey]) -> bool:
        """Whether these moves help; then they are made."""
        found = None if self.effort.over else self._judge(moved)
        if found is None:
            return False
        seconds = weighted_seconds(self.weights, found)
        if seconds >= self.seconds * (1 - ROUNDING):
            return False
        self.best, self.seconds = found, seconds
        return True

    def _judge(self, moved: Mapping[str, DeviceKey]) -> list[Evaluation] | None:
        """The calls with these layers moved, where every budget is kept; each does what suits it best."""
        found = []
        for index, one in enumerate(self.best):
            homes = dict(one.assignment.weights)
            for layer, key in moved.items():
                homes.update(dict.fromkeys(self.layers[layer], key))
            best = None
            for devices in self._ways(index, moved):
                changed = replace(one.assignment, operations=devices, weights=homes)
                (judged,) = fit_together([self.problems[index]], [changed])
                self.effort.charge(100.0 * len(judged.schedule.steps))  # a schedule takes so much longer
                if judged.feasible and (best is None or judged.seconds < best.seconds):
                    best = judged
            if best is None:
                return None
            found.append(best)
        together = evaluate_together(self.problems, [one.assignment for one in found])
        return together if all(one.feasible for one in together) else None

    def _ways(self, index: int, moved: Mapping[str, DeviceKey]) -> list[dict[str, DeviceKey]]:
        """Where a call may run its operations then: with the weights, where they are, off the CPU."""
        stay = dict(self.best[index].assignment.operations)
        follow = dict(stay)
        for layer, key in moved.items():
            follow.update(dict.fromkeys(self.followers[layer][index], key))
        found = [follow, stay] if follow != stay else [stay]
        freed = next((key for key in map(self._home, moved) if key in self.accelerators), None)
        for devices in (follow, stay):
            busy = [name for name, key in devices.items() if key not in self.accelerators]
            if freed is not None and busy:
                found.append({**devices, **dict.fromkeys(busy, freed)})
        return [devices for devices in found if all(devices[op] == stay[op] for op in self.bound[index])]


def _layers(graph: Graph, fixed: set[str]) -> dict[str, list[str]]:
    """Layer -> its weights, as far as the caller has not settled where they are."""
    found: dict[str, list[str]] = {}
    for weight in graph.weights.values():
        if weight.name not in fixed and weight.nbytes and weight.streamable:
            found.setdefault(_layer_of(weight.name), []).append(weight.name)
    return found


def _bound(graph: Graph) -> list[str]:
    """The operations that read a weight that must be where it is read."""
    weights = {weight.name for weight in graph.weights.values() if not weight.streamable}
    return [operation.name for operation in graph.operations.values() if weights & {*operation.inputs}]


def _layer_of(name: str) -> str:
    """``model.layers.3.mlp.up.weight -> model.layers.3``; without a number, the module itself."""
    found = re.match(r"(.+?\.)??\d+(?=\.|$)", name)
    return found.group() if found else name.rpartition(".")[0] or name


def _followers(graph: Graph, layers: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Of each layer the operations that read its weights, those after them that read none, and those tied."""
    layer_of = {name: layer for layer, names in layers.items() for name in names}
    tied = {name: group for group in graph.together for name in group}
    found: dict[str, dict[str, None]] = {layer: {} for layer in layers}
    follows = dict[str, None]()
    for operation in graph.operations.values():
        weights = [name for name in operation.inputs if name in graph.weights]
        if weights:
            follows = dict.fromkeys(layer_of[name] for name in weights if name in layer_of)
        for layer in follows:
            found[layer].update(dict.fromkeys(sorted(tied.get(operation.name, [operation.name]))))
    return {layer: list(names) for layer, names in found.items()}
