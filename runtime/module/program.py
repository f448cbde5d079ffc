"""A planned call structure: the generated code, and the data to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphplan.capture.model.model_weights import weight_at
from graphplan.capture.model.modes import Modes
from graphplan.capture.signature import InputSignature
from graphplan.capture.structure import StoredAttribute, TensorPresence, attribute_and_leaf, stored_in
from graphplan.capture.value_branches import Branch, same_answers
from graphplan.ir.plan_data import PlanData


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """A tensor of a KV cache that the caller passes in.

    Attributes:
        position: the index of its placeholder in the code.
        leaf: its index among the input leaves.
        home: the device on which it is used, and stays.
        source_device: where it was when the call was planned: from there it is copied to ``home``.
    """

    position: int
    leaf: int
    home: torch.device
    source_device: torch.device


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass of a training step.

    Attributes:
        graph: takes the saved tensors, as a list that it empties, and the gradients of results; returns the
            gradients of inputs, and adds those of parameters to their ``grad``.
        differentiated: positions of the results that it starts from.
        inputs: indices of the leaves whose gradients it returns.
        weights: names of the parameters and buffers that it reads, which must not change before.
        attribute_constants: names of the constants from attributes that it reads, which must not change
            before.
        others: position -> name of each further result that is differentiable in the model's own code, but
            to which no gradient may come.
    """

    graph: fx.Graph
    differentiated: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[str, ...]
    attribute_constants: tuple[str, ...] = ()
    others: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Program:
    """One call structure, planned and lowered.

    Attributes:
        plan: the plan that the code runs.
        signature: matches the calls that it serves.
        graph: takes the input tensors and returns a flat tuple of results.
        constants: attribute name of the code -> tensor that the trace lifted out of the model's code.
        constant_attributes: constant -> attribute of the model that holds it, such as ``"model.offset"``,
            and whose present values the constant must have; None if the trace branched on values.
        parts_read: other attributes, of which constants are views or items.
        plain_sets: attribute -> the plain value, such as None, to which a call sets it; it is set if a call
            stores tensors in it, or if it had some in the trace.
        other_sets: the other attributes that a call sets, and does not store.
        growing: stored lists and dicts that calls extend, which are empty for each call of a graph.
        branches: branches of the model's code that were decided by weights in the trace.
        presence: which attributes had tensors in the trace.
        trace: the trace; programs for other sizes may have the same.
        attributes: name -> module that the code calls: a graph of a control-flow operation, a stage.
        inputs: for each placeholder, the index of its leaf.
        on_host: indices of the placeholders that are read on ``host``, without a move.
        changed: indices of the placeholders that the call writes to.
        host: the device where the caller's tensors were planned to be.
        out_spec: the structure of the result.
        modes: the modes of the modules in the trace.
        cache_tensors: the tensors of the caller's KV caches, and the device of each.
        changed_names: names of the arguments that a call changes: caches, lists and dicts.
        entry: the entry that it serves, a path and possibly a method; empty for the module itself.
        dense: indices of the placeholders that are made contiguous.
        backward: the backward pass of a training step; ``graph`` then returns a pair of the results and the
            saved tensors.
        accumulates: whether parameters may have gradients when it begins.
    """

    plan: PlanData
    signature: InputSignature
    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]
    attributes: Mapping[str, nn.Module]
    inputs: tuple[int, ...]
    on_host: frozenset[int]
    changed: frozenset[int]
    host: torch.device
    out_spec: pytree.TreeSpec
    modes: Modes
    trace: fx.GraphModule
    cache_tensors: tuple[CacheTensor, ...] = ()
    changed_names: tuple[str, ...] = ()
    entry: str = ""
    dense: tuple[int, ...] = ()
    backward: Backward | None = None
    accumulates: bool = True
    constant_attributes: Mapping[str, str] | None = None
    parts_read: frozenset[str] = frozenset()
    plain_sets: Mapping[str, Any] = field(default_factory=dict)
    other_sets: frozenset[str] = frozenset()
    growing: frozenset[str] = frozenset()
    branches: tuple[Branch, ...] = ()
    presence: TensorPresence = field(default_factory=TensorPresence)

    @property
    def stored(self) -> tuple[StoredAttribute, ...]:
        """The attributes in which a call stores tensors."""
        return stored_in(self.out_spec)

    @property
    def stored_names(self) -> list[str]:
        """Names of the attributes in which a call stores tensors, or that had some until the call."""
        emptied = (name for name in self.plain_sets if name in self.presence.before)
        return [*map(str, self.stored), *emptied]

    def conflict(self, other: Program) -> str | None:
        """Return an attribute that this stores and the other reads in part, or sets to what is not stored."""
        names = map(str, self.stored)
        return next((name for name in names if name in other.parts_read | other.other_sets), None)

    def constants_of(self, attribute: str) -> list[tuple[int, torch.Tensor]]:
        """Return the constants that have the values of an attribute, such as ``"model.offset"``.

        Each is with its position among the tensors in the attribute, if this is a container.
        """
        held = [(attribute_and_leaf(at), name) for name, at in (self.constant_attributes or {}).items()]
        return [(leaf, self.constants[name]) for (at, leaf), name in held if at == attribute]

    @property
    def max_input_bytes(self) -> int:
        """Bytes of the largest inputs that the program is planned for."""
        return sum(self.plan.graph.values[name].nbytes for name in self.plan.graph.inputs)

    def accepts(self, leaves: Sequence[Any], module: nn.Module) -> bool:
        """Whether the caches are on the devices of the plan, and all branches are taken as in the trace."""
        placed = all(
            (device := leaves[cached.leaf].device) == cached.home or device == cached.source_device
            for cached in self.cache_tensors
        )
        return placed and self.takes_same_branches(module)

    def takes_same_branches(self, module: nn.Module) -> bool:
        """Whether branches decided by weights of the module are taken as in the trace."""
        return same_answers(self.branches, partial(weight_at, module))
