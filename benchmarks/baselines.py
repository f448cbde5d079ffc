"""Baseline placements for the same problem, judged by the same evaluator.

The baselines are sequential fill, accelerate's device map and transformers' own. The last two ignore
activations: if the evaluator finds a device over its budget, they are called again with less memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from graphplan.devices.topology import CPU, DeviceKey
from graphplan.integrations.accelerate.comparison import Baseline, best, device_maps, estimated
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import assign_weights, on_one_device


def baselines(problem: Problem) -> list[Baseline]:
    """Return all three; of a baseline with several variants, the fastest placement within the budgets."""
    filled = sequential_fill(problem)
    variants = [
        estimated(problem, filled, "sequential fill"),
        estimated(problem, _readers_together(problem, filled), "sequential fill", "readers together"),
    ]
    return [best(variants), *device_maps(problem, skeleton(problem.graph), [Block.__name__])]


def faster(others: Iterable[Baseline], seconds: float | None) -> list[str]:
    """Return the names of feasible baselines that take less time; of all feasible ones if it is None."""
    most = math.inf if seconds is None else seconds * (1 - 1e-9)
    return [b.name for b in others if b.feasible and b.seconds is not None and b.seconds < most]


def _readers_together(problem: Problem, assignment: Assignment) -> Assignment:
    """Move each reader of a weight to the device of its first reader."""
    operations = dict(assignment.operations)
    for name in problem.graph.weights:
        readers = problem.graph.consumers.get(name, ())
        operations.update(dict.fromkeys(readers, operations[readers[0]]))
    return assign_weights(problem, operations)


def peak_activation(problem: Problem) -> int:
    """Return the peak bytes other than weights if one accelerator runs the whole model."""
    first = problem.topology.accelerators[0]
    spec = replace(first, memory=1 << 62, reserve=0)
    single_device = replace(
        problem, topology=replace(problem.topology, devices=(spec,)), fixed_weights={}, allowed={}
    )
    peak = evaluate(single_device, on_one_device(single_device, spec.key)).peak(spec.key)
    return peak.nbytes - peak.weights


def sequential_fill(problem: Problem) -> Assignment:
    """Place operations in execution order on the current device, and move on for good once it is full.

    Memory for the activation peak is left free on every device. Operations that fit nowhere go to the last
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
    return assign_weights(problem, operations)


# -- a module tree, for planners that place modules ------------------------------------------------


class Block(nn.Module):
    """A module that device maps keep whole."""


def skeleton(graph: Graph) -> nn.Module:
    """Return the module tree that a graph's names describe, with parameters on the meta device.

    The outermost modules whose name is a number are blocks. Modules and parameters are registered in
    execution order; a shared weight is one parameter under all its names.
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
    """Return the module of an operation; create it if it does not exist."""
    module, in_block = root, False
    for part in operation.module_path.split("."):
        if not hasattr(module, part):
            module.add_module(part, Block() if part.isdigit() and not in_block else nn.Module())
        in_block = in_block or part.isdigit()
        module = getattr(module, part)
    return module
