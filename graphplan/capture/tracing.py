"""Capture: a module and example inputs become a flat ``torch.fx`` graph over the module's weights.

Two ways, tried in this order: ``transformers.exporters`` for transformers models, ``torch.export``
(non-strict) for everything.
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

_DATA_DECIDES = (
    "\nThe values of tensors decide what this line does, and a graph does not see them: torch.cond keeps "
    "both branches in the graph; graphplan.partition, unless strict=True, runs the model without a graph"
)
_WITHOUT_VALUES = (
    "\nThe values of tensors decide what this line does, and those of the meta device have none: give "
    "integers among the inputs, such as the grids of images, with their values; others may stay there"
)
_UNKNOWN_CLASS = (
    "\nA graph takes an object as a cache, if its class derives from transformers' Cache or has a name that "
    f"ends with {' or '.join(OWN_ENDINGS)}, or as a container, if torch.export.register_dataclass or "
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
        step: trace what a training step is made of.
        vary: whether batches, lengths and numbers may vary.
        sizes: whether all other sizes may, too.

    Raises:
        CaptureError: no way of capturing took it; the message has the reason of each. Or it would have other
            gradients than eager.
        Exception: what the model itself raises for this call, unchanged.
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
    as_in_eager = refusing_own_backward(module) if keep_grad else nullcontext(OwnBackward())
    with suspended(), autocast, as_in_eager as left_out, _untouched_attributes(module):
        shapes = dynamic_shapes if vary else None
        found = _with_examples(model_copy, host, shapes, keep_grad, vary=vary, sizes=sizes)
        found = _completed(found, model_copy, keep_grad)
        if not any(tensor.device.type == "meta" for tensor in call.tensors):
            found = _sized_as(found, model_copy, host)  # what those of the meta device decide is not known
    by_inputs = left_out.reached and any(tensor.requires_grad for tensor in call.tensors)
    return _with_these_gradients(found, call) if left_out.beyond_inputs or by_inputs else found


def _with_these_gradients(found: Capture, call: BoundCall) -> Capture:
    """The same, not for calls in which other inputs require gradients, or fewer."""
    signature = found.signature
    leaves = tuple(
        replace(leaf, gradient=given.requires_grad) if isinstance(leaf, TensorLeaf) else leaf
        for leaf, given in zip(signature.leaves, call.leaves, strict=True)
    )
    return replace(found, signature=replace(signature, leaves=leaves))


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
            raise NoGraphError("an input is a nested tensor, of whose sizes no plan can be made")


def _completed(found: Capture, model_copy: ModelCopy, keep_grad: bool) -> Capture:
    """The capture, with the casts of autocast, and what a backward pass reads."""
    if model_copy.method != "forward" and all(node.op != "call_function" for node in found.graph.nodes):
        raise RunAsItIs(f"{model_copy.method!r} computes nothing")
    left: AssignedState = found.module.meta.pop(STATE)
    for text in left.kept_by_hooks:
        model_copy.warn_once(text)
    _refuse_parted(left.assigned(model_copy.module), model_copy)
    branches = tuple(one.renamed(model_copy.first_name) for one in left.branches if one.weights)
    found = replace(found, branches=branches)
    if keep_grad:
        for name in left.losses:
            model_copy.warn_once(
                f"forward leaves {name} with a gradient: a placed model does not, so that a loss made of it "
                "gives none. Return it instead"
            )
        keep_what_is_read(found)
        _tell_of_history(found, model_copy)
    write_casts(found.module, found.weights.keys(), model_copy.autocast, model_copy.device_types)
    if not left.goes_by_values:
        found = replace(found, attributes=_attributes_of(found, model_copy))
    return _named_apart(found)


def _attributes_of(found: Capture, model_copy: ModelCopy) -> dict[str, str] | None:
    """The attributes that constants are, by the names of these; None where one is a view of such."""
    attributes = model_copy.attributes
    memories = {constant: memory_of(tensor) for constant, tensor in found.constants.items()}
    known = {constant: attributes[memory] for constant, memory in memories.items() if memory in attributes}
    if any(identity(found.constants[constant]) != key for constant, (_, key) in known.items()):
        return None
    return {constant: name for constant, (name, _) in known.items()}


def _refuse_parted(assigned: Mapping[str, torch.Tensor], model_copy: ModelCopy) -> None:
    """Raise NoGraphError where a buffer is assigned, and what is the same weight is not: eager parts them."""
    values = {model_copy.full_name(name): value for name, value in assigned.items()}
    for name, value in values.items():
        for other in model_copy.weights.names[model_copy.weights.first[name]]:
            if other.startswith(model_copy.full_name("")) and values.get(other) is not value:
                raise NoGraphError(
                    f"{name!r} is one tensor with {other!r} until forward assigns it, and a graph keeps them "
                    "one: make it a clone"
                )


def _tell_of_history(found: Capture, model_copy: ModelCopy) -> None:
    """Warn of attributes that were computed with gradients: a graph reads their values alone."""
    plain = model_copy.weights.plain
    for name in map(model_copy.full_name, found.constants):
        if name in plain and not plain[name].is_leaf:
            model_copy.warn_once(
                f"{name!r} was computed with gradients, and forward reads it: the placed model has its "
                "value, through which none flow. Make it a buffer or a parametrization"
            )


def _named_apart(found: Capture) -> Capture:
    """The capture, in which nothing that is made has the name of a weight."""
    renamed = name_apart(found.graph, {*found.weights.values(), *found.constants}, found.weights)
    inputs = tuple(renamed.get(name, name) for name in found.inputs)
    states = {renamed.get(name, name): leaf for name, leaf in found.states.items()}
    return replace(found, inputs=inputs, states=states) if renamed else found


def _sized_as(found: Capture, model_copy: ModelCopy, call: BoundCall) -> Capture:
    """The capture, with sizes that the data decides as in the example."""
    values = found.inputs_in(call)
    for node, name in found.weights.items():
        tensor = found.constants.get(name, model_copy.weights.tensors.get(name))
        if tensor is not None and tensor.device.type != "meta" and name not in model_copy.weights.parameters:
            values[node] = tensor.detach().cpu()
    sizes = sizes_of_example(found.graph, values, found.inputs, model_copy.warn_once)
    return replace(found, sizes={**found.sizes, **sizes})


def _with_examples(
    model_copy: ModelCopy,
    host: BoundCall,
    dynamic_shapes: Any,
    keep_grad: bool,
    *,
    vary: bool,
    sizes: bool,
) -> Capture:
    """As :func:`capture`; the exporter of transformers has sizes vary."""
    failures: dict[str, Exception] = {}
    sizes = sizes and model_copy.entry not in model_copy.unsized
    if vary and is_transformers_model(model_copy.module) and not host.args and dynamic_shapes is None:
        try:
            return _told(
                model_copy, sizes, *export_transformers(model_copy, host, keep_grad=keep_grad, sizes=sizes)
            )
        except RunAsItIs:
            raise
        except Exception as error:  # the exporter runs the model's own code, which may raise anything
            failures["transformers.exporters"] = error
    asked = vary
    vary = vary and not failures and model_copy.entry not in model_copy.fixed
    try:
        traced = export_plain(model_copy, host, dynamic_shapes, keep_grad=keep_grad, vary=vary, sizes=sizes)
    except GraphplanError:
        raise
    except Exception as error:  # torch.export runs the model's own code, which may raise anything
        failures["torch.export"] = error
    else:
        found = _told(model_copy, sizes, *traced)
        for reason in map(first_line, failures.values()):
            _tell_of_fixed_sizes(model_copy, f"transformers.exporters does not take it ({reason})")
        failures.clear()  # their frames hold the caller's tensors, and this dict
        return found
    decided = isinstance(failures["torch.export"], GuardOnDataDependentSymNode | DataDependentOutputException)
    if decided and model_copy.knows_inputs and not model_copy.asks_inputs:
        model_copy.by_inputs.add(model_copy.entry)
        return _with_examples(model_copy, host, dynamic_shapes, keep_grad, vary=asked, sizes=sizes)
    # outside of the handlers: it is to have no context but its own
    own = eager_error(model_copy, host, keep_grad=keep_grad)
    if own is not None:
        if not keep_grad and eager_error(model_copy, host, keep_grad=True) is None:
            own.add_note("With gradients it runs: give graphplan.partition grad=True, which keeps them")
        if model_copy.prepared:
            own.add_note(
                "Hooks that run before the model's calls are not traced: where one makes the model ready at "
                "its first call, as compressed-tensors does unless dequantize=True, have that done before"
            )
        raise own
    module = model_copy.module
    alone = model_copy.method == "forward" or module._parameters or module._buffers
    kind = NoGraphError if alone else UntracedMethodError
    raise kind(_not_captured(model_copy, failures)) from failures["torch.export"]


def _not_captured(model_copy: ModelCopy, failures: Mapping[str, Exception]) -> str:
    """Which ways were tried, what each said, the line of the model's code, and what to do about it."""
    last = failures["torch.export"]
    lines = [f"{way}: {first_line(error)}" for way, error in failures.items()]
    decides = isinstance(last, GuardOnDataDependentSymNode)
    method = "" if model_copy.method == "forward" else f".{model_copy.method}"
    said = f"{type(model_copy.module).__name__}{method} could not be captured:\n  " + "\n  ".join(lines)
    unknown = str(last).startswith("Unsupported input type")
    decided = (_DATA_DECIDES if model_copy.knows_inputs else _WITHOUT_VALUES) if decides else ""
    return said + failed_line(last) + decided + (_UNKNOWN_CLASS if unknown else "")


def _told(model_copy: ModelCopy, sizes: bool, found: Capture, fixed: Exception | None) -> Capture:
    """What was traced; its user is told why no size varies, or fewer than all ``sizes``, as were to."""
    if fixed is not None:
        if not found.roles:
            model_copy.fixed.add(model_copy.entry)
        if sizes:
            model_copy.unsized.add(model_copy.entry)
        _tell_of_fixed_sizes(model_copy, f"its sizes cannot vary in a trace ({first_line(fixed)})")
    return found


def _tell_of_fixed_sizes(model_copy: ModelCopy, why: str) -> None:
    model_copy.warn_once(
        f"{type(model_copy.module).__name__}: {why}, so that each new size of its inputs is captured anew"
    )


@contextmanager
def _untouched_attributes(module: nn.Module) -> Iterator[None]:
    """Give tensor attributes their values back: tracing an operation that writes to one runs it."""
    found = (tensor for *_, tensor in plain_tensors(module) if type(tensor) is torch.Tensor)
    kept = [(tensor, tensor._version, tensor.clone()) for tensor in found]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, values in kept:
                if tensor._version != version:
                    tensor.copy_(values)
