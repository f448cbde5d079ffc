"""A captured call: its fx graph, its input signature, and the roles of its inputs and results."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphplan._compat.torch import rename_node, reserve_name
from graphplan.capture.signature import BoundCall, InputSignature
from graphplan.capture.structure import Returned, Stored, StoredAttribute, TensorPresence, flatten, stored_in
from graphplan.capture.value_branches import Branch

OWN_NAMES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))
"""Names of attributes of every ``fx.GraphModule``, under which it cannot have a child."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``start`` to ``stop`` of a weight, by its first name."""

    weight: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The name of the part in a plan: ``"lm_head.weight[0:4096]"``."""
        return f"{self.weight}[{self.start}:{self.stop}]"

    @classmethod
    def named(cls, name: str) -> Part | None:
        """Return the part that has this name; None for the name of a whole weight."""
        match = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", name)
        return None if match is None else cls(match[1], int(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Inputs and results of a training step's graph beyond those of the call.

    Attributes:
        differentiated: positions of the results that backward starts from.
        tangents: for each of these, the node name of the input with the gradient of the loss by the result.
        gradients: node name of each gradient -> the first name of its parameter.
        input_gradients: node name of each gradient of an input -> index of the input leaf.
        others: position -> name of each further result that requires a gradient in eager mode.
    """

    differentiated: tuple[int, ...]
    tangents: tuple[str, ...]
    gradients: Mapping[str, str]
    input_gradients: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capture:
    """A traced call.

    Attributes:
        module: holds the graph, and the submodules of its control-flow operations if any.
        weights: node name -> the weight's first name in the model.
        constants: name -> tensor, other than a weight, of the code or of an attribute.
        inputs: node name of each input leaf, in order.
        out_spec: the structure of the result.
        signature: the calls that this graph serves.
        method: ``"transformers"`` or ``"export"``.
        sizes: symbol of each dynamic size -> the largest size that the plan is for.
        parts: name -> rows of a weight that the graph reads in parts; ``weights`` has these names.
        roles: for each leaf, dynamic axis -> ``"batch"``, ``"length"`` or ``"size"``; empty unless the trace
            chose them.
        order: for each of ``inputs``, the leaf of the caller's call; None if the trace has added it.
        states: node name of each tensor of a cache that the caller passes in -> its leaf.
        kept: positions of results that stay on the device that computes them: tensors of caches, and stored
            tensors except scalars and those that a backward pass starts from.
        entry: the method that was called, as in :class:`graphplan.capture.model.model_copy.ModelCopy`.
        attributes: constant -> the attribute that it is, such as ``"model.offset"``, whose values may change;
            None where the trace depended on values, or a constant is a view of an attribute.
        parts_read: other attributes, of which constants are views or items.
        plain_sets: attribute -> the plain value, such as None, to which a call sets it.
        other_sets: the other attributes that a call sets, and does not store.
        growing: stored lists and dicts that calls extend, which are empty for each call of a graph.
        serves_next: whether it serves the next call too, which finds what this one stores.
        branches: branches of the model's code on values of weights.
        presence: which attributes had tensors in the trace.
        step: the training step, if forward and backward are in the graph; nodes of the latter have
            ``backward`` in their ``meta``, and gradients follow the results.
    """

    module: fx.GraphModule
    weights: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: tuple[str, ...]
    out_spec: pytree.TreeSpec
    signature: InputSignature
    method: str
    sizes: dict[Any, int] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    roles: tuple[Mapping[int, str], ...] = ()
    order: tuple[int | None, ...] = ()
    states: Mapping[str, int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    entry: str = ""
    attributes: dict[str, str] | None = None
    parts_read: frozenset[str] = frozenset()
    plain_sets: Mapping[str, Any] = field(default_factory=dict)
    other_sets: frozenset[str] = frozenset()
    growing: frozenset[str] = frozenset()
    serves_next: bool = True
    branches: tuple[Branch, ...] = ()
    presence: TensorPresence = field(default_factory=TensorPresence)
    step: TrainingStep | None = None

    @property
    def changed_names(self) -> tuple[str, ...]:
        """The names of the arguments that a call changes; if any, the result is a :class:`Returned`."""
        return self.out_spec.context if self.out_spec.type is Returned else ()

    @property
    def stored(self) -> dict[int, StoredAttribute]:
        """The position of each result that is stored -> its attribute."""
        outer = self.out_spec.children()[0] if self.changed_names else self.out_spec
        if outer.type is not Stored:
            return {}
        result, *values = outer.children()
        each = (
            one for one, value in zip(outer.context, values, strict=True) for _ in range(value.num_leaves)
        )
        return dict(enumerate(each, result.num_leaves))

    @property
    def graph(self) -> fx.Graph:
        """The graph; weights and inputs are placeholders, and the results one flat tuple."""
        return self.module.graph

    def inputs_in(self, call: BoundCall) -> dict[str, Any]:
        """Return the graph's inputs in a call, by node name."""
        return dict(zip(self.inputs, self.signature.traced(call).leaves, strict=True))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The flattened results without gradients: nodes, and constants that pass through."""
        flat = tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]  # always a tuple
        count = 0 if self.step is None else len(self.step.gradients) + len(self.step.input_gradients)
        return flat[: len(flat) - count]


def with_stored(
    graph: fx.Graph, spec: pytree.TreeSpec, stored: Mapping[StoredAttribute, StoredAttribute]
) -> tuple[pytree.TreeSpec, frozenset[int]]:
    """Keep some of the attributes that a call stores, and remove the others from the graph's results.

    Args:
        graph: the graph, whose results are those of ``spec``.
        spec: the structure of the results.
        stored: the attributes to keep, each with its new name.

    Returns:
        The new structure, and the positions of the results that are stored.
    """
    attributes = stored_in(spec)
    if not attributes:
        return spec, frozenset()
    outer, *changed = spec.children() if spec.type is Returned else [spec]
    result, *values = outer.children()
    node = graph.output_node()
    flat: list[Any] = list(node.args[0])  # type: ignore[arg-type]  # always a tuple
    kept, start = flat[: result.num_leaves], result.num_leaves
    for attribute, value in zip(attributes, values, strict=True):
        if attribute in stored:
            kept += flat[start : start + value.num_leaves]
        start += value.num_leaves
    node.args = ((*kept, *flat[start:]),)
    names = tuple(stored[one] for one in attributes if one in stored)
    inner = [value for one, value in zip(attributes, values, strict=True) if one in stored]
    outer = pytree.TreeSpec(Stored, names, [result, *inner]) if inner else result
    positions = frozenset(range(result.num_leaves, len(kept)))
    whole = pytree.TreeSpec(Returned, spec.context, [outer, *changed]) if spec.type is Returned else outer
    return whole, positions


def without_stored(capture: Capture) -> Capture:
    """Return a capture whose calls store nothing in attributes; the nodes for it are left in the graph."""
    stored = capture.stored
    if not stored:
        return capture
    positions = (i if i < min(stored) else i - len(stored) for i in capture.kept if i not in stored)
    spec, _ = with_stored(capture.graph, capture.out_spec, {})
    return replace(capture, out_spec=spec, kept=frozenset(positions))


def bound_call(traced: Mapping[str, Any]) -> BoundCall:
    """Return a call of named arguments that need no binding."""
    leaves, spec = flatten(((), dict(traced)))
    return BoundCall((), dict(traced), tuple(leaves), spec)


def rename_clashes(
    graph: fx.Graph, weights: Collection[str], excluded: Collection[str] = ()
) -> dict[str, str]:
    """Rename nodes whose name is that of a weight, such as ``mean``, and reserve these names.

    Returns:
        old name -> new name of each renamed node; nodes named in ``excluded`` keep theirs.
    """
    for name in weights:
        reserve_name(graph, name)
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        if node.name in weights and node.name not in excluded:
            old = node.name
            rename_node(node, f"{old}_1")
            renamed[old] = node.name
    return renamed
