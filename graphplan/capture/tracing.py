"""Capture of a module's forward pass as a flat ``torch.fx`` graph over the module's weights.

Two exporters are tried in this order: ``transformers.exporters`` for transformers models, ``torch.export``
(non-strict) for all models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphplan._compat.torch import global_hooks, in_transform, read_functions
from graphplan.capture.autocast import write_casts
from graphplan.capture.captured_graph import Capture, name_apart
from graphplan.capture.changes.assigned_state import AssignedState, keep_what_is_read
from graphplan.capture.changes.attribute_data import plain_tensors
from graphplan.capture.eager_run import eager_error
from graphplan.capture.export_here import STATE
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import identity, memory_of
from graphplan.capture.model_methods import RunAsItIs, UntracedMethodError
from graphplan.capture.signature import COMPRESSED, BoundCall, TensorLeaf
from graphplan.capture.sizes.dynamic_sizes import sizes_of_example
from graphplan.capture.source_lines import failed_line
from graphplan.capture.structure import flatten
from graphplan.capture.thread_patches import one_at_a_time
from graphplan.capture.tracers.own_backward import OwnBackward, refusing_own_backward
from graphplan.capture.tracers.plain_export import export_plain, is_transformers_model
from graphplan.capture.tracers.transformers_export import export_transformers
from graphplan.capture.transformers.caches import OWN_ENDINGS, caches_in, layout_of, refuse_opaque
from graphplan.capture.value_branches import is_of_integers
from graphplan.devices.machine import suspended
from graphplan.errors import CaptureError, GraphplanError, InputError, NoGraphError
from graphplan.message_text import first_line

_BY_VALUES = (GuardOnDataDependentSymNode, DataDependentOutputException)
_WANTS_VALUES = ("but got FakeTensor", ".numpy() is not supported for tensor subclasses")
_DATA_DECIDES = (
    "\nThe values of tensors decide what this line does, and a graph does not see them: torch.cond keeps "
    "both branches in the graph; graphplan.partition, unless strict=True, runs the model without a graph"
)
_WITHOUT_VALUES = (
    "\nThe values of tensors decide what this line does, and tensors on the meta device have none: give "
    "integer inputs, such as the grids of images, with their values; other inputs may stay on the meta "
    "device"
)
_UNKNOWN_CLASS = (
    "\nA graph accepts an object as a cache if its class derives from transformers' Cache or has a name "
    f"that ends with {' or '.join(OWN_ENDINGS)}, or as a container if torch.export.register_dataclass or "
    "torch.utils._pytree knows its class"
)
_HOOKED = (
    "hooks of all modules are registered, as by torch.nn.modules.module.register_module_forward_hook, and a "
    "graph would not call them: remove them first"
)
_TRANSFORMED = (
    "no graph is traced inside a transform of torch.func: call the placed model once outside, with inputs of "
    "the sizes that each call inside has"
)
_STEP_TRANSFORMED = (
    "no training step is planned inside a transform of torch.func: place the model with grad=True instead of "
    "train=True"
)
_SCRIPTED = (
    "no graph is traced inside torch.jit.trace: call the placed model once before, with inputs of these sizes"
)


@one_at_a_time
def capture(
    model_copy: ModelCopy,
    call: BoundCall,
    dynamic_shapes: Any = None,
    *,
    keep_grad: bool = False,
    step: bool = False,
    vary: bool = True,
    sizes: bool = False,
) -> Capture:
    """Trace one call.

    Args:
        model_copy: the copy to trace.
        call: the example inputs.
        dynamic_shapes: as in ``torch.export``.
        keep_grad: trace with gradients enabled, so that ``detach`` and ``no_grad`` blocks stay.
        step: whether the trace is for a training step.
        vary: whether batch sizes, lengths and numbers may vary.
        sizes: whether all other sizes may vary, too.

    Raises:
        CaptureError: no exporter can trace the call (the message has the reasons), or the gradients would
            differ from eager mode.
        Exception: any error that the model itself raises for this call, unchanged.
    """
    if any(global_hooks()):
        raise CaptureError(_HOOKED)
    if in_transform():
        raise CaptureError(_STEP_TRANSFORMED if step else _TRANSFORMED)
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # of torch
        raise CaptureError(_SCRIPTED)
    _refuse_layouts(call)
    for name, cache in caches_in(call.kwargs).items():
        refuse_opaque(name, layout_of(flatten(cache)[1]))
    host = call.on_cpu()
    integers = filter(is_of_integers, call.tensors)
    model_copy.knows_inputs = all(one.device.type != "meta" for one in integers)
    read_functions()
    autocast = torch.autocast("cpu", model_copy.autocast, enabled=model_copy.autocast is not None)
    module = model_copy.module
    own_backward = refusing_own_backward(module) if keep_grad else nullcontext(OwnBackward())
    with suspended(), autocast, own_backward as left_out, _untouched_attributes(module):
        shapes = dynamic_shapes if vary else None
        captured = _exported(model_copy, host, shapes, keep_grad, vary=vary, sizes=sizes)
        captured = _completed(captured, model_copy, keep_grad)
        if not any(tensor.device.type == "meta" for tensor in call.tensors):
            captured = _sized_as(captured, model_copy, host)  # without values, inputs on meta decide no sizes
    by_inputs = left_out.reached and any(tensor.requires_grad for tensor in call.tensors)
    return _with_these_gradients(captured, call) if left_out.beyond_inputs or by_inputs else captured


def _with_these_gradients(captured: Capture, call: BoundCall) -> Capture:
    """Restrict a capture to calls whose inputs require gradients exactly as in this one."""
    signature = captured.signature
    leaves = tuple(
        replace(leaf, gradient=given.requires_grad) if isinstance(leaf, TensorLeaf) else leaf
        for leaf, given in zip(signature.leaves, call.leaves, strict=True)
    )
    return replace(captured, signature=replace(signature, leaves=leaves))


def _refuse_layouts(call: BoundCall) -> None:
    for tensor in call.tensors:
        if tensor.layout in COMPRESSED:
            raise InputError(
                f"an input has the layout {tensor.layout}, which torch cannot copy: pass it .to_sparse()"
            )
        if tensor.is_nested and tensor.layout is torch.strided:
            raise InputError(
                "an input is a nested tensor with layout=torch.strided: make it torch.jagged, or pad it"
            )
        if tensor.is_nested:
            raise NoGraphError("an input is a nested tensor, whose sizes cannot be planned")


def _completed(captured: Capture, model_copy: ModelCopy, keep_grad: bool) -> Capture:
    """Return the capture with branches, attributes, casts of autocast, and copies for a backward pass."""
    if model_copy.method != "forward" and all(node.op != "call_function" for node in captured.graph.nodes):
        raise RunAsItIs(f"{model_copy.method!r} computes nothing")
    state: AssignedState = captured.module.meta.pop(STATE)
    for text in state.kept_by_hooks:
        model_copy.warn_once(text)
    _refuse_untied(state.assigned(model_copy.module), model_copy)
    branches = tuple(one.renamed(model_copy.first_name) for one in state.branches if one.weights)
    captured = replace(captured, branches=branches)
    if keep_grad:
        for name in state.losses:
            model_copy.warn_once(
                f"forward leaves {name} with a gradient; a placed model does not, so a loss computed from "
                "it would give no gradients. Return it instead"
            )
        keep_what_is_read(captured)
        _warn_of_history(captured, model_copy)
    write_casts(captured.module, captured.weights.keys(), model_copy.autocast, model_copy.device_types)
    if not state.goes_by_values:
        captured = replace(captured, attributes=_attributes_of(captured, model_copy))
    return _named_apart(captured)


def _attributes_of(captured: Capture, model_copy: ModelCopy) -> dict[str, str] | None:
    """Return the name of the attribute that each constant is; None if one is a view of an attribute."""
    attributes = model_copy.attributes
    memories = {constant: memory_of(tensor) for constant, tensor in captured.constants.items()}
    known = {constant: attributes[memory] for constant, memory in memories.items() if memory in attributes}
    if any(identity(captured.constants[constant]) != key for constant, (_, key) in known.items()):
        return None
    return {constant: name for constant, (name, _) in known.items()}


def _refuse_untied(assigned: Mapping[str, torch.Tensor], model_copy: ModelCopy) -> None:
    """Raise NoGraphError if a call assigns a shared buffer under one name only: eager mode unties them."""
    values = {model_copy.full_name(name): value for name, value in assigned.items()}
    for name, value in values.items():
        for other in model_copy.weights.names[model_copy.weights.first[name]]:
            if other.startswith(model_copy.full_name("")) and values.get(other) is not value:
                raise NoGraphError(
                    f"{name!r} is one tensor with {other!r} until forward assigns it, and in a graph they "
                    "stay one: make it a clone"
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


def _named_apart(captured: Capture) -> Capture:
    """Return the capture with renamed nodes, so that no result has the name of a weight."""
    renamed = name_apart(captured.graph, {*captured.weights.values(), *captured.constants}, captured.weights)
    inputs = tuple(renamed.get(name, name) for name in captured.inputs)
    states = {renamed.get(name, name): leaf for name, leaf in captured.states.items()}
    return replace(captured, inputs=inputs, states=states) if renamed else captured


def _sized_as(captured: Capture, model_copy: ModelCopy, call: BoundCall) -> Capture:
    """Return the capture with the values, in the example, of sizes that the data decides."""
    values = captured.inputs_in(call)
    for node, name in captured.weights.items():
        tensor = captured.constants.get(name, model_copy.weights.tensors.get(name))
        if tensor is not None and tensor.device.type != "meta" and name not in model_copy.weights.parameters:
            values[node] = tensor.detach().cpu()
    sizes = sizes_of_example(captured.graph, values, captured.inputs, model_copy.warn_once)
    return replace(captured, sizes={**captured.sizes, **sizes})


def _exported(
    model_copy: ModelCopy,
    host: BoundCall,
    dynamic_shapes: Any,
    keep_grad: bool,
    *,
    vary: bool,
    sizes: bool,
) -> Capture:
    """Trace by the exporter of transformers, if sizes may vary, or else by ``torch.export``."""
    failures: dict[str, Exception] = {}
    sizes = sizes and model_copy.entry not in model_copy.unsized
    if vary and is_transformers_model(model_copy.module) and not host.args and dynamic_shapes is None:
        try:
            return _warn_if_fixed(
                model_copy, sizes, *export_transformers(model_copy, host, keep_grad=keep_grad, sizes=sizes)
            )
        except RunAsItIs:
            raise
        except Exception as error:  # the exporter runs the model's own code, which may raise anything
            failures["transformers.exporters"] = error
    may_vary = vary
    vary = vary and not failures and model_copy.entry not in model_copy.fixed
    try:
        traced = export_plain(model_copy, host, dynamic_shapes, keep_grad=keep_grad, vary=vary, sizes=sizes)
    except GraphplanError:
        raise
    except Exception as error:  # torch.export runs the model's own code, which may raise anything
        failures["torch.export"] = error
    else:
        captured = _warn_if_fixed(model_copy, sizes, *traced)
        for reason in map(first_line, failures.values()):
            _warn_of_fixed_sizes(model_copy, f"transformers.exporters does not support it ({reason})")
        failures.clear()  # their frames hold the caller's tensors, and this dict
        return captured
    by_data = isinstance(failures["torch.export"], _BY_VALUES)
    has_integers = any(map(is_of_integers, host.tensors))
    if by_data and has_integers and model_copy.knows_inputs and not model_copy.may_branch_on_inputs:
        model_copy.by_inputs.add(model_copy.entry)
        return _exported(model_copy, host, dynamic_shapes, keep_grad, vary=may_vary, sizes=sizes)
    # outside of the handlers, so that it has no other error as its context
    raised = eager_error(model_copy, host, keep_grad=keep_grad)
    if raised is not None:
        if not keep_grad and eager_error(model_copy, host, keep_grad=True) is None:
            raised.add_note("With gradients it runs: give graphplan.partition grad=True, which keeps them")
        if model_copy.prepared:
            raised.add_note(
                "Hooks that run before the model's calls are not traced: if one prepares the model at its "
                "first call, as compressed-tensors does unless dequantize=True, let it do so before you "
                "place the model"
            )
        raise raised
    module = model_copy.module
    is_final = model_copy.method == "forward" or module._parameters or module._buffers
    kind = NoGraphError if is_final else UntracedMethodError
    raise kind(_not_captured(model_copy, failures)) from failures["torch.export"]


def _not_captured(model_copy: ModelCopy, failures: Mapping[str, Exception]) -> str:
    """Return the error text: each exporter's error, the line of the model's code, and what to do about it."""
    last = failures["torch.export"]
    lines = [f"{exporter}: {first_line(error)}" for exporter, error in failures.items()]
    by_data = isinstance(last, _BY_VALUES) or any(words in str(last) for words in _WANTS_VALUES)
    method = "" if model_copy.method == "forward" else f".{model_copy.method}"
    summary = f"{type(model_copy.module).__name__}{method} could not be traced:\n  " + "\n  ".join(lines)
    unknown = str(last).startswith("Unsupported input type")
    advice = (_DATA_DECIDES if model_copy.knows_inputs else _WITHOUT_VALUES) if by_data else ""
    return summary + failed_line(last) + advice + (_UNKNOWN_CLASS if unknown else "")


def _warn_if_fixed(model_copy: ModelCopy, sizes: bool, captured: Capture, fixed: Exception | None) -> Capture:
    """Return the capture; warn if sizes are fixed that were to vary, for the reason ``fixed``."""
    if fixed is not None:
        if not captured.roles:
            model_copy.fixed.add(model_copy.entry)
        if sizes:
            model_copy.unsized.add(model_copy.entry)
        _warn_of_fixed_sizes(model_copy, f"its sizes cannot vary in a trace ({first_line(fixed)})")
    return captured


def _warn_of_fixed_sizes(model_copy: ModelCopy, why: str) -> None:
    model_copy.warn_once(
        f"{type(model_copy.module).__name__}: {why}, so that each new size of its inputs is traced anew"
    )


@contextmanager
def _untouched_attributes(module: nn.Module) -> Iterator[None]:
    """Context manager that restores tensor attributes: a trace runs operations that write to them."""
    tensors = (tensor for *_, tensor in plain_tensors(module) if type(tensor) is torch.Tensor)
    snapshots = [(tensor, tensor._version, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, values in snapshots:
                if tensor._version != version:
                    tensor.copy_(values)
