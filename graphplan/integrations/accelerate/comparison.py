"""Device maps of accelerate and transformers for a planned model, judged by our own evaluator.

Both see a module tree and its parameters only; transformers has its own fork of accelerate's function. Each
is asked as ``device_map="auto"`` asks (budgets balanced first), and as ``"sequential"`` does.

Neither knows of activations: where the evaluator finds a budget passed, they are asked again with less
room. What they place on the CPU is judged as if it were streamed ahead as graphplan streams it, which
their hooks do not do: their estimated seconds are a lower bound of what they take.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate.utils.modeling import find_tied_parameters
from torch import nn

from graphplan.analysis.plan import Plan
from graphplan.analysis.plan_problem import plain_problem
from graphplan.devices.max_memory import read_max_memory
from graphplan.devices.topology import CPU, DISK, DeviceKey
from graphplan.ir.module_map import entry_of
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import reside
from graphplan.warnings import silenced, unwarned

DeviceMap = Mapping[str, DeviceKey]
Mapper = Callable[[Mapping[DeviceKey, int]], DeviceMap]
_AWAY = (CPU, DISK)
_FUNCTIONS = {
    "accelerate": "accelerate.utils.modeling",
    "transformers": "transformers.integrations.accelerate",
}
_TIES = "all_tied_weights_keys"

LESS = "given less"  # the mark of a map that was made after another had passed a budget
REPAIRS = 12  # times that one is asked again with less room, when the evaluator finds it over a budget


@dataclass(frozen=True, slots=True)
class Baseline:
    """What one of the planners makes of a problem.

    Attributes:
        name: whose it is.
        strategy: how it was asked, for those that can be asked in several ways.
        seconds: estimated seconds of a call; None where it placed nothing.
        over: bytes by which the fullest device is over its budget; 0 where all are kept.
        offloaded: bytes of weights that live on no accelerator, of those that are read.
        planning: seconds that it took.
        error: what it raised instead.
        excess: device -> bytes by which it is over its budget.
        first_over: bytes by which the first answer was over, where another is taken instead.
        first_seconds: the estimated seconds of that.
        transfer_bytes: bytes of activations that cross between devices in a call.
        streamed_bytes: bytes of weights that are copied in a call.
    """

    name: str
    strategy: str = ""
    seconds: float | None = None
    over: int = 0
    offloaded: int = 0
    planning: float = 0.0
    error: str = ""
    excess: Mapping[DeviceKey, int] = field(default_factory=dict)
    first_over: int = 0
    first_seconds: float | None = None
    transfer_bytes: int = 0
    streamed_bytes: int = 0

    @property
    def feasible(self) -> bool:
        """Whether it placed everything within the budgets."""
        return self.seconds is not None and self.over == 0


def device_maps(problem: Problem, model: nn.Module, no_split: Sequence[str]) -> list[Baseline]:
    """The maps of accelerate and transformers, of several ways to ask the best.

    That is the fastest within the budgets; where all pass them, the nearest. ``model`` has the modules that
    the graph's paths name, on the meta device too; ``no_split`` names classes of them that are kept whole.
    """
    found = []
    for name in ("accelerate", "transformers"):
        answers = list(_mapped(problem, name, mappers(name, model, no_split)))
        if answers:  # none where transformers is not installed
            first = answers[0]
            found.append(replace(best(answers), first_over=first.over, first_seconds=first.seconds))
    return found


def ours(plan: Plan, planning: float) -> Baseline:
    """A plan of ours as one of them; ``planning``: seconds that it took."""
    assignment = plan.schedule.assignment
    return replace(judged(plain_problem(plan), "graphplan", "", lambda: assignment), planning=planning)


def best(found: Sequence[Baseline]) -> Baseline:
    """The fastest that keeps the budgets; where none does, the one that is least over."""
    return min(found, key=lambda one: (one.seconds is None, one.over, one.seconds or 0.0))


def judged(problem: Problem, name: str, strategy: str, propose: Callable[[], Assignment | None]) -> Baseline:
    """What the evaluator says of a proposal, or the error that came instead of it."""
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
        offloaded=offloaded_weights(problem, assignment),
        planning=planning,
        excess=evaluation.excess,
        transfer_bytes=sum(move.nbytes for move in evaluation.schedule.moves("activation")),
        streamed_bytes=sum(copy.nbytes for copy in evaluation.schedule.weight_copies()),
    )


def _evaluate(problem: Problem, assignment: Assignment) -> tuple[Evaluation, int]:
    """The evaluation, and the bytes of weights that were put on a CPU that has no budget."""
    if CPU in problem.topology:
        return evaluate(problem, assignment), 0
    cpu = read_max_memory({CPU: 1 << 42}).devices[0]
    wider = replace(problem.topology, devices=(*problem.topology.devices, cpu))
    weights = problem.graph.weights
    spilled = sum(weights[name].nbytes for name, key in assignment.weights.items() if key == CPU)
    return evaluate(replace(problem, topology=wider), assignment), spilled


def _mapped(problem: Problem, name: str, ways: Mapping[str, Mapper]) -> Iterator[Baseline]:
    """As users ask, ``"auto"`` first; and again with what was over taken off, in two ways."""
    for way, mapper in ways.items():
        asked = _asked(problem, name, way, mapper, {})
        yield asked
        for growth in (1, 2):
            taken, found = dict[DeviceKey, int](), asked
            for _ in range(REPAIRS):
                if found.feasible or not found.excess:
                    break
                for key, excess in found.excess.items():
                    before = taken.get(key, 0)
                    taken[key] = max(before + excess, growth * before)  # modules move, not bytes
                found = _asked(problem, name, f"{way}, {LESS}", mapper, taken)
                yield found


def _asked(
    problem: Problem, name: str, strategy: str, mapper: Mapper, taken: Mapping[DeviceKey, int]
) -> Baseline:
    budgets = {s.key: max(0, s.room - taken.get(s.key, 0)) for s in problem.topology.devices}
    return judged(problem, name, strategy, lambda: assignment_of(problem, mapper(budgets)))


def offloaded_weights(problem: Problem, assignment: Assignment) -> int:
    """Bytes of the weights that a call reads and that live on no accelerator, without any rounding."""
    graph, homes, keys = problem.graph, assignment.weights, problem.topology.accelerator_keys
    read = (weight for weight in graph.weights.values() if weight.name in graph.consumers)
    return sum(weight.nbytes for weight in read if homes[weight.name] not in keys)


# -- device maps of others -----------------------------------------------------------------------------


def mappers(package: str, model: nn.Module, no_split: Sequence[str]) -> dict[str, Mapper]:
    """Way to ask -> what makes a map of budgets; nothing where the package is not installed.

    ``no_split`` has the names of module classes that are kept whole.
    """
    if importlib.util.find_spec(package) is None:
        return {}
    asked: Any = importlib.import_module(_FUNCTIONS[package])
    options: dict[str, Any] = {}
    if package == "transformers":
        options["no_placement_params"] = getattr(model, "_no_placement_params", None)

    def sequential(budgets: Mapping[DeviceKey, int]) -> DeviceMap:
        with _quiet(), _with_ties(model):
            found: DeviceMap = asked.infer_auto_device_map(
                model, dict(budgets), no_split_module_classes=list(no_split), **options
            )
        return found

    def auto(budgets: Mapping[DeviceKey, int]) -> DeviceMap:
        with _quiet(), _with_ties(model):
            balanced = asked.get_balanced_memory(model, dict(budgets), no_split_module_classes=list(no_split))
        return sequential(balanced)

    return {"auto": auto, "sequential": sequential}


@contextmanager
def _with_ties(model: nn.Module) -> Iterator[None]:
    """The fork reads ties off its own models; a plain module has them as long as it is asked."""
    if hasattr(model, _TIES):
        yield
        return
    groups = find_tied_parameters(model)
    setattr(model, _TIES, {name: first for first, *others in groups for name in others})
    try:
        yield
    finally:
        delattr(model, _TIES)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without their warnings that this machine has no such devices."""
    with silenced(*_FUNCTIONS.values(), below=logging.ERROR), unwarned():
        yield


def assignment_of(problem: Problem, device_map: DeviceMap) -> Assignment:
    """A device map as accelerate's hooks carry it out.

    A module on ``"cpu"`` or ``"disk"`` runs on the first accelerator of the map; its parameters are
    copied there at each call, its buffers stay there. An operation of a module that the map names only
    in parts runs where its first input is.
    """
    graph = problem.graph
    main = next((key for key in device_map.values() if key not in _AWAY), CPU)
    operations: dict[str, DeviceKey] = {}
    for operation in graph.operations.values():
        key = entry_of(device_map, operation.module_path)
        if key is None:
            makers = [graph.producer[name] for name in operation.inputs if name in graph.producer]
            key = operations[makers[0]] if makers else main
        operations[operation.name] = main if key in _AWAY else key
    homes = dict(reside(problem, operations).weights)
    for weight in graph.weights.values():
        key = entry_of(device_map, weight.name)
        if key is not None and weight.kind != "constant":
            away = CPU if weight.kind == "parameter" else main
            homes[weight.name] = away if key in _AWAY else key
    return Assignment(operations, homes)
