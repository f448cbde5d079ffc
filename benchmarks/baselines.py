"""Placements by others for the same problem, judged by the same evaluator.

Three: sequential fill, accelerate's device map and transformers' own. The last two know nothing of
activations: where the evaluator finds a device over its budget, they are asked again with less memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner_api import Problem, evaluate, reside
from skeletons import skeleton
from torch import nn

from graphplan.devices.topology import CPU, DeviceKey, DeviceSpec, Topology
from graphplan.integrations.accelerate.comparison import Baseline, best, device_maps, judged
from graphplan.ir.schedule import Assignment


def baselines(
    problem: Problem, model: nn.Module | None = None, no_split: Sequence[str] = ("Block",)
) -> list[Baseline]:
    """All three; where one can be asked in several ways, its fastest placement within the budgets.

    Args:
        problem: what to place.
        model: whose modules the graph's paths name; by default a skeleton is made of the graph.
        no_split: names of module classes that device maps keep whole.
    """
    model = skeleton(problem.graph) if model is None else model
    filled = sequential_fill(problem)
    ways = [judged(problem, "sequential fill", "", lambda: filled)]
    if any(len(readers) > 1 for readers in _readers(problem).values()):
        pulled = _readers_together(problem, filled)
        ways.append(judged(problem, "sequential fill", "readers together", lambda: pulled))
    return [best(ways), *device_maps(problem, model, no_split)]


def _readers(problem: Problem) -> dict[str, tuple[str, ...]]:
    return {name: problem.graph.consumers.get(name, ()) for name in problem.graph.weights}


def _readers_together(problem: Problem, assignment: Assignment) -> Assignment:
    """Each reader of a shared weight on the device of the first one."""
    operations = dict(assignment.operations)
    for readers in _readers(problem).values():
        operations.update(dict.fromkeys(readers, operations[readers[0]]) if readers else {})
    return reside(problem, operations)


def accelerators(topology: Topology) -> list[DeviceSpec]:
    """In the caller's order."""
    return [spec for spec in topology.devices if spec.is_accelerator]


def peak_activation(problem: Problem) -> int:
    """The most bytes beside weights when one accelerator runs the whole model."""
    spec = replace(accelerators(problem.topology)[0], memory=1 << 62, reserve=0)
    alone = replace(
        problem, topology=replace(problem.topology, devices=(spec,)), fixed_weights={}, allowed={}
    )
    everywhere = dict.fromkeys(problem.graph.operations, spec.key)
    peak = evaluate(alone, reside(alone, everywhere)).peak(spec.key)
    return peak.nbytes - peak.weights


def sequential_fill(problem: Problem) -> Assignment:
    """First fit in the order of execution: once a device is full, it is not returned to.

    Memory for the peak of activations is left free on every device. What fits nowhere goes on the last
    device.
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
