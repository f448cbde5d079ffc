"""Completion of a capture after its trace: attributes, branches, casts of autocast, sizes and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from graphplan.capture.autocast import write_casts
from graphplan.capture.captured_graph import Capture, rename_clashes
from graphplan.capture.changes.assigned_state import AssignedState
from graphplan.capture.changes.assigned_writes import copy_read_buffers, copy_read_states
from graphplan.capture.changes.attribute_snapshots import own_attributes, snapshot
from graphplan.capture.changes.kept_state import READ_AND_ASSIGNED, KeptStateError
from graphplan.capture.changes.stored_values import PLAIN
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import identity, memory_of
from graphplan.capture.model_methods import RunAsItIs
from graphplan.capture.signature import BoundCall, TensorLeaf
from graphplan.capture.sizes.dynamic_sizes import sizes_of_example
from graphplan.capture.structure import attribute_and_leaf
from graphplan.capture.tracers.export_loop import STATE
from graphplan.errors import NoGraphError


def complete(captured: Capture, model_copy: ModelCopy, *, keep_grad: bool) -> Capture:
    """Return the capture with branches, attributes, casts of autocast, and copies for a backward pass."""
    if model_copy.method != "forward" and all(node.op != "call_function" for node in captured.graph.nodes):
        raise RunAsItIs(f"{model_copy.method!r} computes nothing")
    state: AssignedState = captured.module.meta.pop(STATE)
    for text in state.kept_by_hooks:
        model_copy.warn_once(text)
    for name in state.growing.values():
        model_copy.warn_once(
            f"{name} grows with each call of the model; in a placed model it has what the last call has "
            "added. Clear it at the beginning of forward"
        )
    _refuse_untied(state.buffers.assigned(model_copy.module), model_copy)
    branches = tuple(one.renamed(model_copy.first_name) for one in state.branches.taken if one.weights)
    captured = replace(captured, branches=branches)
    if keep_grad:
        for name in state.losses:
            model_copy.warn_once(
                f"forward leaves {name} with a gradient; a placed model does not, so a loss computed from "
                "it would give no gradients. Return it instead"
            )
        copy_read_buffers(captured)
        _warn_of_history(captured, model_copy)
    write_casts(captured.module, captured.weights.keys(), model_copy.autocast, model_copy.device_types)
    if not state.reads_values:
        captured = replace(captured, attributes=_attributes_of(captured, model_copy))
    sets = {model_copy.full_name(str(one)): value for one, value in state.others.items()}
    plain = {name: value for name, value in sets.items() if isinstance(value, PLAIN)}
    captured = replace(
        captured,
        parts_read=_parts_read(captured, model_copy),
        plain_sets=plain,
        other_sets=frozenset(sets).difference(plain),
        growing=frozenset(model_copy.full_name(str(one)) for one in state.growing),
        serves_next=state.serves_next,
    )
    if keep_grad:
        stored = set(map(model_copy.full_name, map(str, state.stored)))
        copy_read_states(captured, stored | model_copy.stored)
    whole = {attribute_and_leaf(name)[0] for name in (captured.attributes or {}).values()}
    updated = set(map(model_copy.full_name, map(str, state.updated)))
    for name in updated - whole | updated & captured.parts_read:
        raise KeptStateError.of(name, READ_AND_ASSIGNED)
    for name in captured.parts_read & model_copy.stored:
        raise NoGraphError(
            f"the call reads a part of {name}, which other calls store: a graph would always read the same"
        )
    return _with_distinct_names(captured)


def _attributes_of(captured: Capture, model_copy: ModelCopy) -> dict[str, str] | None:
    """Return constant -> name of the attribute; None if a constant is a view of an attribute."""
    attributes = model_copy.attributes
    memories = {constant: memory_of(tensor) for constant, tensor in captured.constants.items()}
    known = {constant: attributes[memory] for constant, memory in memories.items() if memory in attributes}
    whole = {name: at for name, (at, key) in known.items() if identity(captured.constants[name]) == key}
    is_view = any(name not in whole and attribute_and_leaf(at)[0] == at for name, (at, _) in known.items())
    return None if is_view else whole


def _parts_read(captured: Capture, model_copy: ModelCopy) -> frozenset[str]:
    """Return the attributes of which constants are views or items, by their full names."""
    whole, found = captured.attributes or {}, set[str]()
    parts = {memory_of(one): name for name, one in captured.constants.items() if name not in whole}
    for path, part in model_copy.module.named_modules() if parts else ():
        for name, value in own_attributes(part).items():
            memories = (
                memory_of(leaf) for leaf in snapshot(value).leaves() if isinstance(leaf, torch.Tensor)
            )
            if not parts.keys().isdisjoint(memories):
                found.add(model_copy.full_name(f"{path}.{name}" if path else name))
    return frozenset(found)


def _refuse_untied(assigned: Mapping[str, torch.Tensor], model_copy: ModelCopy) -> None:
    """Raise NoGraphError if a call assigns a shared buffer under one of its names: eager mode unties them."""
    values = {model_copy.full_name(name): value for name, value in assigned.items()}
    for name, value in values.items():
        for other in model_copy.weights.names[model_copy.weights.first[name]]:
            if other.startswith(model_copy.full_name("")) and values.get(other) is not value:
                raise NoGraphError(
                    f"{name!r} and {other!r} are one buffer until forward assigns a tensor to one of them; a "
                    "graph cannot untie them: register two buffers (.clone())"
                )


def _warn_of_history(captured: Capture, model_copy: ModelCopy) -> None:
    """Warn about attributes with a gradient history: a graph reads only their values."""
    plain = model_copy.weights.plain
    for name in map(model_copy.full_name, captured.constants):
        if name in plain and not plain[name].is_leaf:
            model_copy.warn_once(
                f"{name!r} was computed with gradients, and forward reads it: in the placed model it is a "
                "constant, through which no gradients flow. Make it a buffer or a parametrization"
            )


def _with_distinct_names(captured: Capture) -> Capture:
    """Return the capture with renamed nodes, so that no result has the name of a weight."""
    renamed = rename_clashes(
        captured.graph, {*captured.weights.values(), *captured.constants}, captured.weights
    )
    inputs = tuple(renamed.get(name, name) for name in captured.inputs)
    states = {renamed.get(name, name): leaf for name, leaf in captured.states.items()}
    return replace(captured, inputs=inputs, states=states) if renamed else captured


def with_example_sizes(captured: Capture, model_copy: ModelCopy, call: BoundCall) -> Capture:
    """Return the capture with the example's values of data-dependent sizes."""
    values = captured.inputs_in(call)
    for node, name in captured.weights.items():
        tensor = captured.constants.get(name, model_copy.weights.tensors.get(name))
        if tensor is not None and tensor.device.type != "meta" and name not in model_copy.weights.parameters:
            values[node] = tensor.detach().cpu()
    sizes = sizes_of_example(captured.graph, values, captured.inputs, model_copy.warn_once)
    return replace(captured, sizes={**captured.sizes, **sizes})


def require_same_gradients(captured: Capture, call: BoundCall) -> Capture:
    """Restrict a capture to calls whose inputs require gradients exactly as in this one."""
    signature = captured.signature
    leaves = tuple(
        replace(leaf, gradient=example.requires_grad) if isinstance(leaf, TensorLeaf) else leaf
        for leaf, example in zip(signature.leaves, call.leaves, strict=True)
    )
    return replace(captured, signature=replace(signature, leaves=leaves))
