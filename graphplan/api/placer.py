"""How a model comes to be placed: now, at its first forward pass, or again.

::

    partition ── Placer ──> placed module, which keeps another Placer, and Placer.find_room
       │                        │ pickled, or changed after it was traced
       │                        ├── that Placer at the next forward pass, with the weights where they are
       └── at the first         │ a call has no room beside the weights
           forward pass         └── find_room plans it, wherever weights are; its Placer does that
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
from graphplan.capture.changes.assigned_state import KeptStateError
from graphplan.capture.eager_run import saved_bytes
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import ModelWeights, tensor_bytes
from graphplan.capture.model.modes import Differentiation, Modes
from graphplan.capture.model.shared_attributes import copy_to_run
from graphplan.capture.model_methods import RunAsItIs, UntracedMethodError
from graphplan.capture.signature import BoundCall
from graphplan.capture.value_branches import ValueOf
from graphplan.compiler.code_generation import Planned
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler, EntryCall
from graphplan.compiler.progress import enter_stage
from graphplan.devices.max_memory import require_present
from graphplan.devices.topology import CPU, DISK, DeviceKey, Topology
from graphplan.errors import GraphplanError, NoGraphError
from graphplan.integrations.accelerate.fallback_placement import fall_back, in_place_of, later_refused
from graphplan.integrations.transformers.generate_plan import plan_first
from graphplan.ir.plan_data import PlanData
from graphplan.message_text import first_line, readable_bytes
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.fallback.module_by_module import Untraced, computes_instead
from graphplan.runtime.fallback.short_names import unplaced
from graphplan.runtime.memory.allocation import warm_activations
from graphplan.runtime.module.module_state import ModuleState
from graphplan.runtime.module.placed_module import attach, placed_class
from graphplan.runtime.weights.storage import bring_back, place_model, refilled, taken_over
from graphplan.warnings import warn

_IN_MEMORY = (
    "weights that were on 'disk' have been unpickled and are in memory now, beyond the CPU's budget: "
    "partition the model again, with checkpoint=, to leave them on disk"
)


_UNTRACED = (
    "the training step has no graph, so autograd runs the backward pass, as with grad=True: what it saves "
    "({}), gradients and the optimizer's state are not in the plan, and may pass the budgets. {}"
)


@dataclass(frozen=True, slots=True)
class Placer:
    """Places models; :class:`NoGraphError` is left to hooks unless it is strict.

    Attributes:
        topology: the devices.
        options: of the compiler.
        strict: whether what cannot be captured is an error.
        source: where weights are read from instead of the model.
        check: whether results are compared with eager's.
        plan: to carry out, in place of a search.
        warm: whether allocators reserve the planned bytes of activations now.
        in_place: whether the modules of the model become those of the placed one.
        moved_for: bytes of the inputs for which the weights were moved last.
        homes: where weights are already; None before the first plan.
        known_plan: the plan that put them there.
        beside: the plan by which hooks run calls without a graph, if they do: their room stays.
        retries: whether what has no graph is left to these hooks.
        found: a plan of :meth:`find_room`, and its compiler: a call moves the weights to where it has them.
    """

    topology: Topology
    options: Options
    strict: bool = False
    source: Checkpoint | None = None
    check: bool = False
    warm: bool = False
    plan: PlanData | None = None
    in_place: bool = False
    moved_for: int = 0
    homes: Mapping[str, DeviceKey] | None = None
    known_plan: PlanData | None = None
    beside: Plan | None = None
    retries: bool = False
    found: tuple[Compiler, Planned] | None = None

    def __call__(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], entry: str
    ) -> nn.Module:
        """Place a module as it is now, at a call of it; or move its weights, whatever call comes next."""
        require_present(self.topology)
        model = unplaced(module)
        if self.found is not None:
            mover, planned = self.found  # whose inputs must not stay with the module
            with suppress(TypeError, GraphplanError):  # the call is of another thread, and fits nothing
                _let_go(planned, mover.model_copy.part(entry).bind(args, kwargs))
            placed = replace(self, found=None).attached(model, mover, [planned], refilled)
            mover.model_copy.weights.tensors.update(ModelWeights(placed).tensors)
            return placed
        model_copy = ModelCopy(model)
        if self._step is not None and torch.is_grad_enabled():
            model_copy.step = self._step.of(module, (args, kwargs))
        call = model_copy.part(entry).bind(args, kwargs)
        return replace(self, in_place=True).place(model, model_copy, call, entry)

    def place(self, model: nn.Module, model_copy: ModelCopy, call: BoundCall, entry: str = "") -> nn.Module:
        """A placed copy of ``model``; ``entry`` is what is called, if not the model itself."""
        compiler, calls = self._compiler(model_copy), [EntryCall(call, entry)]
        try:
            placed = self.attached(model, compiler, plan_first(compiler, call, entry))
            return self._checked(model, placed, calls)
        except NoGraphError as error:
            own_code = isinstance(error, RunAsItIs | UntracedMethodError)
            if self.strict or own_code or self.retries:
                raise
            failed = error.with_traceback(None)  # its frames hold the caller's tensors
        if self.options.training is not None:
            return self._untraced(model, model_copy, call, failed, entry)
        if self.homes is not None:  # its modules run this call where their weights are
            compiler.settle()
            return self.attached(model, compiler, [], without=failed)
        return self._hooked(model, model_copy, calls, failed)

    def _untraced(
        self, model: nn.Module, model_copy: ModelCopy, call: BoundCall, failed: NoGraphError, entry: str
    ) -> nn.Module:
        """A placed copy that trains through autograd alone, since its step cannot be traced."""
        found = saved_bytes(model_copy, call.on_cpu())
        much = "of a size that is not known" if found is None else f"about {readable_bytes(found)}"
        warn(_UNTRACED.format(much, first_line(failed)))
        plain = replace(self, options=replace(self.options, training=None, grad=True))
        return plain.place(model, ModelCopy(model), call, entry)

    def place_together(
        self, model: nn.Module, model_copy: ModelCopy, find: Callable[[Compiler], Sequence[EntryCall]]
    ) -> nn.Module:
        """A placed copy of ``model``, for several calls, which may be found by rehearsing code."""
        compiler = self._compiler(model_copy)
        calls = find(compiler)
        try:
            placed = self.attached(model, compiler, compiler.plan_and_commit(calls))
            return self._checked(model, placed, calls)
        except NoGraphError as error:
            if self.strict or isinstance(error, RunAsItIs):
                raise
            failed = error
        return self._hooked(model, model_copy, calls, failed)

    def _checked(self, model: nn.Module, placed: nn.Module, calls: Sequence[EntryCall]) -> nn.Module:
        for one in calls if self.check else ():
            require_equal(model, placed, one.call, one.entry)
        return placed

    def _hooked(
        self, model: nn.Module, model_copy: ModelCopy, calls: Sequence[EntryCall], failed: NoGraphError
    ) -> nn.Module:
        """Run by hooks, which keep room for the call with the largest inputs."""
        largest = max(calls, key=lambda one: sum(map(tensor_bytes, one.call.tensors)))
        # what differs from eager's results, or by what calls leave, is not to be traced later either
        retry = None if self.check or isinstance(failed, KeptStateError) else self._beside_hooks
        placed = fall_back(
            model, model_copy, largest, self.topology, self.options, self.source, failed, retry
        )
        placed = self._checked(model, placed, calls)
        return in_place_of(model, placed) if self.in_place else placed

    def _beside_hooks(self, plan: Plan) -> Placer:
        """What places a model at a later call, with the weights where a plan of modules has them."""
        homes = plan.schedule.assignment.weights
        return Placer(self.topology, self.options, homes=homes, known_plan=plan, beside=plan, retries=True)

    def _compiler(self, model_copy: ModelCopy) -> Compiler:
        mappable = frozenset[str]() if self.source is None else self.source.mappable()
        known = None if self.known_plan is None else self.known_plan.schedule.assignment
        homes = None if self.homes is None else dict(self.homes)
        made = Compiler(model_copy, self.topology, self.options, homes, mappable, known, self.plan)
        if self.beside is not None:
            made.keep_room_for(self.beside)
        return made

    @property
    def _step(self) -> Differentiation | None:
        training = self.options.training
        return None if training is None else training.differentiation

    @property
    def _may_move(self) -> bool:
        """Whether weights may move later: nobody has said where, or holds on to them or to their file."""
        settled = self.plan is not None or self.beside is not None or DISK in self.topology
        return not (settled or self.options.grad or self.options.training is not None)

    def attached(
        self,
        model: nn.Module,
        compiler: Compiler,
        planned: Sequence[Planned],
        in_place: Callable[[nn.Module, Mapping[int, Any]], nn.Module] = taken_over,
        without: NoGraphError | None = None,
    ) -> nn.Module:
        """A placed copy of ``model``, or itself, with the programs of what was planned and committed.

        ``in_place`` is how the model itself takes the placed tensors, where it does; ``without`` is why a
        call has no program.
        """
        model_copy, owned = compiler.model_copy, self.homes is not None
        if self.source is None and DISK in (self.homes or {}).values():
            warn(_IN_MEMORY)
        programs = [compiler.lower(one) for one in planned]
        enter_stage("place weights")
        layout = compiler.layout()
        if self.in_place and owned:
            bring_back(model, layout, in_place)
            known = model_copy.weights.tensors  # what was there holds on to memory
            known.update(ModelWeights(model).tensors)
        made, memory = place_model(
            model,
            model_copy.weights,
            layout,
            placed_class,
            self.source,
            owned=owned,
            become=in_place if self.in_place else copy_to_run,
        )
        first = planned[0].plan if planned else self.known_plan
        instead = None if first is None else computes_instead(first)
        again = Placer(
            self.topology,
            self.options,
            self.strict,
            homes=compiler.homes,
            known_plan=first,
            beside=self.beside,
        )
        state = ModuleState(
            programs,
            compiler.further,
            model_copy.signature,
            again,
            keep_grad=self.options.grad,
            return_outputs=self.options.return_outputs,
            device_types=model_copy.device_types,
            untraced=Untraced(str(without), instead) if isinstance(without, KeptStateError) else None,
            refused=None if self.strict else later_refused,
            step=self._step,
            move=partial(self.find_room, compiler) if self._may_move else None,
            moved_for=self.moved_for,
        )
        attach(made, state, memory)
        if in_place is taken_over and state.guard is not None:  # constants are new, and of these values
            state.values = state.guard.values
        if self.warm:
            warm_activations(program.plan for program in programs)
        return made

    def find_room(
        self,
        known: Compiler,
        call: BoundCall,
        entry: str,
        modes: Modes,
        values: Mapping[str, torch.Tensor],
        current: ValueOf,
    ) -> Placer:
        """A plan of a call, and of larger ones, with the weights where there is room; nothing is moved.

        ``known`` knows what has been traced, the last two are as in :meth:`Compiler.further`.

        Raises:
            InfeasibleError: there is none.
        """
        known.model_copy.enter(modes, values, current)
        mover = known.anew()
        planned = mover.plan(call, entry, mover.aheads(call, entry), retries=True)
        mover.commit(planned)
        return Placer(
            self.topology,
            self.options,
            self.strict,
            warm=self.warm,
            in_place=True,
            moved_for=sum(map(tensor_bytes, call.tensors)),
            homes=mover.homes,
            known_plan=planned.plan,
            found=(mover, planned),
        )


def _let_go(planned: Planned, call: BoundCall) -> None:
    """Take tensors of the caller's caches that a plan has elsewhere off their accelerators, to CPU memory.

    They are replaced at the end of the call; until then they would take room that the plan gives to others.
    """
    if planned.capture.signature.mismatch(call) is not None:  # of another thread
        return
    homes, topology = planned.plan.schedule.assignment.weights, planned.plan.topology
    for name, leaf in planned.capture.states.items():
        tensor = call.leaves[leaf]
        if tensor.device.type != CPU and tensor.device != topology[homes[name]].torch_device:
            with suppress(RuntimeError):  # a view of it is held elsewhere
                torch.utils.swap_tensors(tensor, tensor.to(CPU))
