"""What a planned call is carried out by: generated code, and all that surrounds it."""

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
from graphplan.capture.value_branches import Branch, same_answers
from graphplan.ir.plan_data import PlanData


@dataclass(frozen=True, slots=True)
class State:
    """A tensor of a cache that the caller passes in.

    Attributes:
        position: of its placeholder in the code.
        leaf: its index among the leaves of the caller's call.
        home: the device on which it is used, and stays.
        found: the device on which it was when the call was planned: from there it is copied home.
    """

    position: int
    leaf: int
    home: torch.device
    found: torch.device


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward pass of a training step.

    Attributes:
        graph: from what the forward pass has saved, as a list that is emptied, and the gradients by results,
            to the gradients of inputs; it adds those of parameters to their ``grad``.
        differentiated: positions of the results that it starts from.
        inputs: indices of the leaves whose gradients it returns.
        weights: names of the parameters and buffers that it reads, which must not change before.
        held: likewise, of the constants that lie in attributes.
        others: position -> name of each further result to which no gradient may come, though the model's own
            code has one.
    """

    graph: fx.Graph
    differentiated: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[str, ...]
    held: tuple[str, ...] = ()
    others: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Program:
    """One call structure, planned and lowered.

    Attributes:
        plan: what the code carries out.
        signature: which calls it serves.
        graph: from the call's tensors to a flat tuple of results.
        constants: attribute name -> tensor that the code lifted out of the model's.
        held: of these, those that lie in attributes, such as ``"model.offset"``, and have the values that are
            there now; None where the trace went by values.
        branches: of the model's code, that went by weights when it was traced.
        attributes: name -> module that the code calls: a graph of a control-flow operation, a stage.
        inputs: for each placeholder, the index of its leaf.
        on_host: those of the placeholders that are read where the caller's tensors were planned
            to be, without a move.
        changed: those of the placeholders that the call writes to.
        host: the device where the caller's tensors were planned to be.
        out_spec: the structure of the result.
        modes: of the modules, as traced.
        states: the tensors of the caller's caches, and where each is to be.
        given: names of the arguments that a call changes: caches, lists and dicts.
        entry: path of the submodule whose call it serves; empty for the module itself.
        dense: those of the placeholders that are made contiguous.
        backward: of a training step; ``graph`` then returns a pair of the results and what is saved.
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
    states: tuple[State, ...] = ()
    given: tuple[str, ...] = ()
    entry: str = ""
    dense: tuple[int, ...] = ()
    backward: Backward | None = None
    accumulates: bool = True
    held: Mapping[str, str] | None = None
    branches: tuple[Branch, ...] = ()

    @property
    def reach(self) -> int:
        """Bytes of the largest inputs that it is planned for."""
        return sum(self.plan.graph.values[name].nbytes for name in self.plan.graph.inputs)

    def takes(self, leaves: Sequence[Any], module: nn.Module) -> bool:
        """Whether the caches of a call are where the plan has them, or where they were when it was made.

        And whether branches go as they went then.
        """
        there = all((device := leaves[s.leaf].device) == s.home or device == s.found for s in self.states)
        return there and self.goes_on(module)

    def goes_on(self, module: nn.Module) -> bool:
        """Whether branches by the weights of a module go as they went when it was traced."""
        return same_answers(self.branches, partial(weight_at, module))
