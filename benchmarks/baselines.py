"""Placements by others for the same problem, judged by the same evaluator.

Four: sequential fill, contiguous pieces, accelerate's device map and transformers' own. The last two
know nothing of activations: where the evaluator finds a budget passed, they are asked again with less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from skeletons import skeleton
from torch import nn

from graphplan.comparison import REPAIRS, Baseline, best, device_maps, judged
from graphplan.device import CPU, DeviceKey, DeviceSpec, Topology
from graphplan.graph import Graph
from graphplan.passes.chain import Chain
from graphplan.passes.contiguous import split
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.residence import reside
from graphplan.passes.spread import fetch_excess
from graphplan.schedule import Assignment


def baselines(
    problem: Problem, model: nn.Module | None = None, no_split: Sequence[str] = ("Block",)
) -> list[Baseline]:
    """All four; of several ways to ask, the fastest within the budgets, else the nearest.

    Args:
        problem: what to place.
        model: whose modules the graph's paths name; by default a skeleton is made of the graph.
        no_split: names of module classes that device maps keep whole.
    """
    model = skeleton(problem.graph) if model is None else model
    found = []
    for name, proposed in (("sequential fill", sequential_fill), ("contiguous", contiguous)):
        found.append(best(list(_with_ties(problem, name, proposed))))
    return [*found, *device_maps(problem, model, no_split)]


def _with_ties(
    problem: Problem, name: str, propose: Callable[[Problem], Assignment | None]
) -> Iterator[Baseline]:
    """As it is, and with each reader of a tied weight where the first one is."""

    def pulled() -> Assignment | None:
        found = propose(problem)
        return None if found is None else _pull(problem, found)

    yield judged(problem, name, "", lambda: propose(problem))
    if any(len(readers) > 1 for readers in _readers(problem.graph).values()):
        yield judged(problem, name, "ties together", pulled)


def _readers(graph: Graph) -> dict[str, tuple[str, ...]]:
    return {name: graph.consumers.get(name, ()) for name in graph.weights}


def _pull(problem: Problem, assignment: Assignment) -> Assignment:
    operations = dict(assignment.operations)
    for readers in _readers(problem.graph).values():
        operations.update(dict.fromkeys(readers, operations[readers[0]]))
    return reside(problem, operations)


def accelerators(topology: Topology) -> list[DeviceSpec]:
    """In the caller's order."""
    return [spec for spec in topology.devices if spec.is_accelerator]


def peak_activation(problem: Problem) -> int:
    """The most bytes beside weights that a call takes when one accelerator runs all of it."""
    spec = replace(accelerators(problem.topology)[0], memory=1 << 62, reserve=0)
    alone = replace(
        problem, topology=replace(problem.topology, devices=(spec,)), fixed_weights={}, allowed={}
    )
    everywhere = dict.fromkeys(problem.graph.operations, spec.key)
    peak = evaluate(alone, reside(alone, everywhere)).peak(spec.key)
    return peak.nbytes - peak.weights


# -- first fit in the order of execution -------------------------------------------------------------


def sequential_fill(problem: Problem) -> Assignment:
    """Each operation on the first device with room left for its weights; no device is gone back to.

    Room for the peak of activations is kept on every device. What no device has room for goes on the
    last.
    """
    graph, activations = problem.graph, peak_activation(problem)
    order = [*accelerators(problem.topology), *(s for s in problem.topology.devices if s.key == CPU)]
    operations: dict[str, DeviceKey] = {}
    position, held = 0, list[int]()
    names: set[str] = set()
    for operation in graph.operations.values():
        weights = [name for name in operation.inputs if name in graph.weights]
        while True:
            spec = order[position]
            fresh = [graph.weights[name].nbytes for name in weights if name not in names]
            fits = spec.resident([*held, *fresh]) + activations <= spec.room
            if fits or position == len(order) - 1:
                break
            position, held, names = position + 1, [], set()
        held += fresh
        names.update(weights)
        operations[operation.name] = spec.key
    return reside(problem, operations)


# -- one contiguous piece for each device ------------------------------------------------------------


def contiguous(problem: Problem) -> Assignment | None:
    """The best split into contiguous pieces, one for each accelerator, any number for the CPU."""
    chain = Chain(problem.graph, accelerators(problem.topology)[0])
    ways = [(False, False)]
    if CPU in problem.topology:
        ways += [(True, False), (False, True), (True, True)]
    found = [
        evaluation
        for use_cpu, fetch in ways
        for growth in (1, 2)
        if (evaluation := _split(problem, chain, use_cpu, fetch, growth)) is not None
    ]
    feasible = [evaluation for evaluation in found if evaluation.feasible]
    chosen = min(feasible, key=lambda e: e.seconds) if feasible else next(iter(found), None)
    return None if chosen is None else chosen.schedule.assignment


def _split(problem: Problem, chain: Chain, use_cpu: bool, fetch: bool, growth: int) -> Evaluation | None:
    """Pieces that keep the budgets, or the last tried; ``growth``: how fast room is taken off."""
    shrink: dict[DeviceKey, int] = {}
    found: Evaluation | None = None
    for _ in range(REPAIRS):
        pieces = split(chain, problem, use_cpu=use_cpu, fetch=fetch, shrink=shrink)
        if pieces is None:
            break
        operations = {
            operation.name: piece.device
            for piece in pieces
            for operation in chain.operations[piece.start : piece.end]
        }
        found = evaluate(problem, reside(problem, operations))
        if found.excess and fetch:
            found = fetch_excess(problem, operations) or found
        if found.feasible:
            break
        for key, excess in found.excess.items():
            shrink[key] = max(shrink.get(key, 0) + excess, growth * shrink.get(key, 0))
    return found
