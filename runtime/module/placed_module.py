"""The module that a user calls: the model itself, with placed weights and generated code inside.

A placed module is of a class made from the model's own, with the same name, so that it answers to
everything that the model did; only ``forward`` is new. It looks for the program whose input structure
fits the call, has one made if there is none, and runs it.

Several threads may call one module. Calls of known structures take no lock to find their program, and run one
after the other, since a plan has room for one. A new structure is captured under the capture lock, for which
no other call waits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any, Self

import torch
from torch import nn

from graphplan._compat.torch import is_exported, never_compiled
from graphplan.capture.model.model_weights import ModelWeights, weights_now
from graphplan.capture.model.modes import Differentiation
from graphplan.capture.model.shared_attributes import copy_to_run
from graphplan.capture.signature import BoundCall, bind_call, signature_of
from graphplan.capture.thread_patches import CAPTURE_LOCK, outside_inference_mode
from graphplan.errors import CaptureError, InfeasibleError, InputError, PlanError
from graphplan.ir.plan_data import PlanData
from graphplan.report.text import count_text, device_name
from graphplan.runtime.fallback.added_hooks import Hook, hooks_of, set_aside
from graphplan.runtime.fallback.graph_modules import graph_methods
from graphplan.runtime.fallback.hooked_run import entry_of
from graphplan.runtime.fallback.module_by_module import (
    CallForm,
    computes_instead,
    device_of_inputs,
    run_by_modules,
    with_same_buffers,
)
from graphplan.runtime.fallback.one_device import as_outside, is_on_one_device
from graphplan.runtime.fallback.replaced_tensors import sent, tensors_in
from graphplan.runtime.fallback.short_names import made_class, original_class, unplaced
from graphplan.runtime.memory.host_pages import Pages
from graphplan.runtime.memory.shared_memory import join_memory
from graphplan.runtime.module.code_assembly import code_of
from graphplan.runtime.module.dispatch import Served, ServedByModules, serve, share_prefetch_buffers
from graphplan.runtime.module.module_state import Code, ModuleState
from graphplan.runtime.module.placed_parts import as_written, link, runs_as_written
from graphplan.runtime.module.placed_view import PlacedView, ShortNames
from graphplan.runtime.module.program import Program
from graphplan.runtime.module.program_run import run
from graphplan.runtime.module.training.missing_gradients import refuse_transforms, tell_of_gradients
from graphplan.runtime.module.training.optimizer_states import states_follow
from graphplan.runtime.module.training.training_step import require_no_gradients, run_step
from graphplan.runtime.module.transformers_methods import answers
from graphplan.runtime.weights.storage import in_host_memory
from graphplan.runtime.weights.weight_changes import KeptInPlace
from graphplan.warnings import warn

_MOVED = (
    "a call has no room beside the weights where they are, so weights move: to leave room from the start, "
    "give partition max_batch and max_length, or such a call in calls="
)
_EXPORTED = "torch.export does not take a placed model: export what graphplan.unplace returns of it"
logger = logging.getLogger("graphplan")

Record = Callable[[Program, Code], Code]


class PlacedModule(ShortNames, KeptInPlace):
    """What :func:`graphplan.partition` makes of a model's class."""

    _graphplan: ModuleState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """A module of the model's own class: code makes them of a placed one's, for slices, say."""
        self.__class__ = original_class(self)  # type: ignore[assignment]  # what it is to be
        self.__init__(*args, **kwargs)  # type: ignore[misc]  # of that class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; what a ``forward`` that it has been given makes comes back to the inputs."""
        result = super().__call__(*args, **kwargs)
        if "forward" not in self.__dict__ or not self._graphplan.return_outputs:
            return result
        return _at_inputs(self, result, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the placed model on the model's own arguments."""
        return self._graphplan_enter("", self._graphplan.signature, args, kwargs)

    def _graphplan_entry(self) -> tuple[nn.Module, str] | None:
        return None if runs_as_written(self) else (self, "")

    @never_compiled
    def _graphplan_enter(
        self,
        entry: str,
        signature: inspect.Signature | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Record | None = None,
    ) -> Any:
        """Run an entry of the module on its own arguments."""
        if is_exported():
            raise PlanError(_EXPORTED)
        if runs_as_written(self):  # called by its own code, or a hook
            return _at_inputs(self, entry_of(self, entry)(*args, **kwargs), args, kwargs)
        if is_on_one_device():
            with as_outside():
                return self._graphplan_enter(entry, signature, args, kwargs, record)
        if self._graphplan.start is not None or _change(self) is not None:
            _place_now(self, entry, args, kwargs)
        state = self._graphplan
        signature = signature or state.signature
        assert signature is not None
        state.streams.check_files()
        plain = not state.keep_grad and state.step is None
        if plain:
            refuse_transforms()
        untold = plain and torch.is_grad_enabled() and not state.told_of_gradients
        step = differentiated(self, state, (args, kwargs))
        with torch.set_grad_enabled(torch.is_grad_enabled() and state.keep_grad):
            seen = state.turns.changes
            try:
                served = serve(self, state, entry, signature, args, kwargs, step)
            except InfeasibleError:
                served = None
                if not _move_weights(self, state, entry, bind_call(signature, args, kwargs)):
                    raise
            if served is not None:
                with state.turns:  # before it looks at start, which is set before weights move
                    alone = state.turns.changes == seen + 1
                    if state.start is None and (alone or _goes_on(self, state, served)):
                        if untold:
                            plan = state.programs[served.index].plan if isinstance(served, Served) else None
                            tell_of_gradients(self, state, plan, (*args, *kwargs.values()))
                        return _run(self, state, served, record, step)
        return self._graphplan_enter(entry, signature, args, kwargs, record)  # errors keep tensors no longer

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; but without any graph nobody notices other tensors, so values are written."""
        if self._graphplan.untraced is not None:
            if kwargs.pop("assign", len(args) > 2 and args[2]):
                warn("assign=True: hooks run this model where its weights are, so values are written to them")
            args = args[:2]
        return super().load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """As of the model; where no gradients are kept, a later call says so."""
        state = vars(self).get("_graphplan")
        if state is not None:
            state.asked_to_train = mode
        return super().train(mode)

    def extra_repr(self) -> str:
        """As the model's own, and where it is placed."""
        own, state = super().extra_repr(), vars(self).get("_graphplan")
        if state is None:
            return own
        known = state.known_plan or next((program.plan for program in state.programs), None)
        said = "placed at its first call" if known is None else _stages_text(known)
        return f"{own}, {said}" if own else said

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # of torch
        link(self)
        self._graphplan.watch(self)
        _follow(self, self._graphplan)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._graphplan.turns:
            _notice_changes(self)
        return _rebuild, (original_class(self),), self.__dict__


def _at_inputs(module: nn.Module, result: Any, args: Any, kwargs: Any) -> Any:
    given = tensors_in((args, kwargs))
    return sent(result, given[0].device, module) if given else result


def _goes_on(module: PlacedModule, state: ModuleState, served: Served | ServedByModules) -> bool:
    """Whether a call is served as it was before one of another thread."""
    as_before = not isinstance(served, Served) or state.programs[served.index].goes_on(module)
    return as_before and (not state.stale or isinstance(served, ServedByModules))


def _run(
    module: PlacedModule,
    state: ModuleState,
    served: Served | ServedByModules,
    record: Record | None,
    step: Differentiation | None,
) -> Any:
    if isinstance(served, ServedByModules):
        with torch.set_grad_enabled(torch.is_grad_enabled() or step is not None):
            return _run_modulewise(module, served, record)
    state.follow_values()
    program = state.programs[served.index]
    code = code_of(module, state, served.index)
    if not program.accumulates:
        require_no_gradients(module)
    if record is not None:
        code = record(program, code)
    if program.backward is not None:
        return run_step(module, state, program, code, served)
    return run(module, program, code, served)


def differentiated(module: PlacedModule, state: ModuleState, inputs: Any) -> Differentiation | None:
    """What a call differentiates; None for a forward pass alone."""
    if state.step is None or not torch.is_grad_enabled():
        return None
    return state.step.of(module, inputs)


@outside_inference_mode
def _place_now(module: PlacedModule, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Place the module at this call of it, unless another thread has done so meanwhile."""
    while True:
        state = module._graphplan
        with state.turns:  # before the capture lock, for which a call under way may wait
            if module._graphplan is not state:
                continue
            if state.start is None:
                _notice_changes(module)  # what a hook had assigned for the time of its call is gone
            if state.start is not None:
                with CAPTURE_LOCK:
                    _start(module, state, entry, args, kwargs)
            return


def _start(
    module: PlacedModule, state: ModuleState, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert state.start is not None
    added = [] if state.guard is None else state.modulewise.untraced_hooks(state.guard.parts)
    # these hold on to weights, whose memory is wanted again
    state.reader = state.guard = state.compile = state.move = None
    state.codes.clear()
    state.streams.storages.clear()
    state.parts.clear()
    try:
        with set_aside(added):
            started = state.start(module, args, kwargs, entry)
    except (CaptureError, InfeasibleError, InputError) as error:
        if state.untraced is None:
            raise
        _stay_untraced(module, state, entry, args, kwargs, error)
        return
    if "forward" in module.__dict__:  # what the module has been given runs around the graphs
        started.__dict__["forward"] = module.__dict__["forward"]
    for name, value in started.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is started:
            started.__dict__[name] = MethodType(value.__func__, module)
    object.__setattr__(module, "__dict__", started.__dict__)  # at once, for other threads
    begun = module._graphplan
    begun.as_written, begun.asked_to_train = state.as_written, state.asked_to_train
    if state.modulewise.left or state.untraced is not None:  # by nothing that makes these worth another try
        begun.modulewise.forms += [form for form in state.modulewise.forms if not form.hooked]
    link(module)
    _follow(module, begun)


def _stay_untraced(
    module: nn.Module,
    state: ModuleState,
    entry: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: CaptureError | InfeasibleError | InputError,
) -> None:
    """Run calls like this one module by module, as those before it."""
    assert state.untraced is not None
    logger.info("hooks run such inputs too: %s", error)
    state.start, state.untraced = None, replace(state.untraced, tries=state.untraced.tries - 1)
    path, _, method = entry.partition(":")
    signature = signature_of(getattr(unplaced(module).get_submodule(path), method or "forward"))
    note_untraced(module, bind_call(signature, args, kwargs), entry)


def note_untraced(module: nn.Module, call: BoundCall, entry: str) -> None:
    """Know that a call of a module without a graph has none."""
    state: ModuleState = vars(module)["_graphplan"]
    assert state.untraced is not None
    form = state.modulewise.note(entry, call, state.new_reader(module).read(module))
    form.main, form.way = state.untraced.main, state.untraced.way


def _follow(module: nn.Module, state: ModuleState) -> None:
    if state.keep_grad or state.step is not None:
        states_follow(module)


def _change(module: PlacedModule) -> str | None:
    """What is not as the graphs were traced from, if anything."""
    state = module._graphplan
    guard = state.guard
    if guard is None or state.start is not None or guard.same(module):
        return None
    parts, found = guard.parts, guard.difference(module, other_values=state.takes_other_values)
    if guard.parts is not parts:  # no difference, but the modes are theirs
        state.reader = state.new_reader(module)
    return found


@outside_inference_mode
def _move_weights(module: PlacedModule, state: ModuleState, entry: str, call: BoundCall) -> bool:
    """Have the weights moved before the next call, so that a call has room that lacks it.

    Returns whether the call is to be tried again: weights move, or it may do with the least room. After any
    other error, the next call may have them moved.
    """
    if not state.may_move(entry, call):
        return False
    with CAPTURE_LOCK:
        if module._graphplan is not state or not state.may_move(entry, call):  # another thread has been here
            return True
        assert state.reader is not None
        assert state.move is not None
        assert state.guard is not None
        try:
            modes = state.reader.read(module)
            start = state.move(call, entry, modes, state.guard.values, weights_now(module))
        except InfeasibleError as error:
            logger.info("no room wherever the weights are: %s", error)
            state.note_no_room(entry, call)
        else:
            warn(_MOVED)
            state.start, state.move = start, None
    return True


def _notice_changes(module: PlacedModule) -> None:
    """Have the module placed anew where it is not what its graphs were traced from."""
    state, changed = module._graphplan, _change(module)
    if changed is not None:
        if state.reader is not None:
            state.reader.read(module)  # adapters that were put in are an error
        state.begin_again(module, changed)


def _run_modulewise(module: PlacedModule, served: ServedByModules, record: Record | None) -> Any:
    state, call = module._graphplan, served.call
    if record is not None:
        why = state.untraced or "modules run this call one by one"
        raise PlanError(f"there is no graph to profile, {why}")
    keeps_grad, known = state.keep_grad or state.step is not None, served.known
    instead = known.main
    beside: AbstractContextManager[None] = nullcontext()
    if isinstance(known, CallForm):
        instead = instead or computes_instead(PlacedView(module).plan)
        beside = _beside_graphs(module, state, known)
    with as_written(module), beside:
        result = run_by_modules(module, served.entry, call, known, instead, keeps_grad=keeps_grad)
    return sent(result, device_of_inputs(call), module) if state.return_outputs else result


@contextmanager
def _beside_graphs(module: PlacedModule, state: ModuleState, form: CallForm) -> Iterator[None]:
    """A call without a graph, of a module that may have graphs: what it leaves there makes these stale.

    Not where the model adds hooks of its own, as transformers does at the first call that is to return all
    hidden states: graphs go on as they were traced. In a call with the user's hooks, these may have done so.
    """
    hooks = hooks_of(module)
    try:
        with with_same_buffers(module):
            yield
    finally:
        added = frozenset[Hook]() if form.hooked else hooks_of(module) - hooks
        state.modulewise.traced |= added
        if state.guard is not None:
            state.modulewise.left |= not state.guard.same(module)
            changed = _change(module)
            state.stale = changed if changed and not added else state.stale
            state.guard.accept(module)


def _rebuild(original: type[nn.Module]) -> nn.Module:
    return object.__new__(placed_class(original))


def placed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of the placed copies of a model of class ``cls``, under the model's own name."""
    original = getattr(cls, "_graphplan_original", cls)
    return made_class(
        original, PlacedModule, lambda: answers(PlacedModule, original) | graph_methods(original)
    )


def _stages_text(plan: PlanData) -> str:
    keys = dict.fromkeys(stage.device for stage in plan.stages)
    return f"placed: {count_text(len(plan.stages), 'stage')} on {', '.join(map(device_name, keys))}"


def unplace(module: nn.Module) -> nn.Module:
    """The plain model of a placed module, on the CPU, with the weights and attributes that it has now.

    Args:
        module: what :func:`graphplan.partition` returned; it stays as it is. Weights that reside in CPU
            memory are shared with it, and so are their gradients.

    Raises:
        PlanError: it is no placed module.
    """
    if not isinstance(module, PlacedModule):
        raise PlanError(f"{type(module).__name__} is not a placed module")
    plain = unplaced(module, wrapped=True)
    weights = ModelWeights(plain)
    memo = in_host_memory(plain, weights, weights.tensors)
    for parameter in plain.parameters():
        if isinstance(parameter, nn.Parameter) and parameter.grad is not None:
            memo[id(parameter)].grad = parameter.grad.cpu()
    made = copy_to_run(plain, memo)
    if module._graphplan.untraced is not None:  # what has graphs writes to no shared memory
        join_memory(module, made)
    return made


def attach(module: nn.Module, state: ModuleState, memory: Iterable[Pages] = ()) -> None:
    """Give a copy its state, and hold on to the memory of its weights."""
    share_prefetch_buffers(state.programs)
    state.streams.pages.extend(memory)
    link(module)
    module.__dict__["_graphplan"] = state
    state.watch(module)
    _follow(module, state)
    for index in range(len(state.programs)):
        code_of(module, state, index)  # takes the prefetch buffer's memory now, while it is there
