"""Conversion of an exported program to a capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree

from graphplan._compat.export import NO_MODULE
from graphplan._compat.torch import is_transformed, restore_users
from graphplan.capture.captured_graph import Capture, with_stored
from graphplan.capture.changes.attribute_data import plain_tensors
from graphplan.capture.changes.kept_state import WRITTEN, KeptStateError
from graphplan.capture.changes.program_contents import written_constants
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import identity, memory_of
from graphplan.capture.signature import (
    BoundCall,
    CounterLeaf,
    FloatLeaf,
    Guard,
    InputSignature,
    TensorLeaf,
    leaf_names,
)
from graphplan.capture.sizes.dynamic_axes import Roles
from graphplan.capture.sizes.dynamic_sizes import (
    UNBOUNDED,
    finite_bound,
    largest_sizes,
    sizes_of_call,
    values_of,
)
from graphplan.capture.tracers.export_loop import STATE
from graphplan.capture.tracers.trace_patches import is_transform
from graphplan.capture.transformers.caches import caches_at
from graphplan.capture.value_branches import input_guard
from graphplan.errors import CaptureError, NoGraphError


def from_program(
    program: torch.export.ExportedProgram,
    call: BoundCall,
    model_copy: ModelCopy,
    roles: Sequence[Roles] = (),
    guards: Sequence[Guard] = (),
    *,
    is_text: bool = False,
) -> Capture:
    """Return an exported program as a capture, which takes over the program's graph.

    Args:
        program: the exported program.
        call: the example call.
        model_copy: the traced model.
        roles: for each leaf of the call, its dynamic axes; empty where they are not known.
        guards: the trace's conditions on the leaves.
        is_text: whether integer tensors are tokens, which may have any strides.

    Raises:
        NoGraphError: the program has inputs that are neither tensors nor constants, or enters a transform.
        CaptureError: the program has outputs of an unknown kind, or its signature rejects the example call.
    """
    restore_users(program.graph)
    _refuse_transforms(program.graph)
    _write_numbers(program.graph)
    inputs, weights, constants = _read_inputs(program, model_copy)
    _refuse_attribute_writes(program, constants, model_copy)
    prefix = model_copy.entry.partition(":")[0]
    _name_modules(program.graph, prefix)
    _flatten_outputs(program)
    values, states = values_of(program.graph), _cache_leaves(call.spec)
    traced = (
        leaf_spec(leaf, values[name], program.range_constraints, axes)
        for leaf, name, axes in zip(call.leaves, inputs, roles or [{}] * len(inputs), strict=True)
    )
    leaves = tuple(
        _of_any_strides(leaf, is_state=index in states, is_text=is_text) for index, leaf in enumerate(traced)
    )
    names, state = leaf_names(call), program.graph_module.meta[STATE]
    assert program.call_spec.out_spec is not None
    renamed = {one: replace(one, path=".".join(filter(None, (prefix, one.path)))) for one in state.stored}
    out_spec, stored = with_stored(program.graph, program.call_spec.out_spec, renamed)
    guards = (*guards, *input_guard(state.branches.taken, call.leaves, names))
    signature = InputSignature(call.spec, leaves, names, guards)
    if roles and (problem := signature.mismatch(call)) is not None:
        raise CaptureError(f"the trace does not accept its own example inputs: {problem}")
    sizes = sizes_of_call(program.graph, inputs, call.leaves) | largest_sizes(program.graph, inputs, leaves)
    return Capture(
        program.graph_module,
        weights,
        constants,
        tuple(inputs),
        out_spec,
        signature,
        "export",
        sizes,
        order=tuple(range(len(inputs))),
        states={inputs[i]: i for i in sorted(states) if isinstance(values[inputs[i]], torch.Tensor)},
        kept=_cache_leaves(out_spec) | frozenset(filter(partial(_is_large, program.graph), stored)),
        entry=model_copy.entry,
    )


def _refuse_transforms(graph: fx.Graph) -> None:
    """Raise NoGraphError for ``vmap`` and ``jvp``: nothing reads the calls that enter and leave them."""
    if any(is_transform(node.target) for node in graph.nodes):
        raise NoGraphError(
            "the trace contains torch.vmap or jvp, whose operations can run only in the order in which "
            "they were traced"
        )


def _write_numbers(graph: fx.Graph) -> None:
    """Replace nodes that the trace has fixed to a number, as a counter for which one value is possible."""
    sources = (node for node in graph.nodes if node.op in ("placeholder", "call_function"))
    values = {node: node.meta.get("val") for node in sources}
    numbers = {node: value for node, value in values.items() if type(value) in (bool, int, float)}
    # in graph order: a changed node becomes the last user of its other arguments
    for user in dict.fromkeys(user for node in numbers for user in node.users):
        arguments = fx.map_arg((user.args, user.kwargs), lambda node: numbers.get(node, node))
        user.args, user.kwargs = arguments


def _name_modules(graph: fx.Graph, path: str) -> None:
    """Prefix module paths with ``path``, the traced submodule; "" if the whole model was traced."""
    for node in graph.nodes:
        stack = dict(node.meta.get("nn_module_stack") or {})
        stack.pop(NO_MODULE, None)
        if path:
            stack = {key: (f"{path}.{name}" if name else path, kind) for key, (name, kind) in stack.items()}
        node.meta["nn_module_stack"] = stack


def _read_inputs(
    program: torch.export.ExportedProgram, model_copy: ModelCopy
) -> tuple[list[str], dict[str, str], dict[str, torch.Tensor]]:
    """Return node names of the call's leaves; node name -> weight or constant; name -> constant tensor."""
    kinds = torch.export.graph_signature.InputKind
    inputs, weights, constants = list[str](), dict[str, str](), dict[str, torch.Tensor]()
    values = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        node = spec.arg.name
        if spec.kind is kinds.USER_INPUT:
            inputs.append(node)
        elif spec.kind in (kinds.PARAMETER, kinds.BUFFER):
            assert spec.target is not None
            weights[node] = model_copy.weights.first[model_copy.full_name(spec.target)]
        elif spec.kind is kinds.CONSTANT_TENSOR:
            assert spec.target is not None
            tensor = program.constants[spec.target]
            # a patched forward may reach the caller's own weights instead of the copy's; so may a list
            weight = model_copy.weights.identities.get(identity(tensor))
            weights[node] = spec.target if weight is None else weight
            if is_transformed(tensor):
                raise NoGraphError(
                    "the trace contains a transform of torch.func, whose values would become constants"
                )
            if weight is None and is_fake(tensor) and values[node].users:
                raise NoGraphError(
                    f"forward makes a {type(tensor).__name__} from computed values: a tensor subclass, "
                    "which the trace treats as a constant"
                )
            if weight is None:
                constants[spec.target] = tensor
        else:
            raise NoGraphError(
                f"forward computes with {spec.target!r}, an object that is not a tensor (such as a "
                "torch.Generator), which a graph cannot contain"
            )
    return inputs, weights, constants


def _refuse_attribute_writes(
    program: torch.export.ExportedProgram, constants: Mapping[str, torch.Tensor], model_copy: ModelCopy
) -> None:
    """Raise KeptStateError if the graph writes to a tensor attribute, of which it has only a copy.

    One that shares memory with a weight is refused later, for that reason.
    """
    names = written_constants(program) & constants.keys()
    written = {_memory_key(constants[name]) for name in names if not model_copy.weights.sharing(name)}
    if not written:
        return
    for part, name, inner, tensor in plain_tensors(model_copy.module):
        if _memory_key(tensor) in written:
            raise KeptStateError.of(f"{type(part).__name__}.{inner}", WRITTEN, name)


def _memory_key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that share memory."""
    memory = memory_of(tensor)
    return id(tensor) if memory is None else memory


def _of_any_strides(leaf: Any, *, is_state: bool, is_text: bool) -> Any:
    """Return a signature's leaf, without strides for cache tensors and tokens.

    The window of a sliding cache is a slice, and is read only to extend it. The last token of a text is also
    a slice, so small that it is made contiguous at the call.
    """
    if not isinstance(leaf, TensorLeaf):
        return leaf
    tokens = is_text and not leaf.dtype.is_floating_point and not leaf.dtype.is_complex
    return replace(leaf, stride=()) if is_state or tokens else leaf


def _is_large(graph: fx.Graph, position: int) -> bool:
    """Whether a result is a tensor, and not a scalar such as a loss, which code adds to others."""
    result: Any = graph.output_node().args[0][position]  # type: ignore[index]  # a tuple of results
    value = result.meta.get("val") if isinstance(result, fx.Node) else result
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _cache_leaves(spec: pytree.TreeSpec) -> frozenset[int]:
    return frozenset(i for start, cache in caches_at(spec) for i in range(start, start + cache.num_leaves))


def _flatten_outputs(program: torch.export.ExportedProgram) -> None:
    """Remove buffer mutations from the graph's outputs."""
    kinds = torch.export.graph_signature.OutputKind
    node = program.graph.output_node()
    flat = []
    for spec, arg in zip(program.graph_signature.output_specs, node.args[0], strict=True):
        if spec.kind is kinds.USER_OUTPUT:
            flat.append(arg)
        elif spec.kind is not kinds.BUFFER_MUTATION:
            raise CaptureError(f"the trace has an output of kind {spec.kind.name}")
    node.args = (tuple(flat),)


def leaf_spec(
    leaf: Any,
    val: Any = None,
    ranges: Mapping[Any, Any] = MappingProxyType({}),
    roles: Roles = MappingProxyType({}),
) -> Any:
    """Return the requirements of a signature on a leaf.

    Args:
        leaf: the leaf in the example.
        val: its traced value.
        ranges: symbol of the trace -> range.
        roles: dynamic axis -> role.
    """
    if not isinstance(leaf, torch.Tensor):
        if not isinstance(val, torch.SymInt | torch.SymFloat):
            return leaf
        if not val.node.expr.is_symbol:
            return leaf
        if isinstance(val, torch.SymFloat):
            return FloatLeaf()
        range_ = ranges.get(val.node.expr)
        return CounterLeaf(*((-UNBOUNDED, UNBOUNDED) if range_ is None else _bounds(range_, UNBOUNDED)))
    stride = None if leaf.is_contiguous() else leaf.stride()
    if not isinstance(val, torch.Tensor):
        return TensorLeaf(leaf.dtype, tuple(leaf.shape), (), stride)
    bounds: dict[int, tuple[int, int]] = {}  # axis -> the sizes that it may have
    for axis, (size, example) in enumerate(zip(val.shape, leaf.shape, strict=True)):
        if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
            low, high = _bounds(ranges.get(size.node.expr), UNBOUNDED if axis in roles else example)
            bounds[axis] = low, 1 if high == 2 and example < 2 else high  # torch has 2 for sizes of at most 1
    shape = tuple(None if axis in bounds else int(size) for axis, size in enumerate(val.shape))
    return TensorLeaf(val.dtype, shape, tuple(map(bounds.get, range(val.dim()))), stride)


def _bounds(range_: Any, example: int) -> tuple[int, int]:
    """Return the smallest and largest size; the largest is ``example`` where the range has no upper bound."""
    if range_ is None:
        return 0, example
    largest = finite_bound(range_.upper)
    return int(range_.lower), example if largest is None else largest
