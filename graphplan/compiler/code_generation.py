"""Lower a plan to the program that a placed module runs; the lowered code is verified against the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from graphplan.analysis.plan import Plan
from graphplan.capture.captured_graph import Capture, TrainingStep
from graphplan.capture.model.modes import Modes
from graphplan.capture.signature import BoundCall, TensorLeaf
from graphplan.compiler.earlier_plans import PlacedConstants
from graphplan.compiler.formulation import Options
from graphplan.devices.topology import CPU, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.lowered_ops import constant_attribute
from graphplan.passes.lowering.emit import lower, torch_devices
from graphplan.passes.lowering.specialize_calls import specialize_calls
from graphplan.passes.lowering.split_step import split_step
from graphplan.passes.lowering.stage_modules import cut_stages
from graphplan.passes.lowering.verify_devices import verify_lowered
from graphplan.runtime.module.program import Backward, CacheTensor, Program


@dataclass(frozen=True, slots=True)
class Planned:
    """A captured call, its plan, and the example that it was planned for."""

    capture: Capture
    plan: Plan
    call: BoundCall


def lower_planned(
    planned: Planned,
    topology: Topology,
    options: Options,
    constants: PlacedConstants,
    modes: Modes,
) -> Program:
    """Return the program of a plan; ``modes`` are those of the modules when the call was traced."""
    captured, plan, graph = planned.capture, planned.plan, planned.plan.graph
    code, attributes = _generate(planned, topology, options)
    backward, inputs = None, list(graph.inputs)
    if (step := captured.step) is not None:
        code, gradients = split_step(code, step.tangents, len(captured.outputs))
        backward = _backward_of(captured, step, graph, gradients)
        inputs = [name for name in inputs if name not in step.tangents]
    placed = constants.place(captured.constants, topology)
    held = captured.attributes and {constant_attribute(name): at for name, at in captured.attributes.items()}
    return Program(
        plan=plan,
        signature=captured.signature,
        graph=code,
        constants={constant_attribute(name): tensor for name, tensor in placed.items()},
        attributes=attributes,
        constant_attributes=held,
        parts_read=captured.parts_read,
        plain_sets=captured.plain_sets,
        other_sets=captured.other_sets,
        growing=captured.growing,
        branches=captured.branches,
        presence=captured.presence,
        inputs=tuple(captured.inputs.index(name) for name in (*inputs, *_cache_names(captured, graph))),
        cache_tensors=_cache_tensors(planned, topology),
        changed_names=captured.changed_names,
        entry=captured.entry,
        dense=_made_dense(captured, inputs),
        on_host=_read_on_host(plan, inputs),
        changed=frozenset(graph.inputs.index(name) for name in graph.changed_inputs),
        host=torch_devices(plan.schedule, topology)[plan.schedule.host],
        out_spec=captured.out_spec,
        modes=modes,
        trace=captured.module,
        backward=backward,
        accumulates=options.training is None or options.training.accumulates,
    )


def _backward_of(captured: Capture, step: TrainingStep, graph: Graph, code: torch.fx.Graph) -> Backward:
    read = {str(node.target) for node in code.nodes if node.op == "get_attr"}
    return Backward(
        code,
        step.differentiated,
        tuple(step.input_gradients.values()),
        weights=tuple(name for name in graph.weights if name in read),
        attribute_constants=tuple(
            name for name in map(constant_attribute, captured.attributes or ()) if name in read
        ),
        others=step.others,
    )


def _generate(
    planned: Planned, topology: Topology, options: Options
) -> tuple[torch.fx.Graph, Mapping[str, nn.Module]]:
    """Return the code, and attribute name -> module that the code calls."""
    graph, schedule = planned.plan.graph, planned.plan.schedule
    code, branches = lower(planned.capture, graph, schedule, topology)
    specialize_calls(code)
    verify_lowered(code, graph, schedule, topology)
    if options.compile is None:
        return code, branches
    code, stages = cut_stages(code, schedule.assignment.operations, branches)
    compiled = {name: torch.compile(stage, **options.compile) for name, stage in stages.items()}
    return code, {**branches, **cast(dict[str, nn.Module], compiled)}


def _cache_names(captured: Capture, graph: Graph) -> list[str]:
    """Return the names of the caches' tensors in the order in which the code takes them."""
    return [name for name in graph.weights if name in captured.states]


def _cache_tensors(planned: Planned, topology: Topology) -> tuple[CacheTensor, ...]:
    """Return the tensors of the caller's caches, each with the device where it is and where it has to be."""
    captured, plan, call = planned.capture, planned.plan, planned.call
    tensors = []
    for position, name in enumerate(_cache_names(captured, plan.graph), len(plan.graph.inputs)):
        home = topology[plan.schedule.assignment.weights[name]].torch_device
        leaf = captured.states[name]
        device = call.leaves[leaf].device
        tensors.append(
            CacheTensor(position, leaf, home, torch.device(CPU) if device.type == "meta" else device)
        )
    return tuple(tensors)


def _made_dense(captured: Capture, inputs: Sequence[str]) -> tuple[int, ...]:
    """Return the positions of the inputs that may have any strides, but were traced as contiguous."""
    found, leaf_of = [], dict(zip(captured.inputs, captured.order, strict=True))
    for position, name in enumerate(inputs):
        index = leaf_of[name]
        leaf = None if index is None else captured.signature.leaves[index]
        if isinstance(leaf, TensorLeaf) and leaf.stride == () and leaf.shape:
            found.append(position)
    return tuple(found)


def _read_on_host(plan: Plan, inputs: Sequence[str]) -> frozenset[int]:
    """Return the positions of the inputs that an operation on the caller's device reads without a move."""
    host, graph = plan.schedule.host, plan.graph
    read = {
        name
        for run in plan.schedule.runs()
        if run.device == host and not graph.operations[run.operation].host_only
        for name in graph.operations[run.operation].inputs
    }
    return frozenset(position for position, name in enumerate(inputs) if name in read)
