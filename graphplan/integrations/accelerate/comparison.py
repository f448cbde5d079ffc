"""Device maps of accelerate and transformers for a planned model, estimated by graphplan's evaluator.

Both see only a module tree and its parameters; transformers has its own fork of accelerate's function. Each
is called as for ``device_map="auto"`` (with balanced budgets), and as for ``"sequential"``.

Neither counts activations: if the evaluator finds a budget exceeded, they are called again with smaller
budgets. Weights on the CPU are estimated with graphplan's prefetch, which accelerate's hooks lack: the
estimated times are lower bounds.
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
from graphplan.passes.placement.residence import assign_weights
from graphplan.warnings import silenced, unwarned

DeviceMap = Mapping[str, DeviceKey]
Mapper = Callable[[Mapping[DeviceKey, int]], DeviceMap]
_AWAY = (CPU, DISK)
_FUNCTIONS = {
    "accelerate": "accelerate.utils.modeling",
    "transformers": "transformers.integrations.accelerate",
}
_TIES = "all_tied_weights_keys"

LESS = "given less"  # marks a map that was made after another had exceeded a budget
REPAIRS = 12  # most attempts with smaller budgets, while the evaluator finds a map over budget


@dataclass(frozen=True, slots=True)
class Baseline:
    """The placement of one planner, with its estimates.

    Attributes:
        name: name of the planner.
        strategy: how the planner was called, if there are several ways.
        seconds: estimated seconds of a forward pass; None without a placement.
        over: most bytes by which a device exceeds its budget; 0 if none does.
        offloaded: bytes of the weights that a forward pass reads and that reside on no accelerator.
        planning: seconds that the planner took.
        error: the error, if the planner raised one.
        excess: device key -> bytes by which it exceeds its budget.
        first_over: ``over`` of the planner's map for ``device_map="auto"``, which may be another one.
        first_seconds: ``seconds`` of that map.
        transfer_bytes: bytes of activations that are copied between devices in a forward pass.
        streamed_bytes: bytes of weights that are copied in a forward pass.
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
        """Whether there is a placement within the budgets."""
        return self.seconds is not None and self.over == 0


def device_maps(problem: Problem, model: nn.Module, no_split: Sequence[str]) -> list[Baseline]:
    """Return the :func:`best` maps of accelerate and, if it is installed, transformers.

    ``model`` has the modules that the graph's paths name, and may be on the meta device; ``no_split`` names
    classes of modules that are not split.
    """
    rows = []
    for name in ("accelerate", "transformers"):
        candidates = list(_candidates(problem, name, mappers(name, model, no_split)))
        if candidates:  # none where transformers is not installed
            first = candidates[0]
            rows.append(replace(best(candidates), first_over=first.over, first_seconds=first.seconds))
    return rows


def ours(plan: Plan, planning: float) -> Baseline:
    """Return the row of a plan of graphplan, which took ``planning`` seconds."""
    return estimated(plain_problem(plan), plan.schedule.assignment, "graphplan", planning=planning)


def best(found: Sequence[Baseline]) -> Baseline:
    """Return the fastest within the budgets; if none is, the one that exceeds them least."""
    return min(found, key=lambda row: (row.seconds is None, row.over, row.seconds or 0.0))


def estimated(
    problem: Problem, assignment: Assignment, name: str, strategy: str = "", planning: float = 0.0
) -> Baseline:
    """Return the estimates of a placement that took ``planning`` seconds; others as in :class:`Baseline`."""
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
    """Return the evaluation, and the bytes of weights on the CPU if it has no budget."""
    if CPU in problem.topology:
        return evaluate(problem, assignment), 0
    cpu = read_max_memory({CPU: 1 << 42}).devices[0]
    with_cpu = replace(problem.topology, devices=(*problem.topology.devices, cpu))
    weights = problem.graph.weights
    spilled = sum(weights[name].nbytes for name, key in assignment.weights.items() if key == CPU)
    return evaluate(replace(problem, topology=with_cpu), assignment), spilled


def _candidates(problem: Problem, name: str, strategies: Mapping[str, Mapper]) -> Iterator[Baseline]:
    """Yield the maps of each strategy, ``"auto"`` first, and maps for budgets reduced by the excess."""
    for strategy, mapper in strategies.items():
        first = _judge_map(problem, name, strategy, mapper, {})
        yield first
        for growth in (1, 2):
            removed, row = dict[DeviceKey, int](), first
            for _ in range(REPAIRS):
                if row.feasible or not row.excess:
                    break
                for key, excess in row.excess.items():
                    before = removed.get(key, 0)
                    removed[key] = max(before + excess, growth * before)  # modules move whole
                row = _judge_map(problem, name, f"{strategy}, {LESS}", mapper, removed)
                yield row


def _judge_map(
    problem: Problem, name: str, strategy: str, mapper: Mapper, removed: Mapping[DeviceKey, int]
) -> Baseline:
    budgets = {s.key: max(0, s.room - removed.get(s.key, 0)) for s in problem.topology.devices}
    start = time.perf_counter()
    try:
        assignment = assignment_of(problem, mapper(budgets))
    except Exception as error:  # any error of another planner's code is its result
        return Baseline(name, strategy, error=f"{type(error).__name__}: {error}")
    return estimated(problem, assignment, name, strategy, time.perf_counter() - start)


def offloaded_weights(problem: Problem, assignment: Assignment) -> int:
    """Return the exact bytes of weights that a forward pass reads and that reside on no accelerator."""
    graph, homes, keys = problem.graph, assignment.weights, problem.topology.accelerator_keys
    read = (weight for weight in graph.weights.values() if weight.name in graph.consumers)
    return sum(weight.nbytes for weight in read if homes[weight.name] not in keys)


# -- device maps of other planners ---------------------------------------------------------------------


def mappers(package: str, model: nn.Module, no_split: Sequence[str]) -> dict[str, Mapper]:
    """Return strategy -> function from budgets to a device map; empty if the package is not installed.

    ``no_split`` has the names of module classes that are not split.
    """
    if importlib.util.find_spec(package) is None:
        return {}
    lib: Any = importlib.import_module(_FUNCTIONS[package])
    options: dict[str, Any] = {}
    if package == "transformers":
        options["no_placement_params"] = getattr(model, "_no_placement_params", None)

    def sequential(budgets: Mapping[DeviceKey, int]) -> DeviceMap:
        with _quiet(), _with_ties(model):
            device_map: DeviceMap = lib.infer_auto_device_map(
                model, dict(budgets), no_split_module_classes=list(no_split), **options
            )
        return device_map

    def auto(budgets: Mapping[DeviceKey, int]) -> DeviceMap:
        with _quiet(), _with_ties(model):
            balanced = lib.get_balanced_memory(model, dict(budgets), no_split_module_classes=list(no_split))
        return sequential(balanced)

    return {"auto": auto, "sequential": sequential}


@contextmanager
def _with_ties(model: nn.Module) -> Iterator[None]:
    """Context manager that sets the attribute of shared weights, which transformers' fork reads."""
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
    """Context manager that silences warnings that this machine lacks the devices."""
    with silenced(*_FUNCTIONS.values(), level=logging.ERROR), unwarned():
        yield


def assignment_of(problem: Problem, device_map: DeviceMap) -> Assignment:
    """Return the placement by which accelerate's hooks carry out a device map.

    A module on ``"cpu"`` or ``"disk"`` runs on the first accelerator of the map; its parameters are copied
    there in each forward pass, and its buffers stay there. If the map has only submodules of a module, the
    module's own operations run where their first inputs are.
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
    homes = dict(assign_weights(problem, operations).weights)
    for weight in graph.weights.values():
        key = entry_of(device_map, weight.name)
        if key is not None and weight.kind != "constant":
            away = CPU if weight.kind == "parameter" else main
            homes[weight.name] = away if key in _AWAY else key
    return Assignment(operations, homes)
