"""What an exported program says of its inputs and results, as a capture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphplan.capture.captured_graph import Capture, Prepare, bound_call
from graphplan.capture.dynamic_sizes import UNBOUNDED, finite_bound, largest_sizes, with_splits
from graphplan.capture.model_copy import ModelCopy
from graphplan.capture.model_weights import identity
from graphplan.capture.signature import (
    BoundCall,
    CounterLeaf,
    Guard,
    InputSignature,
    Prepared,
    TensorLeaf,
    leaf_names,
)
from graphplan.capture.structure import node_of
from graphplan.capture.transformers.caches import is_described
from graphplan.errors import CaptureError, NoGraphError


def from_program(
    program: torch.export.ExportedProgram,
    call: BoundCall,
    model_copy: ModelCopy,
    method: str,
    *,
    prepare: Prepare | None = None,
    traced: Mapping[str, Any] | None = None,
    roles: tuple[Mapping[int, str], ...] = (),
    guards: tuple[Guard, ...] = (),
    caches: tuple[str, ...] = (),
) -> Capture:
    """What an exported program says, as a capture.

    Args:
        program: from ``torch.export``; its graph becomes the capture's own.
        call: the call that was traced, in the caller's arguments.
        model_copy: the copy that was traced.
        method: for people.
        prepare: what was done to the arguments before the trace, if anything.
        traced: the arguments after that.
        roles: as in :class:`Capture`.
        guards: what the trace takes for granted of sizes.
        caches: as in :class:`Capture`.

    Raises:
        CaptureError: the program has inputs or outputs that are neither tensors nor constants.
    """
    _refuse_vmap(program.graph)
    taken = _read_inputs(program, model_copy)
    inputs = taken.of_call
    _flatten_outputs(program)
    bound = call if traced is None else bound_call(traced)
    if len(bound.leaves) != len(inputs):
        raise CaptureError(f"the trace takes {len(inputs)} inputs, the call has {len(bound.leaves)}")
    signature = _any_strides(_input_signature(program, bound, inputs, roles), bound.spec, roles)
    order = tuple(range(len(inputs))) if traced is None else _order(bound, call)
    prepared = None
    places = tuple(place for place in order if place is not None)
    if len(places) == len(order):
        signature = replace(signature, guards=tuple(guard.over(places) for guard in guards))
    else:  # conditions may be on what only the exporter sees
        assert prepare is not None
        prepared = Prepared(prepare, replace(signature, guards=guards))
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    return Capture(
        program.graph_module,
        taken.weights,
        taken.constants,
        tuple(inputs),
        out_spec,
        signature if traced is None else replace(_with_flags(signature, call), prepared=prepared),
        method,
        with_splits(program.graph, largest_sizes(program.graph, inputs, signature.leaves)),
        prepare,
        roles=_in_order(roles, order, len(call.leaves)),
        order=order,
        states=_states(program.graph, inputs, bound.spec, order),
        caches=caches,
        kept=frozenset(_cache_leaves(out_spec)),
        entry=model_copy.entry,
    )


def _refuse_vmap(graph: fx.Graph) -> None:
    """A trace enters and leaves ``vmap`` by calls that nothing reads: no plan can keep them."""
    if any(getattr(node.target, "__name__", "") == "_add_batch_dim" for node in graph.nodes):
        raise NoGraphError(
            "the trace has torch.vmap in it, which runs in no other order than it was traced in"
        )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a program takes.

    Attributes:
        of_call: node names of the leaves of the call, in order.
        weights: node name -> the weight's first name in the model, or the constant's.
        constants: name -> tensor that the trace lifted out of the code.
    """

    of_call: list[str]
    weights: dict[str, str]
    constants: dict[str, torch.Tensor]


def _read_inputs(program: torch.export.ExportedProgram, model_copy: ModelCopy) -> _Inputs:
    kinds = torch.export.graph_signature.InputKind
    found = _Inputs([], {}, {})
    for spec in program.graph_signature.input_specs:
        node = spec.arg.name
        if spec.kind is kinds.USER_INPUT:
            found.of_call.append(node)
        elif spec.kind in (kinds.PARAMETER, kinds.BUFFER):
            assert spec.target is not None
            found.weights[node] = model_copy.weights.first[model_copy.full_name(spec.target)]
        elif spec.kind is kinds.CONSTANT_TENSOR:
            assert spec.target is not None
            tensor = program.constants[spec.target]
            # a patched forward may reach the caller's own weights past the copy
            known = model_copy.weights.identities.get(identity(tensor))
            found.weights[node] = spec.target if known is None else known
            if known is None:
                found.constants[spec.target] = tensor
        else:
            raise CaptureError(f"the trace has an input of kind {spec.kind.name}, which cannot be placed")
    return found


def _with_flags(signature: InputSignature, call: BoundCall) -> InputSignature:
    """The signature of the caller's call, whose output flags (``use_cache``) the exporter took out."""
    known = dict(zip(signature.names, signature.leaves, strict=True))
    names = leaf_names(call)
    leaves = tuple(known.get(name, _leaf(leaf, None)) for name, leaf in zip(names, call.leaves, strict=True))
    return InputSignature(call.spec, leaves, names, guards=signature.guards)


def _any_strides(
    signature: InputSignature, spec: pytree.TreeSpec, roles: Sequence[Mapping[int, str]]
) -> InputSignature:
    """Let some tensors have any strides.

    Of caches, since a window of one is a slice, and is only read to extend it. And of tokens: the last one
    of a text is a slice too, and so small that it is made dense when it comes.
    """
    leaves = list(signature.leaves)
    states = set(_cache_leaves(spec))
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, TensorLeaf):
            continue
        tokens = bool(roles) and not leaf.dtype.is_floating_point and not leaf.dtype.is_complex
        if index in states or tokens:
            leaves[index] = replace(leaf, stride=())
    return replace(signature, leaves=tuple(leaves))


def _order(traced: BoundCall, call: BoundCall) -> tuple[int | None, ...]:
    """For each leaf that was traced, the leaf of the caller's call; None for what the exporter has added."""
    places = {name: index for index, name in enumerate(leaf_names(call))}
    return tuple(places.get(name) for name in leaf_names(traced))


def _in_order(
    roles: Sequence[Mapping[int, str]], order: Sequence[int | None], count: int
) -> tuple[Mapping[int, str], ...]:
    found: list[Mapping[int, str]] = [{}] * count
    for own, index in zip(roles, order, strict=False):
        if index is not None:
            found[index] = own
    return tuple(found)


def _states(
    graph: fx.Graph, inputs: Sequence[str], spec: pytree.TreeSpec, order: Sequence[int | None]
) -> dict[str, int]:
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    return {
        inputs[index]: place
        for index in _cache_leaves(spec)
        if isinstance(nodes[inputs[index]].meta.get("val"), torch.Tensor)
        and (place := order[index]) is not None
    }


def _cache_leaves(spec: pytree.TreeSpec, start: int = 0) -> Iterator[int]:
    """Indices of the leaves that are in caches."""
    node = None if spec.is_leaf() else node_of(spec.type)
    if node is not None and is_described(node):
        yield from range(start, start + spec.num_leaves)
        return
    for child in spec.children():
        yield from _cache_leaves(child, start)
        start += child.num_leaves


def _flatten_outputs(program: torch.export.ExportedProgram) -> None:
    """Let the graph return what the caller gets, and no more."""
    kinds = torch.export.graph_signature.OutputKind
    node = program.graph.output_node()
    flat = []
    for spec, arg in zip(program.graph_signature.output_specs, node.args[0], strict=True):
        if spec.kind is kinds.USER_OUTPUT:
            flat.append(arg)
        elif spec.kind is not kinds.BUFFER_MUTATION:
            raise CaptureError(f"the trace has an output of kind {spec.kind.name}")
    node.args = (tuple(flat),)


def _input_signature(
    program: torch.export.ExportedProgram,
    call: BoundCall,
    inputs: Sequence[str],
    roles: Sequence[Mapping[int, str]],
) -> InputSignature:
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    leaves = tuple(
        _leaf(leaf, nodes[name].meta.get("val"), program.range_constraints, own or {})
        for leaf, name, own in zip(call.leaves, inputs, roles or [{}] * len(inputs), strict=True)
    )
    return InputSignature(call.spec, leaves, leaf_names(call))


def _leaf(
    leaf: Any, val: Any, ranges: Mapping[Any, Any] | None = None, roles: Mapping[int, str] | None = None
) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if not isinstance(val, torch.SymInt):
            return leaf
        if not val.node.expr.is_symbol:
            return int(val.node.expr) if val.node.expr.is_number else leaf
        return CounterLeaf(*_bounds((ranges or {}).get(val.node.expr), UNBOUNDED))
    stride = None if leaf.is_contiguous() else leaf.stride()
    if not isinstance(val, torch.Tensor):
        return TensorLeaf(leaf.dtype, tuple(leaf.shape), (), stride)
    shape: list[int | None] = []
    bounds: list[tuple[int, int] | None] = []
    for size in val.shape:
        symbol = getattr(size, "node", None)  # a torch.SymInt has one
        shape.append(int(size) if symbol is None else None)
        found = None if symbol is None else (ranges or {}).get(symbol.expr)
        here = UNBOUNDED if len(bounds) in (roles or {}) else leaf.shape[len(bounds)]
        bounds.append(None if symbol is None else _bounds(found, here))
    return TensorLeaf(val.dtype, tuple(shape), tuple(bounds), stride)


def _bounds(found: Any, example: int) -> tuple[int, int]:
    """Smallest and largest size; the example's is the largest where none was given."""
    if found is None:
        return 0, example
    largest = finite_bound(found.upper)
    return int(found.lower), example if largest is None else largest
