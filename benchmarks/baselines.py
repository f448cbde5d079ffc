"""Placements by others for the same problem, judged by the same evaluator.

Three: sequential fill, accelerate's device map and transformers' own. The last two know nothing of
activations: where the evaluator finds a device over its budget, they are asked again with less memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from graphplan.devices.topology import CPU, DeviceKey
from graphplan.integrations.accelerate.comparison import Baseline, best, device_maps, judged
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import on_one_device, reside


def baselines(problem: Problem) -> list[Baseline]:
    """All three; where one can be asked in several ways, its fastest placement within the budgets."""
    filled = sequential_fill(problem)
    together = _readers_together(problem, filled)
    ways = [
        judged(problem, "sequential fill", "", lambda: filled),
        judged(problem, "sequential fill", "readers together", lambda: together),
    ]
    return [best(ways), *device_maps(problem, skeleton(problem.graph), [Block.__name__])]


def faster(others: Iterable[Baseline], seconds: float | None) -> list[str]:
    """Names of those that keep the budgets in less time, or at all where there are no seconds to beat."""
    most = math.inf if seconds is None else seconds * (1 - 1e-9)
    return [one.name for one in others if one.feasible and one.seconds is not None and one.seconds < most]


def _readers_together(problem: Problem, assignment: Assignment) -> Assignment:
    """Each reader of a shared weight on the device of the first one."""
    operations = dict(assignment.operations)
    for name in problem.graph.weights:
        readers = problem.graph.consumers.get(name, ())
        operations.update(dict.fromkeys(readers, operations[readers[0]]))
    return reside(problem, operations)


def peak_activation(problem: Problem) -> int:
    """The most bytes beside weights when one accelerator runs the whole model."""
    first = problem.topology.accelerators[0]
    spec = replace(first, memory=1 << 62, reserve=0)
    alone = replace(
        problem, topology=replace(problem.topology, devices=(spec,)), fixed_weights={}, allowed={}
    )
    peak = evaluate(alone, on_one_device(alone, spec.key)).peak(spec.key)
    return peak.nbytes - peak.weights


def sequential_fill(problem: Problem) -> Assignment:
    """First fit in the order of execution: once a device is full, it is not returned to.

    Memory for the peak of activations is left free on every device. What fits nowhere goes on the last
    device.
    """
    graph, activations = problem.graph, peak_activation(problem)
    specs = problem.topology.devices
    order = [*(s for s in specs if s.is_accelerator), *(s for s in specs if s.key == CPU)]
    operations: dict[str, DeviceKey] = {}
    held: dict[str, int] = {}  # weights on the device that is being filled
    for operation in graph.operations.values():
        read = {name: graph.weights[name].nbytes for name in operation.inputs if name in graph.weights}
        while len(order) > 1:
            if order[0].resident({**held, **read}.values()) + activations <= order[0].room:
                break
            order, held = order[1:], {}
        held |= read
        operations[operation.name] = order[0].key
    return reside(problem, operations)


# -- modules, for those who place modules ----------------------------------------------------------


class Block(nn.Module):
    """A module that device maps keep whole."""


def skeleton(graph: Graph) -> nn.Module:
    """The module tree that a graph's names describe, its parameters on the meta device.

    The outermost modules whose name is a number are blocks. Modules and parameters are registered in
    the order of execution; a tied weight is one parameter under all its names.
    """
    root = nn.Module()
    parameters = {
        name: nn.Parameter(torch.empty(w.nbytes, dtype=torch.uint8, device="meta"), requires_grad=False)
        for name, w in graph.weights.items()
    }
    for operation in graph.operations.values():
        module = _module(root, operation)
        for weight in (graph.weights[name] for name in operation.inputs if name in graph.weights):
            for owner, _, leaf in (name.rpartition(".") for name in weight.names):
                if owner == operation.module_path:
                    module.register_parameter(leaf, parameters[weight.name])
    return root


def _module(root: nn.Module, operation: Operation) -> nn.Module:
    """The module of an operation, made where it is not there."""
    module, inside = root, False
    for part in operation.module_path.split("."):
        if not hasattr(module, part):
            module.add_module(part, Block() if part.isdigit() and not inside else nn.Module())
        inside = inside or part.isdigit()
        module = getattr(module, part)
    return module
