"""The module that a user calls: the model itself, with placed weights and generated code inside.

A placed module is of a class made from the model's own, with the same name, so that it answers to
everything that the model did; only ``forward`` is new. It looks for the program whose input structure
fits the call, has one made if there is none, and runs it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphplan.errors import PlanError
from graphplan.placement import Plan
from graphplan.signature import BoundCall, InputSignature, bind_call

__all__ = ["PlacedModule", "Program", "attach", "placed_class"]


@dataclass(frozen=True, slots=True)
class Program:
    """One call structure, planned and lowered.

    Attributes:
        plan: what the code carries out.
        signature: which calls it serves.
        graph: from the call's tensors to a flat tuple of results.
        constants: attribute name -> tensor that the code lifted out of the model's.
        branches: attribute name -> graph of a control-flow operation.
        inputs: for each placeholder, the index of its leaf.
        on_host: those of the placeholders that are read where the caller's tensors were planned
            to be, without a move.
        changed: those of the placeholders that the call writes to.
        host: the device where the caller's tensors were planned to be.
        out_spec: the structure of the result.
        training: whether it was traced in training mode.
        prepare: turns the caller's arguments into the traced ones, or None.
    """

    plan: Plan
    signature: InputSignature
    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]
    branches: Mapping[str, fx.GraphModule]
    inputs: tuple[int, ...]
    on_host: frozenset[int]
    changed: frozenset[int]
    host: torch.device
    out_spec: pytree.TreeSpec
    training: bool
    prepare: Callable[[BoundCall], BoundCall] | None = None


Compile = Callable[[BoundCall, bool], Program]


@dataclass
class _State:
    """What a placed module keeps beside the model's own attributes.

    ``graph_modules`` are bound to one module's weights, so a copy of the module makes its own.
    ``start`` makes the placed module at the first call, where there were no inputs to plan with.
    """

    programs: list[Program]
    compile: Compile | None
    signature: inspect.Signature
    keep_grad: bool = False
    return_outputs: bool = True
    start: Callable[[BoundCall], nn.Module] | None = None
    graph_modules: dict[int, fx.GraphModule] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return replace(self, programs=list(self.programs), graph_modules={})


class PlacedModule(nn.Module):
    """What :func:`graphplan.partition` makes of a model's class."""

    _graphplan: _State

    @property
    def plan(self) -> Plan:
        """The plan of the first call structure.

        Raises:
            PlanError: nothing has been captured yet.
        """
        return self._first().plan

    def _first(self) -> Program:
        if not self._graphplan.programs:
            raise PlanError("nothing is planned yet: call the module once, or give partition example inputs")
        return self._graphplan.programs[0]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of every call structure so far."""
        return tuple(program.plan for program in self._graphplan.programs)

    @property
    def graph_modules(self) -> tuple[fx.GraphModule, ...]:
        """The generated code of every call structure so far, over this module's own weights."""
        return tuple(_graph_module(self, index) for index in range(len(self._graphplan.programs)))

    @property
    def graph_module(self) -> fx.GraphModule:
        """The generated code of the first call structure; PlanError as :attr:`plan`."""
        self._first()
        return _graph_module(self, 0)

    @property
    def code(self) -> str:
        """The generated Python of the first call structure."""
        return str(self.graph_module.code)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the placed model on the model's own arguments."""
        state = self._graphplan
        call = bind_call(state.signature, args, kwargs)
        if state.start is not None:
            started = state.start(call)
            self.__dict__.clear()
            self.__dict__.update(started.__dict__)
            state = self._graphplan
        index = self._find(call)
        with torch.set_grad_enabled(torch.is_grad_enabled() and state.keep_grad):
            return _run(state, state.programs[index], _graph_module(self, index), call)

    def _find(self, call: BoundCall) -> int:
        state = self._graphplan
        for index, program in enumerate(state.programs):
            if program.training == self.training and program.signature.mismatch(call) is None:
                return index
        assert state.compile is not None
        state.programs.append(state.compile(call, self.training))
        return len(state.programs) - 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        original = type(self).__mro__[2]
        return _rebuild, (original,), self.__dict__


def _rebuild(original: type[nn.Module]) -> nn.Module:
    cls = placed_class(original)
    return cls.__new__(cls)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def placed_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class of the placed copies of a model, under the model's own name."""
    if original not in _classes:
        names = ("__module__", "__qualname__", "__doc__")
        body = {name: getattr(original, name) for name in names}
        _classes[original] = type(original.__name__, (PlacedModule, original), body)
    return _classes[original]


def attach(
    module: nn.Module,
    programs: list[Program],
    compile: Compile,
    signature: inspect.Signature,
    *,
    keep_grad: bool,
    return_outputs: bool,
) -> None:
    """Give a placed copy its programs, and the way to make more."""
    module.__dict__["_graphplan"] = _State(programs, compile, signature, keep_grad, return_outputs)


def attach_start(
    module: nn.Module, start: Callable[[BoundCall], nn.Module], signature: inspect.Signature
) -> None:
    """Give a copy that is not placed yet the way to be, at its first call."""
    module.__dict__["_graphplan"] = _State([], None, signature, start=start)


def _graph_module(module: PlacedModule, index: int) -> fx.GraphModule:
    """The program's code over the module's weights: one namespace, seen through two objects."""
    state = module._graphplan
    found = state.graph_modules.get(index)
    if found is None:
        program = state.programs[index]
        found = fx.GraphModule(nn.Module(), fx.Graph(), class_name=type(module).__name__)
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            found.__dict__[name] = module.__dict__[name]
        for name, tensor in program.constants.items():
            found.__dict__[name] = tensor
        for name, branch in program.branches.items():
            found.__dict__[name] = branch
        found.graph = copy.deepcopy(program.graph)
        found.training = module.training
        state.graph_modules[index] = found
    return found


def _run(state: _State, program: Program, code: fx.GraphModule, call: BoundCall) -> Any:
    traced = call if program.prepare is None else program.prepare(call)
    tensors = [traced.leaves[index] for index in program.inputs]
    back: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position in program.on_host:
        tensor = tensors[position]
        if isinstance(tensor, torch.Tensor) and tensor.device != program.host:
            tensors[position] = tensor.to(program.host)
            if position in program.changed:
                back.append((tensor, tensors[position]))
    results = list(code(*tensors))
    for original, changed in back:
        original.copy_(changed)
    if state.return_outputs and call.device is not None and call.device != program.host:
        results = [r.to(call.device) if isinstance(r, torch.Tensor) else r for r in results]
    return pytree.tree_unflatten(results, program.out_spec)
