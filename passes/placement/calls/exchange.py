"""Local search over several forward passes at once: moves of layers' weights and of their readers.

A move places the weights of a layer on another device, alone or in exchange for a layer of that device. In
each pass the operations that read them follow, or stay and stream them, whichever is faster. A move is kept
if it lowers the weighted sum of seconds and every pass keeps the budgets.
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
    """Return placements whose weighted sum of seconds is at most that of ``start``.

    Args:
        problems: one for each pass; weights of one name are one weight.
        weights: factor of each pass's seconds in the objective.
        start: a feasible placement of each pass, over the same homes of weights and the same buffers.
        limits: when to stop.
    """
    search = _ExchangeSearch(problems, weights, list(start), limits)
    while not search.effort.over and search.sweep():
        pass
    return search.best


def weighted_seconds(weights: Sequence[float], evaluations: Sequence[Evaluation]) -> float:
    """Return the sum of the passes' seconds, each times its weight."""
    return sum(weight * evaluation.seconds for weight, evaluation in zip(weights, evaluations, strict=True))


@dataclass
class _ExchangeSearch:
    problems: Sequence[Problem]
    weights: Sequence[float]
    best: list[Evaluation]
    limits: Limits

    def __post_init__(self) -> None:
        problems = self.problems
        operations = sum(len(problem.graph.operations) for problem in problems)
        visits = PARAMS.visits(operations) * self.limits.effort / 4  # placing each pass has the rest
        self.effort = Effort(visits, self.limits.deadline)
        self.keys = [spec.key for spec in problems[0].topology.computing]
        self.accelerators = problems[0].topology.accelerator_keys
        fixed = {name for problem in problems for name in problem.fixed_weights}
        self.layers = _layers(problems[0].graph, fixed)
        followers = [_followers(problem.graph, self.layers) for problem in problems]
        self.followers = {layer: [by_layer[layer] for by_layer in followers] for layer in self.layers}
        self.immovable = [_immovable_operations(problem.graph) for problem in problems]
        self.seconds = weighted_seconds(self.weights, self.best)

    def sweep(self) -> bool:
        """Try every move once; return whether one helped."""
        improved = False
        for layer in self.layers:
            for key in self.keys:
                if self._home(layer) != key:
                    improved |= any(self._apply_if_better(moved) for moved in self._moves(layer, key))
        return improved

    def _home(self, layer: str) -> DeviceKey:
        return self.best[0].assignment.weights[self.layers[layer][0]]

    def _moves(self, layer: str, key: DeviceKey) -> Iterator[dict[str, DeviceKey]]:
        """Yield moves of a layer to a device, alone or in exchange for a layer of that device."""
        home = self._home(layer)
        yield {layer: key}
        for other in self.layers:
            if self._home(other) == key:
                yield {layer: key, other: home}

    def _apply_if_better(self, moved: Mapping[str, DeviceKey]) -> bool:
        evaluations = None if self.effort.over else self._evaluate_move(moved)
        if evaluations is None:
            return False
        seconds = weighted_seconds(self.weights, evaluations)
        if seconds >= self.seconds * (1 - ROUNDING):
            return False
        self.best, self.seconds = evaluations, seconds
        return True

    def _evaluate_move(self, moved: Mapping[str, DeviceKey]) -> list[Evaluation] | None:
        """Return the passes with these layers moved, each with its fastest devices; None if over a budget."""
        fastest = []
        for index, current in enumerate(self.best):
            homes = dict(current.assignment.weights)
            for layer, key in moved.items():
                homes.update(dict.fromkeys(self.layers[layer], key))
            best = None
            for devices in self._candidate_devices(index, moved):
                changed = replace(current.assignment, operations=devices, weights=homes)
                (trial,) = fit_together([self.problems[index]], [changed])
                self.effort.charge(100.0 * len(trial.schedule.steps))  # a schedule takes that long
                if trial.feasible and (best is None or trial.seconds < best.seconds):
                    best = trial
            if best is None:
                return None
            fastest.append(best)
        together = evaluate_together(self.problems, [evaluation.assignment for evaluation in fastest])
        return together if all(evaluation.feasible for evaluation in together) else None

    def _candidate_devices(self, index: int, moved: Mapping[str, DeviceKey]) -> list[dict[str, DeviceKey]]:
        """Return trials for a pass: readers follow or stay; the CPU's operations take the freed device."""
        stay = dict(self.best[index].assignment.operations)
        follow = dict(stay)
        for layer, key in moved.items():
            follow.update(dict.fromkeys(self.followers[layer][index], key))
        trials = [follow, stay] if follow != stay else [stay]
        freed = next((key for key in map(self._home, moved) if key in self.accelerators), None)
        for devices in (follow, stay):
            busy = [name for name, key in devices.items() if key not in self.accelerators]
            if freed is not None and busy:
                trials.append({**devices, **dict.fromkeys(busy, freed)})
        return [devices for devices in trials if all(devices[op] == stay[op] for op in self.immovable[index])]


def _layers(graph: Graph, fixed: set[str]) -> dict[str, list[str]]:
    """Return layer -> its weights that are streamable and have no fixed home."""
    layers: dict[str, list[str]] = {}
    for weight in graph.weights.values():
        if weight.name not in fixed and weight.nbytes and weight.streamable:
            layers.setdefault(_layer_of(weight.name), []).append(weight.name)
    return layers


def _immovable_operations(graph: Graph) -> list[str]:
    """Return the operations that read a weight that is never streamed."""
    weights = {weight.name for weight in graph.weights.values() if not weight.streamable}
    return [operation.name for operation in graph.operations.values() if weights & {*operation.inputs}]


def _layer_of(name: str) -> str:
    """Return a weight's layer, ``model.layers.3.mlp.up.weight -> model.layers.3``, else its module."""
    match = re.match(r"(.+?\.)??\d+(?=\.|$)", name)
    return match.group() if match else name.rpartition(".")[0] or name


def _followers(graph: Graph, layers: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return layer -> operations that read its weights, weightless ones that follow these, and tied ones."""
    layer_of = {name: layer for layer, names in layers.items() for name in names}
    followers: dict[str, dict[str, None]] = {layer: {} for layer in layers}
    current = dict[str, None]()
    for operation in graph.operations.values():
        weights = [name for name in operation.inputs if name in graph.weights]
        if weights:
            current = dict.fromkeys(layer_of[name] for name in weights if name in layer_of)
        for layer in current:
            tied = graph.group_of.get(operation.name, [operation.name])
            followers[layer].update(dict.fromkeys(sorted(tied)))
    return {layer: list(names) for layer, names in followers.items()}
