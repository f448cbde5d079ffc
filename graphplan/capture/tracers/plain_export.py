"""Capture of any model by ``torch.export``, dynamic in all sizes and numbers that the model does not fix.

The batch and length axes, ints and floats of a call start as symbols. The trace fixes those that weights or
the model's code require to be constant, and records guards on the others, which are checked at each call. If
a later call differs only in sizes, it is traced with all axes as symbols, which takes longer::

    x: (4, 3, 32, 32), scale: 0.5        x: (b, 3, 32, 32), scale: s
    x: (4, 3, 64, 48), scale: 0.5        x: (b, 3, h, w), scale: s        where h * w > 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import fx, nn

from graphplan._compat.symbolic_numbers import plain_comparisons, symbolic_numbers
from graphplan._compat.torch import unbacked_like_backed
from graphplan.capture.captured_graph import Capture
from graphplan.capture.changes.attribute_snapshots import restored
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model_methods import pure_method, with_forward
from graphplan.capture.signature import BoundCall, CounterLeaf, TensorLeaf
from graphplan.capture.sizes.dynamic_axes import SIZE, Roles, conditions, plain_roles, shapes_for
from graphplan.capture.sizes.dynamic_sizes import values_of
from graphplan.capture.structure import CONTAINERS, leaves_of, node_of_class
from graphplan.capture.thread_patches import patched
from graphplan.capture.tracers.export_loop import export
from graphplan.capture.tracers.exported_program import from_program
from graphplan.capture.tracers.quiet import quiet
from graphplan.capture.tracers.recurrent_layers import lengths_vary
from graphplan.capture.transformers.attention_masks import masks_as_in_eager
from graphplan.capture.transformers.cache_sizes import with_tokens
from graphplan.capture.transformers.caches import with_changes
from graphplan.errors import InputError


def is_transformers_model(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers ``PreTrainedModel``; this does not import transformers."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(model).__mro__
    )


def export_declared(
    model_copy: ModelCopy, call: BoundCall, dynamic_shapes: Any, *, keep_grad: bool
) -> Capture:
    """Trace a call in which only the sizes vary that the caller declares, as in ``torch.export``, if any.

    Raises:
        GraphplanError: the call cannot be traced.
        Exception: whatever the model's own code or the tracer raises.
    """
    shapes = _by_name(model_copy, call, dynamic_shapes)
    _require_in_range(call, shapes)
    shapes = _with_constants(call.args if isinstance(shapes, tuple) else dict(call.kwargs), shapes)
    return from_program(_export(model_copy, call, shapes, keep_grad=keep_grad), call, model_copy)


def export_varying(
    model_copy: ModelCopy, call: BoundCall, *, sizes: bool, ones: bool, numbers: bool, keep_grad: bool
) -> Capture:
    """Trace a call with dynamic axes, as in :func:`plain_roles`, and with symbolic numbers if asked.

    Raises:
        GraphplanError: the call cannot be traced.
        Exception: whatever the model's own code or the tracer raises.
    """
    arguments = {**{f"args_{index}": value for index, value in enumerate(call.args)}, **call.kwargs}
    roles = with_tokens(plain_roles(call.leaves, sizes=sizes, ones=ones), call, ones=ones)
    each = iter(roles)
    shapes = {name: shapes_for(value, each) for name, value in arguments.items()}
    replaced = [*(symbolic_numbers() if numbers else ()), *plain_comparisons()]
    with (
        restored(map(vars, call.tensors)),  # a failed trace leaves attributes on them
        unbacked_like_backed(),
        patched(*replaced, *lengths_vary()),
    ):
        program = _export(model_copy, call, shapes, names=list(arguments), keep_grad=keep_grad, sizes=sizes)
    capture = from_program(program, call, model_copy, roles, conditions(program, arguments))
    values, sized = values_of(capture.graph), _sizes_of(capture.graph)
    varied = tuple(
        _bounded_axes(leaf, values[name], axes, sized)
        for name, leaf, axes in zip(capture.inputs, capture.signature.leaves, roles, strict=True)
    )
    return replace(capture, roles=varied)


def _sizes_of(graph: fx.Graph) -> set[Any]:
    """Return the symbols in sizes of tensors."""
    return {
        symbol
        for node in graph.nodes
        for val in leaves_of(node.meta.get("val"))
        if isinstance(val, torch.Tensor)
        for size in val.shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols  # type: ignore[attr-defined]
    }


def _bounded_axes(leaf: Any, val: Any, roles: Roles, sized: set[Any]) -> Roles:
    """Return the axes for which a plan needs a bound; axis 0 of an int if sizes depend on it."""
    if isinstance(leaf, TensorLeaf):
        return {axis: role for axis, role in roles.items() if leaf.ranges[axis] is not None}
    return {0: SIZE} if isinstance(leaf, CounterLeaf) and val.node.expr in sized else {}


def _export(
    model_copy: ModelCopy,
    call: BoundCall,
    shapes: Any,
    *,
    names: Sequence[str] = (),
    keep_grad: bool,
    sizes: bool = False,
) -> torch.export.ExportedProgram:
    """Export a call; ``names`` are those of all arguments if ``shapes`` uses other names than the model's."""
    module = model_copy.module
    forward = with_changes(pure_method(module, model_copy.method, loops=keep_grad), call.kwargs)
    if names:
        kinds = [Parameter.POSITIONAL_ONLY] * len(call.args) + [Parameter.KEYWORD_ONLY] * len(call.kwargs)
        forward.__signature__ = Signature(list(map(Parameter, names, kinds)))  # type: ignore[attr-defined]
    masks = masks_as_in_eager() if is_transformers_model(module) else nullcontext()
    with (
        quiet(),
        torch.set_grad_enabled(keep_grad),
        masks,
        _called(module),
        with_forward(module, forward),
    ):
        options = {"keep_grad": keep_grad, "sizes": sizes, "declared": not names}
        return export(model_copy, call.args, dict(call.kwargs), shapes, **options)


@contextmanager
def _called(module: nn.Module) -> Iterator[None]:
    """Context manager that makes ``torch.export`` call a ``GraphModule`` as it calls any other module.

    Otherwise it interprets the graph, without argument names and hooks.
    """
    original = type(module)
    if issubclass(original, fx.GraphModule):
        subclasses = original.__mro__[: original.__mro__.index(fx.GraphModule)]
        body = {name: value for base in reversed(subclasses) for name, value in vars(base).items()}
        for name in ("__call__", "__dict__", "__weakref__"):  # GraphModule defines its own __call__
            body.pop(name, None)
        module.__class__ = type(original.__name__, (nn.Module,), body)
    try:
        yield
    finally:
        module.__class__ = original


def _by_name(model_copy: ModelCopy, call: BoundCall, dynamic_shapes: Any) -> Any:
    """Return ``dynamic_shapes`` for the canonical call, in which named arguments are keyword arguments."""
    if dynamic_shapes is None:
        return None
    if isinstance(dynamic_shapes, Mapping):
        parameters = model_copy.signature.parameters
        unknown = set(dynamic_shapes) - set(parameters)
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise InputError(f"dynamic_shapes names {sorted(unknown)}, which forward does not take")
        return dynamic_shapes if call.args else {name: dynamic_shapes.get(name) for name in call.kwargs}
    if call.args:
        return tuple(dynamic_shapes)
    names = list(call.kwargs)
    if len(dynamic_shapes) != len(names):  # a canonical call omits arguments that equal their defaults
        names = list(model_copy.signature.parameters)
    if len(dynamic_shapes) > len(names):
        raise InputError(
            f"dynamic_shapes has {len(dynamic_shapes)} entries, but forward takes {', '.join(names)}: give "
            "one for each argument, or a dict of names"
        )
    shapes = dict(zip(names, dynamic_shapes, strict=False))
    return {name: shapes.get(name) for name in call.kwargs}


def _with_constants(value: Any, shapes: Any) -> Any:
    """Return ``shapes`` with empty lists for dtypes and other constants, which torch flattens."""
    if isinstance(value, dict) and isinstance(shapes, dict):
        return {name: _with_constants(value.get(name), one) for name, one in shapes.items()}
    is_sequence = type(value) in (list, tuple) and type(shapes) in (list, tuple)
    if is_sequence and len(value) == len(shapes):  # else torch names the mismatch
        return type(shapes)(map(_with_constants, value, shapes))
    is_node = node_of_class(type(value)) is not None and not isinstance(value, CONTAINERS)
    return [] if shapes is None and is_node and not leaves_of(value) else shapes


def _require_in_range(call: BoundCall, shapes: Any) -> None:
    """Raise InputError if a size is outside its range.

    ``shapes`` is as ``torch.export`` takes it for this call: by position, or by name.
    """
    arguments = call.kwargs if isinstance(shapes, Mapping) else call.args
    for name, axis, size, dim in _sizes("", arguments, shapes):
        low, high = getattr(dim, "min", None), getattr(dim, "max", None)
        if (low is not None and size < low) or (high is not None and size > high):
            label = getattr(dim, "__name__", "")
            raise InputError(
                f"{name} has size {size} along dimension {axis}, outside of {low} to {high}, the range that "
                f"dynamic_shapes gives it{f' as {label!r}' if label else ''}"
            )


def _sizes(name: str, value: Any, shapes: Any) -> Iterator[tuple[str, int, int, Any]]:
    """Yield (argument, axis, size, entry of ``shapes``)."""
    entries: Any = shapes.items() if isinstance(shapes, Mapping) else enumerate(shapes or ())
    for key, entry in entries:
        if isinstance(value, torch.Tensor):
            yield name, key, value.shape[key], entry
        elif isinstance(value, list | tuple) or (isinstance(value, Mapping) and key in value):
            inner = f"{name or 'args'}[{key!r}]" if name or isinstance(key, int) else key
            yield from _sizes(inner, value[key], entry)
