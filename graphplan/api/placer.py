"""Place a model now, at its first forward pass, or replace it later.

::

    partition ── Placer ──> placed module, which keeps another Placer, and Placer.find_room
       │                        │ pickled, or changed after it was traced
       │                        ├── that Placer places it at the next call, with the weights where they are
       └── at the first         │ the weights leave no room for a call
           forward pass         └── find_room plans it, with the weights anywhere; a WeightMove moves them
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphplan.analysis.plan import Plan
from graphplan.api.eager_check import require_equal
from graphplan.capture.changes.kept_state import KeptStateError
from graphplan.capture.eager_run import saved_bytes
from graphplan.capture.model.model_copy import AttributeValues, ModelCopy
from graphplan.capture.model.model_weights import ModelWeights, tensor_bytes
from graphplan.capture.model.modes import Differentiation, Modes
from graphplan.capture.model.shared_attributes import copy_to_run
from graphplan.capture.model_methods import RunAsItIs, UntracedMethodError
from graphplan.capture.signature import BoundCall
from graphplan.capture.value_branches import ValueOf
from graphplan.compiler.code_generation import Planned
from graphplan.compiler.earlier_plans import Commitments
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler, WeightedCall
from graphplan.compiler.progress import enter_stage
from graphplan.devices.max_memory import require_present
from graphplan.devices.topology import CPU, DISK, DeviceKey, Topology
from graphplan.errors import GraphplanError, NoGraphError
from graphplan.integrations.accelerate.fallback_placement import fall_back, in_place_of, later_refused
from graphplan.integrations.transformers.generate_plan import plan_first
from graphplan.ir.plan_data import PlanData
from graphplan.message_text import first_line, readable_bytes
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.fallback.derived_classes import unplaced
from graphplan.runtime.fallback.module_by_module import Untraced, compute_device_of
from graphplan.runtime.memory.allocation import warm_activations
from graphplan.runtime.module.module_state import ModuleState
from graphplan.runtime.module.placed_module import attach, placed_class
from graphplan.runtime.module.program import Program
from graphplan.runtime.weights.storage import (
    move_changed_devices_to_host,
    place_model,
    replace_parameter_data,
    replace_tensors,
)
from graphplan.warnings import warn

_IN_MEMORY = (
    "weights that were on 'disk' have been unpickled and are in memory now, beyond the CPU's budget: "
    "partition the model again, with checkpoint=, to leave them on disk"
)
_UNTRACED = (
    "the training step cannot be traced, so autograd runs the backward pass, as with grad=True: the plan "
    "does not count the activations that autograd saves ({}), gradients and optimizer state, so that "
    "memory may exceed the budgets. {}"
)


@dataclass(frozen=True, slots=True)
class Placer:
    """Places models. Hooks run a model that cannot be traced, unless the placer is strict.

    Attributes:
        topology: the devices.
        options: the compiler's options.
        strict: whether it is an error if a call cannot be traced.
        source: checkpoint to read the weights from, instead of the model.
        check: whether results are compared with those of eager mode.
        warm: whether allocators reserve the planned bytes of activations at once.
        plan: a plan to carry out instead of a search.
        install: puts the placed tensors into a copy of the model, or into the model itself.
        moved_for: bytes of the inputs for which the weights were last moved.
        homes: weight -> device key where it resides already; None before the first plan.
        known_plan: the plan that decided ``homes``.
        hooked_plan: the plan of a model that hooks run, whose memory is left free; None for other models.
        hooks_run_untraced: whether hooks run the calls that have no graph, for which NoGraphError is raised.
    """

    topology: Topology
    options: Options
    strict: bool = False
    source: Checkpoint | None = None
    check: bool = False
    warm: bool = False
    plan: PlanData | None = None
    install: Callable[[nn.Module, Mapping[int, Any]], nn.Module] = copy_to_run
    moved_for: int = 0
    homes: Mapping[str, DeviceKey] | None = None
    known_plan: PlanData | None = None
    hooked_plan: Plan | None = None
    hooks_run_untraced: bool = False

    def __call__(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], entry: str
    ) -> nn.Module:
        """Return the module itself, placed as planned for its present state."""
        require_present(self.topology)
        model = unplaced(module)
        model_copy = ModelCopy(model)
        if self._step is not None and torch.is_grad_enabled():
            model_copy.step = self._step.of(module, (args, kwargs))
        call = model_copy.for_entry(entry).bind(args, kwargs)
        return replace(self, install=replace_parameter_data).place(model, model_copy, call)

    def place(self, model: nn.Module, model_copy: ModelCopy, call: BoundCall) -> nn.Module:
        """Return the placed model for a call.

        If a training step cannot be traced, only its forward pass is, and autograd does the rest.
        """
        if self.options.training is None:
            return self._place_forward(model, model_copy, call)
        try:
            return self._traced(model, self._compiler(model_copy), call)
        except NoGraphError as error:
            if self._must_raise(error):
                raise
            failure = first_line(error)
        nbytes = saved_bytes(model_copy, call.on_cpu())
        size_text = "of unknown size" if nbytes is None else f"about {readable_bytes(nbytes)}"
        warn(_UNTRACED.format(size_text, failure))
        plain = replace(self, options=replace(self.options, training=None, grad=True))
        return plain._place_forward(model, ModelCopy(model), call)

    def _place_forward(self, model: nn.Module, model_copy: ModelCopy, call: BoundCall) -> nn.Module:
        """Return the placed model for a forward pass; its modules run the pass if that cannot be traced."""
        compiler = self._compiler(model_copy)
        try:
            return self._traced(model, compiler, call)
        except NoGraphError as error:
            if self._must_raise(error):
                raise
            failed = error.with_traceback(None)  # its frames hold the caller's tensors
        if self.homes is not None:  # its modules run this call where their weights are
            compiler.place_unplanned_weights()
            return self.attached(model, compiler, [], no_graph=failed)
        return self._hooked(model, model_copy, [call], failed)

    def _traced(self, model: nn.Module, compiler: Compiler, call: BoundCall) -> nn.Module:
        placed = self.attached(model, compiler, plan_first(compiler, call))
        return self._checked(model, placed, [call])

    def _must_raise(self, error: NoGraphError) -> bool:
        """Whether the caller of this placer handles a call without a graph."""
        return self.strict or self.hooks_run_untraced or isinstance(error, RunAsItIs | UntracedMethodError)

    def place_together(
        self, model: nn.Module, model_copy: ModelCopy, find: Callable[[Compiler], Sequence[WeightedCall]]
    ) -> nn.Module:
        """Return the placed model for several calls, which ``find`` reads or rehearses."""
        compiler = self._compiler(model_copy)
        weighted = find(compiler)
        calls = [one.call for one in weighted]
        try:
            placed = self.attached(model, compiler, compiler.plan_and_commit(weighted))
            return self._checked(model, placed, calls)
        except NoGraphError as error:
            if self.strict or isinstance(error, RunAsItIs):
                raise
            failed = error
        return self._hooked(model, model_copy, calls, failed)

    def _checked(self, model: nn.Module, placed: nn.Module, calls: Sequence[BoundCall]) -> nn.Module:
        if self.check:
            for call in calls:
                require_equal(model, placed, call)
        return placed

    def _hooked(
        self, model: nn.Module, model_copy: ModelCopy, calls: Sequence[BoundCall], failed: NoGraphError
    ) -> nn.Module:
        """Return the model run by hooks, with memory for the call with the largest inputs."""
        largest = max(calls, key=lambda call: sum(map(tensor_bytes, call.tensors)))
        # results that differ from eager's, or state that calls keep, rule out later traces too
        retry = None if self.check or isinstance(failed, KeptStateError) else self._placer_with_hooks
        placed = fall_back(
            model, model_copy, largest, self.topology, self.options, self.source, failed, retry
        )
        placed = self._checked(model, placed, calls)
        return placed if self.install is copy_to_run else in_place_of(model, placed)

    def _placer_with_hooks(self, plan: Plan) -> Placer:
        """Return the placer for later calls, with the weights where the plan of the hooks has them."""
        homes = plan.schedule.assignment.weights
        return Placer(
            self.topology,
            self.options,
            homes=homes,
            known_plan=plan,
            hooked_plan=plan,
            hooks_run_untraced=True,
        )

    def _compiler(self, model_copy: ModelCopy) -> Compiler:
        mappable = frozenset[str]() if self.source is None else self.source.mappable()
        assignment = None if self.known_plan is None else self.known_plan.schedule.assignment
        committed = Commitments(None if self.homes is None else dict(self.homes), assignment)
        if self.hooked_plan is not None:
            committed.plans.append(self.hooked_plan)
        return Compiler(
            model_copy,
            self.topology,
            self.options,
            committed=committed,
            mappable=mappable,
            given_plan=self.plan,
        )

    @property
    def _step(self) -> Differentiation | None:
        training = self.options.training
        return None if training is None else training.differentiation

    @property
    def _may_move(self) -> bool:
        """Whether weights may move later: no plan of the caller, hooks, disk or autograd fixes them."""
        fixed = self.plan is not None or self.hooked_plan is not None or DISK in self.topology
        return not (fixed or self.options.grad or self.options.training is not None)

    def attached(
        self,
        model: nn.Module,
        compiler: Compiler,
        planned: Sequence[Planned],
        no_graph: NoGraphError | None = None,
    ) -> nn.Module:
        """Return a placed copy of ``model``, or itself, with the programs of committed plans.

        ``no_graph`` is the error of a call that has no program.
        """
        model_copy, owned = compiler.model_copy, self.homes is not None
        if self.source is None and DISK in (self.homes or {}).values():
            warn(_IN_MEMORY)
        programs = [compiler.lower(one) for one in planned]
        enter_stage("place weights")
        layout = compiler.committed.layout(self.topology)
        if self.install is not copy_to_run and owned:
            move_changed_devices_to_host(model, layout, self.install)
            tensors = model_copy.weights.tensors  # the old tensors hold memory
            tensors.update(ModelWeights(model).tensors)
        placed, memory = place_model(
            model, model_copy.weights, layout, placed_class, self.source, owned=owned, install=self.install
        )
        plan = planned[0].plan if planned else self.known_plan
        state = self._new_state(compiler, programs, plan)
        if isinstance(no_graph, KeptStateError):
            state.untraced = Untraced(str(no_graph), None if plan is None else compute_device_of(plan))
        attach(placed, state, memory)
        if self.install is not replace_tensors and state.guard is not None:
            state.values = state.guard.values  # the graphs' constants have these values
        if self.warm:
            warm_activations(program.plan for program in programs)
        return placed

    def _new_state(self, compiler: Compiler, programs: list[Program], plan: PlanData | None) -> ModuleState:
        """Return the state of a module with these programs, whose weights are placed by a plan."""
        next_placer = Placer(
            self.topology,
            self.options,
            self.strict,
            homes=compiler.homes,
            known_plan=plan,
            hooked_plan=self.hooked_plan,
        )
        return ModuleState(
            programs,
            compiler.compile_new_structure,
            compiler.model_copy.signature,
            next_placer,
            keep_grad=self.options.grad,
            return_outputs=self.options.return_outputs,
            device_types=compiler.model_copy.device_types,
            refused=None if self.strict else later_refused,
            step=self._step,
            move=partial(self.find_room, compiler) if self._may_move else None,
            moved_for=self.moved_for,
        )

    def find_room(
        self,
        known: Compiler,
        call: BoundCall,
        modes: Modes,
        values: AttributeValues,
        current: ValueOf,
    ) -> WeightMove:
        """Plan a call, or larger ones, with the weights on any device; nothing is moved yet.

        ``known`` is the compiler that has the traces; ``values`` and ``current`` are as in
        :meth:`Compiler.compile_new_structure`.

        Raises:
            InfeasibleError: no placement of the weights has room for the call.
        """
        known.model_copy.enter(modes, values, current)
        compiler = known.without_commitments()
        planned = compiler.plan(call, compiler.aheads(call), caller_retries=True)
        compiler.commit(planned)
        placer = Placer(
            self.topology,
            self.options,
            self.strict,
            warm=self.warm,
            install=replace_tensors,
            moved_for=sum(map(tensor_bytes, call.tensors)),
            homes=compiler.homes,
        )
        return WeightMove(placer, compiler, planned)


@dataclass(frozen=True, slots=True)
class WeightMove:
    """Moves the weights of a placed module at its next call, as ``planned`` says, which refers to inputs."""

    placer: Placer
    compiler: Compiler
    planned: Planned

    @property
    def known_plan(self) -> Plan:
        """The plan by which the weights are placed."""
        return self.planned.plan

    @property
    def strict(self) -> bool:
        """Whether it is an error if a call cannot be traced."""
        return self.placer.strict

    def __call__(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], entry: str
    ) -> nn.Module:
        """Return the module itself, with its weights moved."""
        require_present(self.placer.topology)
        model, model_copy = unplaced(module), self.compiler.model_copy
        with suppress(TypeError, GraphplanError):  # another thread's call, which does not fit
            _offload_caches(self.planned, model_copy.for_entry(entry).bind(args, kwargs))
        placed = self.placer.attached(model, self.compiler, [self.planned])
        model_copy.weights.tensors.update(ModelWeights(placed).tensors)
        return placed


def _offload_caches(planned: Planned, call: BoundCall) -> None:
    """Move tensors of the caller's caches to the CPU if the plan has them on another device.

    They are replaced at the end of the call; until then they would take memory that the plan uses otherwise.
    """
    if planned.capture.signature.mismatch(call) is not None:  # another thread's call
        return
    homes, topology = planned.plan.schedule.assignment.weights, planned.plan.topology
    for name, leaf in planned.capture.states.items():
        tensor = call.leaves[leaf]
        if tensor.device.type != CPU and tensor.device != topology[homes[name]].torch_device:
            with suppress(RuntimeError):  # not possible if a view of it exists
                torch.utils.swap_tensors(tensor, tensor.to(CPU))
