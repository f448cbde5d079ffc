"""A captured call: its fx graph, and what is known of its inputs and results."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphplan._compat.torch import rename_node, reserve_name
from graphplan.capture.signature import BoundCall, InputSignature
from graphplan.capture.structure import Returned, flatten
from graphplan.capture.value_branches import Branch

OWN_NAMES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))
"""Attributes of generated modules: a child of such a name is not found there under it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``start`` to ``stop`` of a weight, by its first name."""

    weight: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        """As in a plan: ``"lm_head.weight[0:4096]"``."""
        return f"{self.weight}[{self.start}:{self.stop}]"

    @classmethod
    def named(cls, name: str) -> Part | None:
        """The part that has this name; None for the name of a whole weight."""
        found = re.fullmatch(r"(.+)\[(\d+):(\d+)\]", name)
        return None if found is None else cls(found[1], int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What a graph of a forward and a backward pass takes and gives beside the call's inputs and results.

    Attributes:
        differentiated: positions of the results that backward starts from.
        tangents: for each of these, the node name of the input that has the gradient of the loss by it.
        gradients: node name of each gradient -> the first name of its parameter.
        input_gradients: node name of each gradient -> the leaf of the call that it is of.
        others: position -> name of each further result that has a gradient in the model's own code.
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
        constants: name -> tensor: what the trace lifted out of the code, and is no attribute.
        inputs: node name of each leaf of the call, in order.
        out_spec: the structure of the result.
        signature: which calls this graph serves.
        method: ``"transformers"`` or ``"export"``.
        sizes: symbol of each dynamic size -> the largest that the plan is for.
        parts: name -> rows of a weight that the graph reads in parts; ``weights`` has these names.
        roles: for each leaf, axis -> ``"batch"`` or ``"length"`` of those that may vary, where a trace
            has found them itself.
        order: for each of ``inputs``, the leaf of the caller's call; None for what was added to it.
        states: node name of each tensor of a cache that the caller passes in -> its leaf.
        kept: positions of results that are tensors of caches: they stay where they are made.
        entry: what was called, as in :class:`graphplan.capture.model.model_copy.ModelCopy`.
        attributes: constant -> the attribute that it is, such as ``"model.offset"``: any values serve there;
            None where the trace went by values.
        branches: of the model's code, that go by weights.
        step: of a forward and a backward pass in one graph; nodes of the latter have ``backward`` in their
            ``meta``, and gradients follow the results.
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
    branches: tuple[Branch, ...] = ()
    step: TrainingStep | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the arguments that a call changes: the result is then a :class:`Returned`."""
        return self.out_spec.context if self.out_spec.type is Returned else ()

    @property
    def graph(self) -> fx.Graph:
        """The graph: weights and inputs are placeholders, results one flat tuple."""
        return self.module.graph

    def inputs_in(self, call: BoundCall) -> dict[str, Any]:
        """What the graph takes in a call, by node name."""
        return dict(zip(self.inputs, self.signature.traced(call).leaves, strict=True))

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The flattened results: nodes, and constants that pass through."""
        flat = tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]  # always a tuple
        count = 0 if self.step is None else len(self.step.gradients) + len(self.step.input_gradients)
        return flat[: len(flat) - count]


def bound_call(traced: Mapping[str, Any]) -> BoundCall:
    """A call of named arguments that needs no binding."""
    leaves, spec = flatten(((), dict(traced)))
    return BoundCall((), dict(traced), tuple(leaves), spec)


def name_apart(graph: fx.Graph, weights: Collection[str], kept: Collection[str] = ()) -> dict[str, str]:
    """Let nothing that is made, now or later, have the name of a weight, such as ``mean``.

    Returns:
        old name -> new name of what is renamed; nodes of the names in ``kept`` are not.
    """
    for name in weights:
        reserve_name(graph, name)
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        if node.name in weights and node.name not in kept:
            old = node.name
            rename_node(node, f"{old}_1")
            renamed[old] = node.name
    return renamed
