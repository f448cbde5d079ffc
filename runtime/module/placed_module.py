"""The module that a user calls: the model itself, with placed weights and generated code inside.

The class of a placed module derives from the model's class and has its name, so that all attributes of the
model work. Only ``forward`` is replaced: it finds the program for the structure of the inputs, has one
compiled if there is none, and runs it.

Several threads may call one module. Calls of known structures take no lock to find their program, and run one
after the other, since a plan has memory for one. A new structure is captured under the capture lock, for
which calls of known structures do not wait.
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
from graphplan.capture.changes.attribute_data import plain_tensors
from graphplan.capture.model.model_weights import ModelWeights, weights_now
from graphplan.capture.model.modes import Differentiation
from graphplan.capture.model.shared_attributes import copy_to_run
from graphplan.capture.signature import BoundCall, bind_call, signature_of
from graphplan.capture.thread_patches import CAPTURE_LOCK, outside_inference_mode
from graphplan.errors import CaptureError, InfeasibleError, InputError, PlanError
from graphplan.ir.plan_data import PlanData
from graphplan.report.text import count_text, device_name
from graphplan.runtime.fallback.added_hooks import Hook, hooks_of, without_hooks
from graphplan.runtime.fallback.derived_classes import derive_class, original_class, unplaced
from graphplan.runtime.fallback.graph_modules import graph_methods
from graphplan.runtime.fallback.hooked_run import entry_of
from graphplan.runtime.fallback.module_by_module import (
    ModularCall,
    compute_device_of,
    device_of_inputs,
    run_by_modules,
    with_same_buffers,
)
from graphplan.runtime.fallback.one_device import is_on_one_device, without_one_device
from graphplan.runtime.fallback.replaced_tensors import tensors_in, to_device
from graphplan.runtime.memory.host_pages import Pages
from graphplan.runtime.memory.shared_memory import join_memory
from graphplan.runtime.module.code_assembly import code_of
from graphplan.runtime.module.dispatch import (
    CallRequest,
    PlaceAgain,
    Served,
    ServedByModules,
    serve,
    share_prefetch_buffers,
)
from graphplan.runtime.module.module_state import Code, ModuleState
from graphplan.runtime.module.placed_parts import link, running_own_code, runs_own_code
from graphplan.runtime.module.placed_view import PlacedView, ViewAttributes
from graphplan.runtime.module.program import Program
from graphplan.runtime.module.program_run import run
from graphplan.runtime.module.training.missing_gradients import may_miss_gradients, warn_of_missing_gradients
from graphplan.runtime.module.training.optimizer_states import move_optimizer_states
from graphplan.runtime.module.training.training_step import require_no_gradients, run_step
from graphplan.runtime.module.transformers_methods import class_body
from graphplan.runtime.weights.storage import in_host_memory
from graphplan.runtime.weights.weight_changes import KeptInPlace
from graphplan.warnings import warn

_WEIGHTS_MOVE = (
    "a call does not fit in addition to the weights where they reside, so weights are moved: to leave room "
    "from the start, give partition max_batch and max_length, or such a call in calls="
)
_EXPORTED = "torch.export cannot trace a placed model: export the result of graphplan.unplace(model)"
logger = logging.getLogger("graphplan")

Record = Callable[[Program, Code], Code]


class PlacedModule(ViewAttributes, KeptInPlace):
    """The base of the classes of modules that :func:`graphplan.partition` returns."""

    _graphplan: ModuleState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create a plain module of the model's class: code calls ``type(self)(...)``, such as for a slice."""
        self.__class__ = original_class(self)  # type: ignore[assignment]  # the class to create
        self.__init__(*args, **kwargs)  # type: ignore[misc]  # of that class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; move the result of a ``forward`` assigned after placing to the input device."""
        result = super().__call__(*args, **kwargs)
        if "forward" not in self.__dict__ or not self._graphplan.return_outputs:
            return result
        return _to_input_device(self, result, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the placed model on the model's own arguments."""
        return self._graphplan_enter("", self._graphplan.signature, args, kwargs)

    def _graphplan_entry(self) -> tuple[nn.Module, str] | None:
        return None if runs_own_code(self) else (self, "")

    @never_compiled
    def _graphplan_enter(
        self,
        entry: str,
        signature: inspect.Signature | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Record | None = None,
    ) -> Any:
        """Run an entry, with its own arguments, and return its result."""
        if is_exported():
            raise PlanError(_EXPORTED)
        if runs_own_code(self):  # the caller is the module's own code, or a hook
            return _to_input_device(self, entry_of(self, entry)(*args, **kwargs), args, kwargs)
        if is_on_one_device():
            with without_one_device():
                return self._graphplan_enter(entry, signature, args, kwargs, record)
        while True:  # until the module is placed for the call: another thread may change it meanwhile
            if self._graphplan.start is not None or _find_change(self) is not None:
                _place_now(self, entry, args, kwargs)
            state = self._graphplan
            called = signature or state.signature
            assert called is not None
            request = CallRequest(entry, called, args, kwargs)
            state.streams.check_files()
            may_warn = may_miss_gradients(state)
            step = differentiated(self, state, (args, kwargs))
            with torch.set_grad_enabled(torch.is_grad_enabled() and state.keep_grad):
                seen = state.run_lock.changes
                try:
                    served = _serve_with_room(self, state, request, step)
                except PlaceAgain:
                    continue
                with state.run_lock:  # before start is read: a thread sets it before it moves weights
                    alone = state.run_lock.changes == seen + 1
                    if state.start is None and (alone or _still_valid(self, state, served)):
                        if may_warn:
                            plan = state.programs[served.index].plan if isinstance(served, Served) else None
                            warn_of_missing_gradients(self, state, plan, request)
                        return _run(self, state, served, record, step)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state. Without a graph, ``assign`` is ignored, since no guard would notice new tensors."""
        if self._graphplan.untraced is not None:
            if kwargs.pop("assign", len(args) > 2 and args[2]):
                warn(
                    "assign=True is ignored: this model runs module by module, so values are written to its "
                    "existing weights"
                )
            args = args[:2]
        return super().load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model, and record that it is to train: a call without gradients then warns."""
        state = vars(self).get("_graphplan")
        if state is not None:
            state.train_called = mode
        return super().train(mode)

    def extra_repr(self) -> str:
        """Return the model's own text, and its devices."""
        model_text, state = super().extra_repr(), vars(self).get("_graphplan")
        if state is None:
            return model_text
        plan = state.known_plan or next((program.plan for program in state.programs), None)
        text = "placed at its first call" if plan is None else _stages_text(plan)
        return f"{model_text}, {text}" if model_text else text

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # of torch
        link(self)
        self._graphplan.watch(self)
        _follow_optimizers(self, self._graphplan)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._graphplan.run_lock:
            _notice_changes(self)
        return _rebuild, (original_class(self),), self.__dict__


def _to_input_device(module: nn.Module, result: Any, args: Any, kwargs: Any) -> Any:
    inputs = tensors_in((args, kwargs))
    return to_device(result, inputs[0].device, module) if inputs else result


def _serve_with_room(
    module: PlacedModule, state: ModuleState, request: CallRequest, step: Differentiation | None
) -> Served | ServedByModules:
    """Do as :func:`serve`; raise PlaceAgain also if weights are moved to make room for the call."""
    try:
        return serve(module, state, request, step)
    except InfeasibleError:
        if not _move_weights(module, state, request):
            raise
    raise PlaceAgain


def _still_valid(module: PlacedModule, state: ModuleState, served: Served | ServedByModules) -> bool:
    """Whether the same program still serves the call after calls of other threads."""
    same_branches = not isinstance(served, Served) or state.programs[served.index].takes_same_branches(module)
    return same_branches and (not state.stale or isinstance(served, ServedByModules))


def _run(
    module: PlacedModule,
    state: ModuleState,
    served: Served | ServedByModules,
    record: Record | None,
    step: Differentiation | None,
) -> Any:
    if isinstance(served, ServedByModules):
        with torch.set_grad_enabled(torch.is_grad_enabled() or step is not None):
            return _run_modular(module, served, record)
    state.update_constants()
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
    """Return what a call differentiates; None for a forward pass alone."""
    if state.step is None or not torch.is_grad_enabled():
        return None
    return state.step.of(module, inputs)


@outside_inference_mode
def _place_now(module: PlacedModule, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Place the module for this call, unless another thread has done so meanwhile."""
    while True:
        state = module._graphplan
        with state.run_lock:  # before the capture lock, for which a running call may wait
            if module._graphplan is not state:
                continue
            if state.start is None:
                _notice_changes(module)  # again: what a hook assigned during its call is undone by now
            if state.start is not None:
                with CAPTURE_LOCK:
                    _start(module, state, entry, args, kwargs)
            return


def _start(
    module: PlacedModule, state: ModuleState, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert state.start is not None
    added = [] if state.guard is None else state.modular_calls.untraced_hooks(state.guard.parts)
    # these refer to weights, whose memory must be free for the new placement
    for value in state.stored.values():
        value.move_to_host()
    state.reader = state.guard = state.compile = state.move = None
    state.codes.clear()
    state.streams.storages.clear()
    state.parts.clear()
    try:
        with without_hooks(added):
            started = state.start(module, args, kwargs, entry)
    except (CaptureError, InfeasibleError, InputError) as error:
        if state.untraced is None:
            raise
        _note_failed_trace(module, state, entry, args, kwargs, error)
        return
    if "forward" in module.__dict__:  # assigned by the user, it runs around the graphs
        started.__dict__["forward"] = module.__dict__["forward"]
    for name, value in started.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is started:
            started.__dict__[name] = MethodType(value.__func__, module)
    object.__setattr__(module, "__dict__", started.__dict__)  # at once, for other threads
    new_state = module._graphplan
    new_state.own_code_methods, new_state.train_called = state.own_code_methods, state.train_called
    # the model changed itself, or no trace works: traces fail again
    if state.modular_calls.changed_module or state.untraced is not None:
        new_state.modular_calls.structures += [
            known for known in state.modular_calls.structures if not known.while_hooked
        ]
    link(module)
    _follow_optimizers(module, new_state)


def _note_failed_trace(
    module: nn.Module,
    state: ModuleState,
    entry: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: CaptureError | InfeasibleError | InputError,
) -> None:
    """Have calls like this one run module by module, since they cannot be traced either."""
    assert state.untraced is not None
    logger.info("such inputs run module by module too: %s", error)
    state.start, state.untraced = None, replace(state.untraced, tries=state.untraced.tries - 1)
    path, _, method = entry.partition(":")
    signature = signature_of(getattr(unplaced(module).get_submodule(path), method or "forward"))
    note_untraced(module, bind_call(signature, args, kwargs, entry))


def note_untraced(module: nn.Module, call: BoundCall) -> None:
    """Record that this call structure of an untraced module cannot be traced either."""
    state: ModuleState = vars(module)["_graphplan"]
    assert state.untraced is not None
    structure = state.modular_calls.add(call, state.new_reader(module).read(module))
    structure.compute_device = state.untraced.compute_device
    structure.execution_mode = state.untraced.execution_mode


def _follow_optimizers(module: nn.Module, state: ModuleState) -> None:
    if state.keep_grad or state.step is not None:
        move_optimizer_states(module)


def _find_change(module: PlacedModule) -> str | None:
    """Return a description of a change since the graphs were traced, or None."""
    state = module._graphplan
    guard = state.guard
    if guard is None or state.start is not None:
        return None
    if guard.is_unchanged(module):
        return state.stored_change()
    parts, change = guard.parts, guard.difference(module, values_may_change=state.allows_other_values)
    if guard.parts is not parts:  # submodules without a difference, whose modes are read from now on
        state.reader = state.new_reader(module)
    return change or state.stored_change()


@outside_inference_mode
def _move_weights(module: PlacedModule, state: ModuleState, request: CallRequest) -> bool:
    """Have the weights moved before the next call, to make room for this one.

    Return whether to try the call again: weights move, or it is planned without reserve. After any other
    error, the next call may have them moved.
    """
    call = request.call
    if not state.may_move(call):
        return False
    with CAPTURE_LOCK:
        if module._graphplan is not state or not state.may_move(call):  # another thread has been here
            return True
        assert state.reader is not None
        assert state.move is not None
        assert state.guard is not None
        try:
            modes = state.reader.read(module)
            start = state.move(call, modes, state.attribute_values(), weights_now(module))
        except InfeasibleError as error:
            logger.info("no placement of weights has room for the call: %s", error)
            state.record_no_room(call)
        else:
            warn(_WEIGHTS_MOVE)
            state.start, state.move = start, None
    return True


def _notice_changes(module: PlacedModule) -> None:
    """Have the module placed again if it has changed since its graphs were traced."""
    state, change = module._graphplan, _find_change(module)
    if change is not None:
        if state.reader is not None:
            state.reader.read(module)  # raises if adapters were put in
        state.retrace_at_next_call(module, change)


def _run_modular(module: PlacedModule, served: ServedByModules, record: Record | None) -> Any:
    state, call = module._graphplan, served.call
    if record is not None:
        why = state.untraced or "modules run this call one by one"
        raise PlanError(f"there is no graph to profile, {why}")
    keeps_grad, known = state.keep_grad or state.step is not None, served.call_record
    compute_device = known.compute_device
    watch: AbstractContextManager[None] = nullcontext()
    if isinstance(known, ModularCall):
        compute_device = compute_device or compute_device_of(PlacedView(module).plan)
        watch = _watch_changes(module, state, known)
    with running_own_code(module), watch:
        result = run_by_modules(module, call, known, compute_device, keeps_grad=keeps_grad)
    return to_device(result, device_of_inputs(call), module) if state.return_outputs else result


@contextmanager
def _watch_changes(module: PlacedModule, state: ModuleState, structure: ModularCall) -> Iterator[None]:
    """Context manager for a call without a graph: changes that it makes in the module make graphs stale.

    Graphs remain valid if the model itself adds hooks, as transformers does at the first call that returns
    all hidden states. This does not hold for calls with the user's hooks, which may have added the new ones.
    """
    hooks = hooks_of(module)
    try:
        with with_same_buffers(module):
            yield
    finally:
        added = frozenset[Hook]() if structure.while_hooked else hooks_of(module) - hooks
        state.modular_calls.traced |= added
        for value in state.stored.values():
            value.accept()
        if state.guard is not None:
            state.modular_calls.changed_module |= not state.guard.is_unchanged(module)
            change = _find_change(module)
            state.stale = change if change and not added else state.stale
            state.guard.accept(module)


def _rebuild(original: type[nn.Module]) -> nn.Module:
    return object.__new__(placed_class(original))


def placed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of placed copies of a model of class ``cls``; it keeps the model's name."""
    original = getattr(cls, "_graphplan_original", cls)
    return derive_class(
        original, PlacedModule, lambda: class_body(PlacedModule, original) | graph_methods(original)
    )


def _stages_text(plan: PlanData) -> str:
    keys = dict.fromkeys(stage.device for stage in plan.stages)
    return f"placed: {count_text(len(plan.stages), 'stage')} on {', '.join(map(device_name, keys))}"


def unplace(module: nn.Module) -> nn.Module:
    """Return the plain model of a placed module, on the CPU, with its present weights and attributes.

    Args:
        module: what :func:`graphplan.partition` returned; it stays as it is. Weights that reside in CPU
            memory are shared with it, and so are their gradients.

    Raises:
        PlanError: ``module`` is not a placed module.
    """
    if not isinstance(module, PlacedModule):
        raise PlanError(f"{type(module).__name__} is not a placed module")
    plain = unplaced(module, wrapped=True)
    weights = ModelWeights(plain)
    memo = in_host_memory(plain, weights, weights.tensors)
    for *_, tensor in plain_tensors(plain):  # a call may have stored it on an accelerator
        memo.setdefault(id(tensor), tensor.detach().cpu())
    for parameter in plain.parameters():
        if isinstance(parameter, nn.Parameter) and parameter.grad is not None:
            memo[id(parameter)].grad = parameter.grad.cpu()
    copied = copy_to_run(plain, memo)
    if module._graphplan.untraced is not None:  # models with graphs do not write to shared memory
        join_memory(module, copied)
    return copied


def attach(module: nn.Module, state: ModuleState, memory: Iterable[Pages] = ()) -> None:
    """Give a placed copy its state, which keeps the memory of its weights alive."""
    share_prefetch_buffers(state.programs)
    state.streams.pages.extend(memory)
    link(module)
    module.__dict__["_graphplan"] = state
    state.watch(module)
    _follow_optimizers(module, state)
    for index in range(len(state.programs)):
        code_of(module, state, index)  # allocates the prefetch buffers now, while memory is free
