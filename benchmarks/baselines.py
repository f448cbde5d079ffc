"""Placements by others for the same problem, judged by the same evaluator.

Four: sequential fill, contiguous pieces, accelerate's device map and transformers' own. The last two
know nothing of activations: where the evaluator finds a budget passed, they are asked again with less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from incumbents import Mapper, accelerate_maps, assignment_of, skeleton, transformers_maps
from packing import offloaded, used
from torch import nn

from graphplan.device import CPU, DeviceKey, DeviceSpec, Topology, read_max_memory
from graphplan.graph import Graph
from graphplan.passes.chain import Chain
from graphplan.passes.contiguous import split
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.residence import reside
from graphplan.passes.spread import fetch_excess
from graphplan.schedule import Assignment

LESS = "given less"  # the mark of a map that was made after another had passed a budget
_REPAIRS = 12  # times that one is asked again with less room, when the evaluator finds it over a budget


@dataclass(frozen=True, slots=True)
class Baseline:
    """What one of the others makes of a problem.

    Attributes:
        name: whose it is.
        strategy: how it was asked, for those that can be asked in several ways.
        seconds: modelled seconds of a call; None where it placed nothing.
        over: bytes by which the fullest device is over its budget; 0 where all are kept.
        offloaded: bytes of weights that live on no accelerator, of those that are read.
        used: bytes that weights take on accelerators, as the allocator keeps them.
        planning: seconds that it took.
        error: what it raised instead.
        excess: device -> bytes by which it is over its budget.
        first_over: bytes by which the first answer was over, where another is taken instead.
        first_seconds: the modelled seconds of that.
    """

    name: str
    strategy: str = ""
    seconds: float | None = None
    over: int = 0
    offloaded: int = 0
    used: int = 0
    planning: float = 0.0
    error: str = ""
    excess: Mapping[DeviceKey, int] = field(default_factory=dict)
    first_over: int = 0
    first_seconds: float | None = None

    @property
    def feasible(self) -> bool:
        """Whether it placed everything within the budgets."""
        return self.seconds is not None and self.over == 0


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


def device_maps(problem: Problem, model: nn.Module, no_split: Sequence[str]) -> list[Baseline]:
    """accelerate's and transformers' alone."""
    kept = list(no_split)
    makers = {"accelerate": accelerate_maps, "transformers": transformers_maps}
    found = []
    for name, ways in makers.items():
        answers = list(_mapped(problem, name, ways(model, kept)))
        first = answers[0]
        found.append(replace(best(answers), first_over=first.over, first_seconds=first.seconds))
    return found


def best(found: Sequence[Baseline]) -> Baseline:
    """The fastest that keeps the budgets; where none does, the one that is least over."""
    return min(
        found,
        key=lambda b: (b.seconds is None, b.over, b.seconds if b.seconds is not None else 0.0),
    )


def _judged(problem: Problem, name: str, strategy: str, propose: Callable[[], Assignment | None]) -> Baseline:
    start = time.perf_counter()
    try:
        assignment = propose()
    except Exception as error:  # whatever another's code raises is its result
        return Baseline(name, strategy, error=f"{type(error).__name__}: {error}")
    planning = time.perf_counter() - start
    if assignment is None:
        return Baseline(name, strategy, planning=planning, error="found no placement")
    evaluation, spilled = _evaluate(problem, assignment)
    return Baseline(
        name,
        strategy,
        evaluation.seconds,
        over=max([spilled, *evaluation.excess.values()]),
        offloaded=offloaded(problem, assignment),
        used=used(problem, assignment),
        planning=planning,
        excess=evaluation.excess,
    )


def _with_ties(
    problem: Problem, name: str, propose: Callable[[Problem], Assignment | None]
) -> Iterator[Baseline]:
    """As it is, and with each reader of a tied weight where the first one is."""

    def pulled() -> Assignment | None:
        found = propose(problem)
        return None if found is None else _pull(problem, found)

    yield _judged(problem, name, "", lambda: propose(problem))
    if any(len(readers) > 1 for readers in _readers(problem.graph).values()):
        yield _judged(problem, name, "ties together", pulled)


def _readers(graph: Graph) -> dict[str, tuple[str, ...]]:
    return {name: graph.consumers.get(name, ()) for name in graph.weights}


def _pull(problem: Problem, assignment: Assignment) -> Assignment:
    operations = dict(assignment.operations)
    for readers in _readers(problem.graph).values():
        operations.update(dict.fromkeys(readers, operations[readers[0]]))
    return reside(problem, operations)


def _evaluate(problem: Problem, assignment: Assignment) -> tuple[Evaluation, int]:
    """The evaluation, and the bytes of weights that were put on a CPU that has no budget."""
    if CPU in problem.topology:
        return evaluate(problem, assignment), 0
    cpu = read_max_memory({CPU: 1 << 42}).devices[0]
    wider = replace(problem.topology, devices=(*problem.topology.devices, cpu))
    weights = problem.graph.weights
    spilled = sum(weights[name].nbytes for name, key in assignment.weights.items() if key == CPU)
    return evaluate(replace(problem, topology=wider), assignment), spilled


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
    for _ in range(_REPAIRS):
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


# -- device maps ---------------------------------------------------------------------------------------


def _mapped(problem: Problem, name: str, ways: Mapping[str, Mapper]) -> Iterator[Baseline]:
    """As users ask, ``"auto"`` first; and again with what was over taken off, in two ways."""
    for way, mapper in ways.items():
        asked = _asked(problem, name, way, mapper, {})
        yield asked
        for growth in (1, 2):
            taken, judged = dict[DeviceKey, int](), asked
            for _ in range(_REPAIRS):
                if judged.feasible or not judged.excess:
                    break
                for key, excess in judged.excess.items():
                    before = taken.get(key, 0)
                    taken[key] = max(before + excess, growth * before)  # modules move, not bytes
                judged = _asked(problem, name, f"{way}, {LESS}", mapper, taken)
                yield judged


def _asked(
    problem: Problem, name: str, strategy: str, mapper: Mapper, taken: Mapping[DeviceKey, int]
) -> Baseline:
    budgets = {s.key: max(0, s.room - taken.get(s.key, 0)) for s in problem.topology.devices}
    return _judged(problem, name, strategy, lambda: assignment_of(problem, mapper(budgets)))
