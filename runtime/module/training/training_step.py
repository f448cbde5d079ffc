"""A training step of a placed module: the forward pass now, the backward pass when autograd asks for it.

Autograd sees one function between the inputs and the results. Its backward adds the parameters' gradients to
their ``grad``, on the devices of the plan, so that the user's training loop needs no change::

    loss = placed(**batch).loss      forward: computes results and saved tensors, in the order of the plan
    loss.backward()                  backward: reads and frees saved tensors, and adds up gradients
    optimizer.step()                 on the parameters and gradients, each on its own device
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from graphplan._compat.torch import accumulates, in_forward_mode, in_replica, in_transform, storage_of
from graphplan.capture.model.model_weights import named_tensors
from graphplan.errors import PlanError
from graphplan.runtime.module.dispatch import Served
from graphplan.runtime.module.module_state import Code, ModuleState
from graphplan.runtime.module.program import Backward, Program
from graphplan.runtime.module.program_run import explain_moved_weights, take_inputs, without_autocast
from graphplan.runtime.module.training.undefined_gradients import reduced_backward

_version_of = attrgetter("_version")  # counts the writes to a tensor
_TWICE = (
    "Trying to backward through a placed model a second time: the activations that its forward pass saved "
    "have been freed. Call the model again (retain_graph=True does not keep them)"
)
_CHANGED = (
    "{} has been changed by an in-place operation between the forward and the backward pass, which reads "
    "it: call backward() before {}"
)
_REPLACED = (
    "{!r} has been replaced since the forward pass, and the backward pass reads it: call backward() before "
    "another takes its place. For torch.func, place the model with grad=True instead of train=True"
)
_OTHER = (
    "{!r} has had other values in a later forward pass, and the backward pass of this one reads it: call "
    "backward() before the next forward pass"
)
_SECOND = (
    "create_graph=True: a planned training step has no second derivatives, which for example a gradient "
    "penalty needs. Place the model with grad=True instead of train=True"
)
_TRANSFORMED = (
    "a planned training step supports only backward(): for transforms of torch.func, and forward-mode "
    "gradients, place the model with grad=True instead of train=True"
)
_REPLICATED = (
    "DistributedDataParallel sums gradients over processes by hooks that autograd runs, and a planned "
    "training step has its own backward pass: place the model with grad=True instead of train=True, or leave "
    "the wrapper out and sum the parameters' gradients after backward()"
)
_HAS_GRADIENT = (
    "{!r} has a gradient of {} bytes on {} when a forward pass begins, for which accumulate_gradients=False "
    "leaves no room: call optimizer.zero_grad() after each optimizer.step(), without set_to_none=False, "
    "before the next forward pass, or place the model without accumulate_gradients=False"
)
_DEFAULT = "'loss' or, if there is none, from all results and stored scalars"
_NOT_PLANNED = (
    "a gradient has reached the result {!r}, but the planned step starts only from {}: give "
    "partition train_outputs= with all results from which the loss is computed, or detach this one"
)


class _ReadTensors:
    """The tensors that a backward pass reads, with their versions after the forward pass."""

    def __init__(self, module: nn.Module, program: Program, backward: Backward, saved: Sequence[Any]) -> None:
        named, held = named_tensors(module), program.constant_attributes or {}
        read = ((name, named[name]) for name in backward.weights if name in named)
        self.module = module
        self.weights = [(name, tensor, storage_of(tensor), tensor._version) for name, tensor in read]
        constants = ((held[n], program.constants[n]) for n in backward.attribute_constants if held)
        self.constants = [(attribute, tensor, tensor._version) for attribute, tensor in constants]
        # inference tensors have no version counter
        self.saved = [v for v in saved if isinstance(v, torch.Tensor) and not v.is_inference()]
        self.saved_versions = list(map(_version_of, self.saved))

    def require_unchanged(self) -> None:
        """Raise RuntimeError if one of them was replaced or written to since."""
        named = named_tensors(self.module)
        for name, tensor, storage, version in self.weights:
            if named.get(name) is not tensor or storage_of(tensor) != storage:
                raise RuntimeError(_REPLACED.format(name))
            if tensor._version != version:
                raise RuntimeError(_CHANGED.format(repr(name), "the optimizer steps"))
        for attribute, tensor, version in self.constants:
            if tensor._version != version:
                raise RuntimeError(_OTHER.format(attribute))
        if list(map(_version_of, self.saved)) != self.saved_versions:
            raise RuntimeError(_CHANGED.format("An input or a result", "you write to it, or pass a copy"))


@dataclass(slots=True)
class _StepCall:
    """One forward pass, and the data for its backward pass."""

    module: nn.Module
    state: ModuleState
    program: Program
    planned: Backward
    code: Code
    tensors: list[Any]
    written_back: list[tuple[torch.Tensor, torch.Tensor]]
    homes: Sequence[torch.device]  # of the inputs that require gradients
    shapes: Sequence[Any] = ()  # of tensor inputs; the values of others
    results: Sequence[Any] = ()
    saved: list[Any] | None = None
    read: _ReadTensors | None = None

    def forward(self) -> Sequence[Any]:
        """Run the forward pass and return the flat results."""
        tensors, self.tensors = self.tensors, []
        self.shapes = [getattr(value, "shape", value) for value in tensors]
        with without_autocast(self.program):
            try:
                self.results, saved = self.code.bound(tensors)
            except RuntimeError as error:
                explain_moved_weights(self.module, self.program.plan, error)
                raise
        self.saved = list(saved)
        for original, changed in self.written_back:
            original.copy_(changed)
        self.read = _ReadTensors(self.module, self.program, self.planned, self.saved)
        return self.results

    def backward(self, tangents: Sequence[torch.Tensor | None], *, accumulate: bool) -> Sequence[Any]:
        """Return the gradients of inputs; ``tangents`` are those of the results that the pass starts from.

        If ``accumulate``, add those of parameters to ``grad``; false if only gradients of inputs are wanted.
        """
        saved, self.saved = self.saved, None
        read, self.read = self.read, None
        if saved is None or read is None:
            raise RuntimeError(_TWICE)
        read.require_unchanged()
        del read  # the backward pass frees what it has read
        host, run = self.program.host, self.code.backward
        assert run is not None
        _, *names = (node.name for node in self.planned.graph.find_nodes(op="placeholder"))
        absent = frozenset(n for n, tangent in zip(names, tangents, strict=True) if tangent is None)
        if absent or not accumulate:
            run = reduced_backward(
                self.module, self.program, self.code, absent, self.shapes, accumulate=accumulate
            )
        on_host = [t if t is None or t.device == host else t.to(host) for t in tangents]
        with self.state.run_lock, torch.no_grad(), without_autocast(self.program):
            gradients = run([saved, *on_host])
        return [
            None if gradient is None else gradient.to(home).resolve_conj()
            for gradient, home in zip(gradients, self.homes, strict=True)
        ]


class _StepFunction(torch.autograd.Function):
    """The autograd function of a call."""

    @staticmethod
    def forward(ctx: Any, call: _StepCall, anchor: torch.Tensor, *_inputs: torch.Tensor) -> Any:
        """Return the results that are tensors; mark those that are not differentiable in eager mode."""
        results, backward = call.forward(), call.planned
        ctx.call, ctx.anchor = call, get_gradient_edge(anchor).node
        ctx.set_materialize_grads(False)
        tensors, positions = list[torch.Tensor](), list[int]()
        for position, result in enumerate(results):
            if isinstance(result, torch.Tensor):  # of a tensor returned twice, torch sees the last place only
                is_repeated = any(result is tensor for tensor in tensors)
                tensors.append(result.detach() if is_repeated else result)
                positions.append(position)
        active = {*backward.differentiated, *backward.others}
        passive = [tensor for tensor, p in zip(tensors, positions, strict=True) if p not in active]
        ctx.mark_non_differentiable(*passive)
        ctx.starts = [index for index, p in enumerate(positions) if p in backward.differentiated]
        ctx.unplanned = {
            index: backward.others[p] for index, p in enumerate(positions) if p in backward.others
        }
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        """Return the gradients of inputs; add those of parameters to their ``grad``."""
        if torch.is_grad_enabled():  # only with create_graph=True
            raise RuntimeError(_SECOND)
        for index, name in ctx.unplanned.items():
            if tangents[index] is not None:
                raise RuntimeError(_NOT_PLANNED.format(name, ctx.call.program.modes.step.outputs or _DEFAULT))
        starts = [tangents[index] for index in ctx.starts]
        return None, None, *ctx.call.backward(starts, accumulate=accumulates(ctx.anchor))


def starts_of(results: Iterable[Any]) -> list[torch.Tensor]:
    """Return the results of a step from which its backward pass was planned to start."""
    tensors = [leaf for leaf in results if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    # an input that is returned unchanged has another grad_fn, without ``starts``
    starts = [getattr(leaf.grad_fn, "starts", ()) for leaf in tensors]
    return [leaf for leaf, indices in zip(tensors, starts, strict=True) if leaf.output_nr in indices]


def require_no_gradients(module: nn.Module) -> None:
    """Raise PlanError if a parameter has a gradient."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise PlanError(_HAS_GRADIENT.format(name, parameter.grad.nbytes, parameter.grad.device))


def run_step(module: nn.Module, state: ModuleState, program: Program, code: Code, served: Served) -> Any:
    """Return the model's result, from which a backward pass may start.

    Raises:
        PlanError: a transform, or forward mode, wants other gradients, or a wrapper sums them by hooks.
        InputError: as :func:`graphplan.runtime.module.program_run.run`.
    """
    assert program.backward is not None
    arguments = (leaf for leaf in served.leaves if isinstance(leaf, torch.Tensor))
    if in_transform() or in_forward_mode((*arguments, *named_tensors(module).values())):
        raise PlanError(_TRANSFORMED)
    if in_replica():
        raise PlanError(_REPLICATED)
    tensors, copies = take_inputs(program, served)
    code.release_stored()
    inputs = [served.leaves[index] for index in program.backward.inputs]
    homes = [leaf.device for leaf in inputs]
    call = _StepCall(
        module,
        state,
        program,
        planned=program.backward,
        code=code,
        tensors=tensors,
        written_back=copies,
        homes=homes,
    )
    del tensors
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        outputs = iter(_StepFunction.apply(call, anchor, *inputs))  # type: ignore[no-untyped-call]  # of torch
    results = [next(outputs) if isinstance(r, torch.Tensor) else r for r in call.results]
    call.results = ()
    return code.rebuild(results, served.changed_arguments)
