"""Assemble a program's code over the weights of one module: both share one namespace."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import fx, nn

from graphplan.capture.captured_graph import OWN_NAMES
from graphplan.capture.model.model_weights import named_tensors
from graphplan.devices.topology import CPU
from graphplan.ir.graph_elements import Weight
from graphplan.ir.lowered_ops import GRADIENTS, constant_attribute, is_bound, part_attribute, stream_attribute
from graphplan.runtime.memory.stored_tensors import StoredPlace, StoredValue
from graphplan.runtime.module.module_state import Code, ModuleState
from graphplan.runtime.module.program import Program
from graphplan.runtime.module.result_structure import cache_layouts, rebuilder
from graphplan.runtime.module.weight_binding import BoundCode
from graphplan.runtime.weights.resident_parts import ResidentPart, rows_of
from graphplan.runtime.weights.weight_changes import require_planned


def code_of(module: nn.Module, state: ModuleState, index: int) -> Code:
    """Return the program's code over the module's weights; assemble it if there is none yet."""
    code = state.codes.get(index)
    if code is not None:
        return code
    with state.run_lock:  # binding may enlarge the prefetch buffers
        code = state.codes.get(index)
        if code is None:
            program = state.programs[index]
            forward = _graph_module(module, program, program.graph)
            _bind_streams(module, state, program, forward)  # before parts: it may move whole weights
            _bind_parts(module, state, program, forward)
            forward.__dict__[GRADIENTS] = state.gradients
            places = _places(program, state.stored)
            given = cache_layouts(program.signature.spec, program.changed_names)
            rebuild = rebuilder(program.out_spec, given, places)
            step = program.backward
            backward = None if step is None else backward_code(module, program, forward, step.graph)
            code = state.codes[index] = Code(
                forward, BoundCode(forward), rebuild, backward, places, program.plain_sets, state.stored
            )
        return code


def _places(program: Program, values: Mapping[str, StoredValue]) -> tuple[StoredPlace, ...]:
    """Return where the program stores tensors, in the order of its results."""
    return tuple(
        StoredPlace(values[str(one)], one.in_place, dict(program.constants_of(str(one))))
        for one in program.stored
    )


def backward_code(module: nn.Module, program: Program, code: fx.GraphModule, graph: fx.Graph) -> BoundCode:
    """Return the code of a backward pass, with the weight streams and parts of the forward pass."""
    backward = _graph_module(module, program, graph)
    backward.__dict__.update({name: value for name, value in vars(code).items() if is_bound(name)})
    return BoundCode(backward)


def _graph_module(module: nn.Module, program: Program, graph: fx.Graph) -> fx.GraphModule:
    """Return a graph module that shares its weights and submodules with the module."""
    empty = fx.Graph()
    code = fx.GraphModule(nn.Module(), empty, class_name=type(module).__name__)
    code.graph = _redirect_hidden_names(copy.deepcopy(graph))
    # owning_module makes a reference cycle, which would keep device memory until the next garbage collection
    empty.owning_module = code.graph.owning_module = None
    code.__dict__[_MODEL] = nn.Module()
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        code.__dict__[name] = code.__dict__[_MODEL].__dict__[name] = module.__dict__[name]
    for name, tensor in program.constants.items():
        code.__dict__[name] = tensor
    code.__dict__.update(program.attributes)
    code.training = module.training
    return code


_MODEL = "_graphplan_model"


def _redirect_hidden_names(graph: fx.Graph) -> fx.Graph:
    """Redirect reads of children with names that ``GraphModule`` uses itself, such as ``code``."""
    for node in graph.nodes:
        if node.op == "get_attr" and node.target.partition(".")[0] in OWN_NAMES:
            node.target = f"{_MODEL}.{node.target}"
    return graph


def _bind_streams(module: nn.Module, state: ModuleState, program: Program, code: fx.GraphModule) -> None:
    """Give the code the weight streams that prefetch its segments."""
    plan = program.plan
    prefetch_buffers = {plan.devices[buffer.device]: buffer for buffer in plan.schedule.prefetch_buffers}
    if not prefetch_buffers:
        return
    weights = named_tensors(module)
    for weight in plan.graph.weights.values():
        if weight.kind == "constant" and constant_attribute(weight.name) in program.constants:
            weights[weight.name] = program.constants[constant_attribute(weight.name)]
    if state.streams.must_grow(prefetch_buffers):
        state.codes.clear()  # bound codes refer to the smaller prefetch buffers
    parts = plan.graph.parts
    state.streams.prepare(
        prefetch_buffers, {**weights, **{part.name: weights[part.part_of] for part in parts}}
    )
    weights.update({part.name: rows_of(weights[part.part_of], part) for part in parts})
    for name in {n for b in prefetch_buffers.values() for segment in b.segments for n in segment.weights}:
        _require_planned(plan.graph.weights[name], weights[name])
    for index, (device, buffer) in enumerate(prefetch_buffers.items()):
        if buffer.segments:
            code.__dict__[stream_attribute(index)] = state.streams.bind(device, buffer, weights)


def _bind_parts(module: nn.Module, state: ModuleState, program: Program, code: fx.GraphModule) -> None:
    """Give the code the parts of sliced weights that reside on accelerators."""
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
    """Raise PlanError if a weight in CPU memory was moved or converted before its code was assembled."""
    if planned.dtype:  # empty if the plan does not know it
        dtype, shape = getattr(torch, planned.dtype), torch.Size(planned.shape)
        require_planned(planned.name, tensor, torch.device(CPU), dtype, shape)
