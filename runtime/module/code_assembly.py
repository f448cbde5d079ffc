"""A program's code over the weights of one module: the module and its code are one namespace."""

from __future__ import annotations

import copy

import torch
from torch import fx, nn

from graphplan.capture.captured_graph import OWN_NAMES
from graphplan.capture.model.model_weights import named_tensors
from graphplan.devices.topology import CPU
from graphplan.ir.graph_elements import Weight
from graphplan.ir.lowered_ops import GRADIENTS, constant_attribute, is_bound, part_attribute, stream_attribute
from graphplan.runtime.module.module_state import Code, ModuleState
from graphplan.runtime.module.program import Program
from graphplan.runtime.module.result_structure import given_layouts, rebuilder
from graphplan.runtime.module.weight_binding import BoundCode
from graphplan.runtime.weights.resident_parts import ResidentPart, rows_of
from graphplan.runtime.weights.weight_changes import require_planned


def code_of(module: nn.Module, state: ModuleState, index: int) -> Code:
    """The program's code over the module's weights."""
    found = state.codes.get(index)
    if found is not None:
        return found
    with state.turns:  # it may take more memory for what is streamed
        found = state.codes.get(index)
        if found is None:
            program = state.programs[index]
            code = _graph_module(module, program, program.graph)
            _bind_streams(module, state, program, code)  # before parts: it may bring the whole elsewhere
            _bind_parts(module, state, program, code)
            code.__dict__[GRADIENTS] = state.gradients
            rebuild = rebuilder(program.out_spec, given_layouts(program.signature.spec, program.given))
            how = program.backward
            backward = None if how is None else backward_code(module, program, code, how.graph)
            found = state.codes[index] = Code(code, BoundCode(code), rebuild, backward)
        return found


def backward_code(module: nn.Module, program: Program, code: fx.GraphModule, graph: fx.Graph) -> BoundCode:
    """Code of a backward pass, with the streams and parts of the forward pass."""
    later = _graph_module(module, program, graph)
    later.__dict__.update({name: value for name, value in vars(code).items() if is_bound(name)})
    return BoundCode(later)


def _graph_module(module: nn.Module, program: Program, graph: fx.Graph) -> fx.GraphModule:
    """Code of a program and the module: one namespace, seen through two objects."""
    empty = fx.Graph()
    found = fx.GraphModule(nn.Module(), empty, class_name=type(module).__name__)
    found.graph = _around_own_names(copy.deepcopy(graph))
    # a graph is a cycle, and would keep the module's device memory until the next collection
    empty.owning_module = found.graph.owning_module = None
    found.__dict__[_MODEL] = nn.Module()
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        found.__dict__[name] = found.__dict__[_MODEL].__dict__[name] = module.__dict__[name]
    for name, tensor in program.constants.items():
        found.__dict__[name] = tensor
    found.__dict__.update(program.attributes)
    found.training = module.training
    return found


_MODEL = "_graphplan_model"


def _around_own_names(graph: fx.Graph) -> fx.Graph:
    """The graph, which reaches children named ``code`` or ``graph``, as its module's own, another way."""
    for node in graph.nodes:
        if node.op == "get_attr" and node.target.partition(".")[0] in OWN_NAMES:
            node.target = f"{_MODEL}.{node.target}"
    return graph


def _bind_streams(module: nn.Module, state: ModuleState, program: Program, code: fx.GraphModule) -> None:
    """Give the code what copies its segments."""
    plan = program.plan
    prefetch_buffers = {plan.devices[buffer.device]: buffer for buffer in plan.schedule.prefetch_buffers}
    if not prefetch_buffers:
        return
    weights = named_tensors(module)
    for weight in plan.graph.weights.values():
        if weight.kind == "constant" and constant_attribute(weight.name) in program.constants:
            weights[weight.name] = program.constants[constant_attribute(weight.name)]
    if state.streams.must_grow(prefetch_buffers):
        state.codes.clear()  # they hold on to the smaller prefetch buffer
    parts = plan.graph.parts
    state.streams.prepare(
        prefetch_buffers, {**weights, **{part.name: weights[part.part_of] for part in parts}}
    )
    weights.update({part.name: rows_of(weights[part.part_of], part) for part in parts})
    for name in {name for one in prefetch_buffers.values() for each in one.segments for name in each.weights}:
        _require_planned(plan.graph.weights[name], weights[name])
    for index, (device, buffer) in enumerate(prefetch_buffers.items()):
        if buffer.segments:
            code.__dict__[stream_attribute(index)] = state.streams.bind(device, buffer, weights)


def _bind_parts(module: nn.Module, state: ModuleState, program: Program, code: fx.GraphModule) -> None:
    """Give the code the parts of sliced weights that are kept on accelerators."""
    plan = program.plan
    if not plan.graph.parts:
        return
    weights, home = named_tensors(module), plan.schedule.assignment.weights
    for index, part in enumerate(plan.graph.parts):
        if home[part.name] != home[part.part_of]:
            device = plan.devices[home[part.name]]
            place = part.name, device
            if place not in state.parts:
                _require_planned(part, rows_of(weights[part.part_of], part))
                with torch.inference_mode(False), torch.no_grad():
                    state.parts[place] = ResidentPart(part, weights[part.part_of], device)
            code.__dict__[part_attribute(index)] = state.parts[place]


def _require_planned(planned: Weight, tensor: torch.Tensor) -> None:
    """Raise PlanError where a weight in CPU memory was moved or converted before there was code to see it."""
    if planned.dtype:  # it is known of what the plan was made for
        dtype, shape = getattr(torch, planned.dtype), torch.Size(planned.shape)
        require_planned(planned.name, tensor, torch.device(CPU), dtype, shape)
