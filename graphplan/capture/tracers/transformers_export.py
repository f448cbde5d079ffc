"""Capture of transformers models, dynamic in batch and length, with caches and token counters.

``transformers.exporters`` patches models so that they can be traced; the trace itself is made here, so that
one graph serves all lengths and batch sizes:

- every batch and length axis may vary, sizes 0 and 1 included; an axis of length 1 (the one token of a decode
  step) stays fixed, since a trace of several tokens is another computation;
- the counters of caches are inputs, so that sliding windows are traced as they are;
- the trace's guards on sizes are checked at each call;
- a cache, list or dict argument is returned as the model has changed it, so that the caller's own can be
  updated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from graphplan._compat.symbolic_numbers import plain_comparisons
from graphplan._compat.torch import unbacked_like_backed
from graphplan._compat.transformers import export_patches
from graphplan.capture.captured_graph import Capture, bound_call
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model_methods import pure_method, with_forward
from graphplan.capture.signature import BoundCall, Guard, InputSignature, Prepared, leaf_names
from graphplan.capture.sizes.dynamic_axes import SIZE, Roles, conditions, shapes_for, text_roles
from graphplan.capture.structure import leaves_of, map_leaves
from graphplan.capture.thread_patches import patched
from graphplan.capture.tracers.export_loop import export
from graphplan.capture.tracers.exported_program import from_program, leaf_spec
from graphplan.capture.tracers.quiet import quiet
from graphplan.capture.transformers.attention_masks import masks_as_in_eager
from graphplan.capture.transformers.cache_sizes import cache_roles, equate_sizes
from graphplan.capture.transformers.caches import caches_in, is_cache, with_changes
from graphplan.capture.transformers.export_patches import (
    forwards_of,
    have_equal_lengths,
    require_all_weights_read,
    segment_bounds,
    segments_as_in_eager,
)
from graphplan.capture.transformers.recurrences import recurrences_as_operations


def export_transformers(
    model_copy: ModelCopy, call: BoundCall, varying: Sequence[str], *, keep_grad: bool
) -> Capture:
    """Trace a call.

    Args:
        model_copy: the copy to trace.
        call: the example inputs, all by name.
        varying: the roles of the axes that are dynamic.
        keep_grad: as in :func:`graphplan.capture.tracing.capture`.

    Raises:
        RunAsItIs: the method runs without a graph.
        CaptureError: the exporter's replacement code reads fewer weights than the model does.
        Exception: whatever the model's own code or the tracer raises.
    """
    module = model_copy.module
    prepare = partial(_precomputed, module, is_forward=model_copy.method == "forward")
    arguments = {name: _contiguous(one, always=is_cache(one)) for name, one in call.kwargs.items()}
    with quiet():
        inputs = prepare(bound_call(arguments)).kwargs
    batch = _batch(inputs)
    roles = {name: _roles(name, value, batch, sizes=SIZE in varying) for name, value in inputs.items()}
    axes = {name: shapes_for(value, iter(roles[name])) for name, value in inputs.items()}
    shapes = axes if varying else None
    original = pure_method(module, model_copy.method, loops=keep_grad)

    @wraps(original)
    def forward(**kwargs: Any) -> Any:
        if varying:
            for name, cache in caches_in(kwargs).items():
                equate_sizes(cache, inputs[name], roles[name])
        return original(**kwargs)

    bounds = segment_bounds(inputs)
    uniform = bool(bounds) and all(have_equal_lengths(inputs[name]) for name in bounds)
    codes = forwards_of(module)
    with (
        quiet(),
        with_forward(module, with_changes(forward, call.kwargs)),
        _patched_for_export(module, inputs, keep_grad=keep_grad, uniform=uniform),
    ):
        traced = forwards_of(module)
        copies = map_leaves(_copied, inputs)
        program = export(model_copy, (), copies, shapes, keep_grad=keep_grad, sizes=SIZE in varying)
    require_all_weights_read(module, codes, traced, _weights_read(program))
    guards, traced_call = conditions(program, inputs), bound_call(inputs)
    if uniform:
        guards += (_same_lengths(list(map(leaf_names(traced_call).index, bounds))),)
    flat = tuple(role for name in inputs for role in roles[name])
    capture = from_program(program, traced_call, model_copy, flat, guards, is_text=True)
    capture = replace(capture, method="transformers", roles=flat)
    computes = any(type(value) is not type(call.kwargs.get(name)) for name, value in inputs.items())
    return _with_own_arguments(capture, call, prepare) if computes else capture


def _copied(leaf: Any) -> Any:
    """Return a copy of an input; ``deepcopy`` refuses tensors that autograd has computed."""
    if isinstance(leaf, torch.Tensor) and not leaf.is_leaf:
        return copy.deepcopy(leaf.detach()).requires_grad_()
    return copy.deepcopy(leaf)


def _precomputed(module: nn.Module, call: BoundCall, *, is_forward: bool) -> BoundCall:
    """Return a call with the arguments that the exporter computes from the caller's; later calls need these.

    Positions are those of a text, which other methods than ``forward`` need not have.
    """
    from transformers.exporters.utils import precompute_export_inputs  # optional package

    unwanted = {} if is_forward or "position_ids" in call.kwargs else {"position_ids": ()}
    inputs = {**call.on_cpu().kwargs, **unwanted}
    with torch.no_grad():
        precompute_export_inputs(module, inputs)
    return bound_call({name: value for name, value in inputs.items() if name not in unwanted})


def _with_own_arguments(
    capture: Capture, call: BoundCall, prepare: Callable[[BoundCall], BoundCall]
) -> Capture:
    """Convert a capture over precomputed inputs to one over the call's own arguments."""
    names = leaf_names(call)
    indices = {name: index for index, name in enumerate(names)}
    order = tuple(indices.get(name) for name in capture.signature.names)
    specs = dict(zip(order, capture.signature.leaves, strict=True))
    roles = dict(zip(order, capture.roles, strict=True))
    leaves = tuple(specs.get(index, leaf_spec(leaf)) for index, leaf in enumerate(call.leaves))
    prepared = Prepared(prepare, capture.signature)  # guards may be on precomputed inputs
    return replace(
        capture,
        signature=InputSignature(call.spec, leaves, names, prepared=prepared),
        roles=tuple(roles.get(index, {}) for index in range(len(leaves))),
        order=order,
        states={name: index for name, leaf in capture.states.items() if (index := order[leaf]) is not None},
    )


@contextmanager
def _patched_for_export(module: nn.Module, inputs: Any, *, keep_grad: bool, uniform: bool) -> Iterator[None]:
    """Context manager that applies the patches of the transformers exporter and of graphplan to a trace.

    It omits the exporter's patch that makes sliding layers keep every token, and does not move output flags
    into the config: they stay arguments, and kernels without attention weights reject them in a config.
    """
    from transformers.cache_utils import DynamicSlidingWindowLayer  # optional package
    from transformers.exporters.exporter_dynamo import (  # optional package
        patch_forward_signature,
        reset_model_state,
    )

    with (
        torch.set_grad_enabled(keep_grad),
        unbacked_like_backed(),
        patched(*(one for one in export_patches() if one[0] is not DynamicSlidingWindowLayer)),
        patched(*plain_comparisons()),
        masks_as_in_eager(),
        segments_as_in_eager(uniform=uniform),
        recurrences_as_operations(module),
        reset_model_state(module),
        patch_forward_signature(module, inputs),
    ):
        yield


def _contiguous(value: Any, *, always: bool) -> Any:
    """Return a contiguous copy: other strides of an example would be traced as sizes of their own."""

    def dense(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if always or leaf.is_contiguous() or not leaf.is_floating_point():
            return leaf.clone(memory_format=torch.contiguous_format)
        return leaf

    return map_leaves(dense, value)


def _batch(inputs: Mapping[str, Any]) -> int | None:
    """Return the batch size: the first size of the first tensor that is neither a cache nor an image.

    Images next to a text may have a first size of another kind; in a call without text it is the batch.
    """
    tensors = [(name, value) for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    texts = [value.shape[0] for name, value in tensors if value.dim() >= 2 and name != "pixel_values"]
    images = [value.shape[0] for name, value in tensors if value.dim() >= 4]
    return next(iter([*texts, *images]), None)


def _roles(name: str, value: Any, batch: int | None, *, sizes: bool) -> list[Roles]:
    """Return the roles of an argument's leaves; axes that are neither batch nor length only if ``sizes``."""
    if is_cache(value):
        return cache_roles(value, batch)
    return [text_roles(name, leaf, batch, sizes=sizes) for leaf in leaves_of(value)]


def _same_lengths(indices: Sequence[int]) -> Guard:
    return Guard(
        "images have several sizes",
        lambda leaves: all(have_equal_lengths(leaves[index]) for index in indices),
    )


def _weights_read(program: torch.export.ExportedProgram) -> set[str]:
    used = {node.name for node in program.graph.find_nodes(op="placeholder") if node.users}
    specs = program.graph_signature.input_specs
    return {spec.target for spec in specs if spec.target is not None and spec.arg.name in used}
