"""Capture of a module's forward pass as a flat ``torch.fx`` graph over the module's weights.

A call is traced in several attempts, each with fewer dynamic sizes; the first that succeeds counts::

    transformers models       transformers.exporters    all sizes, if asked for
                                                        batches and lengths
                                                        nothing
                              torch.export              nothing
    other models              torch.export              all sizes and numbers, if asked for
                                                        batches, lengths and numbers
                                                        nothing
    given dynamic_shapes      torch.export              these

If the values of integer inputs decide a branch of the code, all attempts are repeated with these values
known. Within one attempt, :mod:`graphplan.capture.tracers.export_loop` repeats the trace with the
facts about the code that earlier traces found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphplan._compat.torch import global_hooks, in_transform, read_functions
from graphplan.capture.captured_graph import Capture
from graphplan.capture.changes.attribute_data import plain_tensors
from graphplan.capture.eager_run import eager_error
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model_methods import RunAsItIs, UntracedMethodError
from graphplan.capture.signature import COMPRESSED, BoundCall
from graphplan.capture.sizes.dynamic_axes import BATCH, LENGTH, SIZE
from graphplan.capture.source_lines import failed_line
from graphplan.capture.structure import flatten
from graphplan.capture.thread_patches import one_at_a_time
from graphplan.capture.tracers.completion import complete, require_same_gradients, with_example_sizes
from graphplan.capture.tracers.own_backward import refusing_own_backward
from graphplan.capture.tracers.plain_export import export_declared, export_varying, is_transformers_model
from graphplan.capture.tracers.transformers_export import export_transformers
from graphplan.capture.transformers.caches import OWN_ENDINGS, caches_in, layout_of, refuse_opaque
from graphplan.capture.value_branches import is_integer_tensor
from graphplan.devices.machine import suspended
from graphplan.errors import CaptureError, GraphplanError, InputError, NoGraphError
from graphplan.message_text import first_line

_TRANSFORMERS, _EXPORT = "transformers.exporters", "torch.export"
_DATA_DEPENDENT_ERRORS = (GuardOnDataDependentSymNode, DataDependentOutputException)
_VALUE_ERROR_TEXTS = ("but got FakeTensor", ".numpy() is not supported for tensor subclasses")
_DATA_ADVICE = (
    "\nThis line depends on the values of tensors, which a graph does not see: torch.cond keeps "
    "both branches in the graph; graphplan.partition, unless strict=True, runs the model without a graph"
)
_META_ADVICE = (
    "\nThis line depends on the values of tensors, and tensors on the meta device have none: give "
    "integer inputs, such as the grids of images, with their values; other inputs may stay on the meta "
    "device"
)
_CLASS_ADVICE = (
    "\nA graph accepts an object as a cache if its class derives from transformers' Cache or has a name "
    f"that ends with {' or '.join(OWN_ENDINGS)}, or as a container if torch.export.register_dataclass or "
    "torch.utils._pytree has registered its class"
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
    integers = filter(is_integer_tensor, call.tensors)
    model_copy.inputs_have_values = all(one.device.type != "meta" for one in integers)
    read_functions()
    autocast = torch.autocast("cpu", model_copy.autocast, enabled=model_copy.autocast is not None)
    module = model_copy.module
    own_backward = refusing_own_backward(module) if keep_grad else nullcontext(list[type]())
    with suspended(), autocast, own_backward as omitted, _untouched_attributes(module):
        shapes = dynamic_shapes if vary else None
        captured = _exported(model_copy, host, shapes, keep_grad=keep_grad, vary=vary, sizes=sizes)
        captured = complete(captured, model_copy, keep_grad=keep_grad)
        if not any(tensor.device.type == "meta" for tensor in call.tensors):
            captured = with_example_sizes(captured, model_copy, host)  # inputs on meta have no values
    return require_same_gradients(captured, call) if omitted else captured


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


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One attempt to trace a call: the exporter, and the sizes and numbers that may vary.

    Attributes:
        exporter: the name of the exporter.
        roles: the roles of the dynamic axes.
        ones: whether axes of size 1 vary, too; only for ``torch.export``.
        numbers: whether ints and floats vary, too; only for ``torch.export``.
        only_after: the error of the previous attempt after which to make this one; None to make it always.
    """

    exporter: str
    roles: tuple[str, ...] = ()
    ones: bool = False
    numbers: bool = False
    only_after: type[Exception] | None = None


def _attempts(model_copy: ModelCopy, call: BoundCall, *, vary: bool, sizes: bool) -> list[_Attempt]:
    """Return the attempts in order; in the last, only sizes that the caller declares are dynamic."""
    last = _Attempt(_EXPORT)
    varying = ((BATCH, LENGTH, SIZE), (BATCH, LENGTH)) if sizes else ((BATCH, LENGTH),)
    if vary and is_transformers_model(model_copy.module) and not call.args:
        return [*(_Attempt(_TRANSFORMERS, roles) for roles in (*varying, ())), last]
    if not vary or model_copy.code.sizes_fixed:
        return [last]
    any_one = any(1 in tensor.shape for tensor in call.tensors)
    any_number = any(type(leaf) in (int, float) for leaf in call.leaves)
    attempts: list[_Attempt] = []
    for roles in varying:
        attempts.append(_Attempt(_EXPORT, roles, ones=True, numbers=True))
        if any_one:
            attempts.append(_Attempt(_EXPORT, roles, numbers=True))
        if any_number:  # a symbol cannot be, say, a key of a dict
            attempts.append(_Attempt(_EXPORT, roles, ones=not any_one, only_after=TypeError))
    return [*attempts, last]


def _exported(
    model_copy: ModelCopy, call: BoundCall, dynamic_shapes: Any, *, keep_grad: bool, vary: bool, sizes: bool
) -> Capture:
    """Return the capture of the first attempt that succeeds.

    Raises:
        NoGraphError: none does.
        Exception: the error that the model itself raises for this call.
    """
    sizes = sizes and not model_copy.code.only_batch_and_length_vary
    attempts = _attempts(model_copy, call, vary=vary and dynamic_shapes is None, sizes=sizes)
    trace = partial(_first_traced, attempts, model_copy, call, dynamic_shapes, keep_grad=keep_grad)
    captured, failures = trace()
    by_data = isinstance(failures.get(_EXPORT), _DATA_DEPENDENT_ERRORS)
    if captured is None and by_data and model_copy.start_branching_on_inputs(call):
        captured, failures = trace()
    if captured is None:
        _raise_failure(failures, model_copy, call, keep_grad=keep_grad)
    return captured


def _first_traced(
    attempts: Sequence[_Attempt],
    model_copy: ModelCopy,
    call: BoundCall,
    dynamic_shapes: Any,
    *,
    keep_grad: bool,
) -> tuple[Capture | None, dict[str, Exception]]:
    """Return the capture of the first attempt that succeeds, or None, and each exporter's latest error."""
    failures: dict[str, Exception] = {}
    for attempt in attempts:
        failed = failures.get(attempt.exporter)
        if attempt.only_after is not None and not isinstance(failed, attempt.only_after):
            continue
        try:
            captured = _traced(attempt, model_copy, call, dynamic_shapes, keep_grad=keep_grad)
        except (RunAsItIs, InputError):
            raise
        except Exception as error:  # the tracer runs the model's own code, which may raise anything
            is_last = attempt is attempts[-1]
            if is_last and isinstance(error, GraphplanError):
                raise
            # the frames of an error hold the caller's tensors
            failures[attempt.exporter] = error if is_last else error.with_traceback(None)
            continue
        if failed is not None and attempt.roles != attempts[0].roles:
            model_copy.code.sizes_fixed |= not captured.roles
            model_copy.code.only_batch_and_length_vary |= SIZE in attempts[0].roles
            _warn_of_fixed_sizes(model_copy, f"its sizes cannot vary in a trace ({first_line(failed)})")
        elif failed is None and failures:
            reason = first_line(failures[_TRANSFORMERS])
            _warn_of_fixed_sizes(model_copy, f"{_TRANSFORMERS} does not support it ({reason})")
        return captured, failures
    return None, failures


def _traced(
    attempt: _Attempt, model_copy: ModelCopy, call: BoundCall, dynamic_shapes: Any, *, keep_grad: bool
) -> Capture:
    if attempt.exporter == _TRANSFORMERS:
        return export_transformers(model_copy, call, attempt.roles, keep_grad=keep_grad)
    if not attempt.roles:
        return export_declared(model_copy, call, dynamic_shapes, keep_grad=keep_grad)
    varying = {"sizes": SIZE in attempt.roles, "ones": attempt.ones, "numbers": attempt.numbers}
    return export_varying(model_copy, call, **varying, keep_grad=keep_grad)


def _raise_failure(
    failures: Mapping[str, Exception], model_copy: ModelCopy, call: BoundCall, *, keep_grad: bool
) -> NoReturn:
    """Raise the error that the model itself raises for a call; if none, a NoGraphError with the reasons."""
    raised = eager_error(model_copy, call, keep_grad=keep_grad)
    if raised is not None:
        if not keep_grad and eager_error(model_copy, call, keep_grad=True) is None:
            raised.add_note("With gradients it runs: give graphplan.partition grad=True, which keeps them")
        if model_copy.has_forward_pre_hooks:
            raised.add_note(
                "Hooks that run before the model's calls are not traced: if one prepares the model at its "
                "first call, as compressed-tensors does unless dequantize=True, let it do so before you "
                "place the model"
            )
        raise raised
    module = model_copy.module
    is_final = model_copy.method == "forward" or module._parameters or module._buffers
    kind = NoGraphError if is_final else UntracedMethodError
    raise kind(_not_captured(model_copy, failures)) from failures[_EXPORT]


def _not_captured(model_copy: ModelCopy, failures: Mapping[str, Exception]) -> str:
    """Return the error text: each exporter's error, the line of the model's code, and advice."""
    last = failures[_EXPORT]
    lines = [f"{exporter}: {first_line(error)}" for exporter, error in failures.items()]
    by_data = isinstance(last, _DATA_DEPENDENT_ERRORS) or any(
        words in str(last) for words in _VALUE_ERROR_TEXTS
    )
    method = "" if model_copy.method == "forward" else f".{model_copy.method}"
    summary = f"{type(model_copy.module).__name__}{method} could not be traced:\n  " + "\n  ".join(lines)
    unknown = str(last).startswith("Unsupported input type")
    advice = (_DATA_ADVICE if model_copy.inputs_have_values else _META_ADVICE) if by_data else ""
    return summary + failed_line(last) + advice + (_CLASS_ADVICE if unknown else "")


def _warn_of_fixed_sizes(model_copy: ModelCopy, why: str) -> None:
    model_copy.warn_once(
        f"{type(model_copy.module).__name__}: {why}, so that it is retraced for each new size of its inputs"
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
