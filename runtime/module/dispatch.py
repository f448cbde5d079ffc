"""Find the program that serves a call: by a known route, else by the call's structure, else a new one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from graphplan.capture.changes.assigned_state import KeptStateError
from graphplan.capture.model.model_weights import weights_now
from graphplan.capture.model.modes import Differentiation, Modes
from graphplan.capture.model_methods import RunAsItIs, UntracedMethodError
from graphplan.capture.signature import BoundCall, bind_call
from graphplan.capture.thread_patches import CAPTURE_LOCK, outside_inference_mode
from graphplan.capture.value_branches import took_other_inputs
from graphplan.errors import NoGraphError
from graphplan.ir.schedule import prefetch_bytes
from graphplan.runtime.fallback.module_by_module import CallForm, Untraced
from graphplan.runtime.module.dispatch_cache import find_route
from graphplan.runtime.module.module_state import KnownForm, ModuleState
from graphplan.runtime.module.program import Program
from graphplan.warnings import warn

_MANY = 32
_MANY_PROGRAMS = (
    f"{_MANY} graphs have been traced for one model: sizes, or an argument that is not a tensor (a float, "
    "a string, how long a list is), change from one forward pass to the next. Pass tensors, or dynamic_shapes"
)
_FULL = (
    "so many call structures have been traced for one model that all are forgotten, and traced again "
    "when they come: give partition dynamic_shapes, or max_batch and max_length, so that one serves many "
    "sizes; pass tensors, not numbers"
)
_HOOKED = (
    "hooks were added to submodules of the placed model, and its graphs do not call them: until they are "
    "removed, the model runs module by module, each where its weights reside, which is slower"
)
_MOST_GRAPHS = 8  # of one structure, for different values at branches; torch.compile has the same limit
_MANY_GRAPHS = (
    "the code branches on values of weights or of integer inputs, which differ from one forward pass to the "
    f"next: {_MOST_GRAPHS} graphs have been traced for inputs of one structure. Branch on a comparison of "
    "tensors, not on a number read from one: self.count > 100 has two results, int(self.count) > 100 has "
    "many. Resize images to a few sizes"
)
_MOST = 256  # programs, each with its plan and its code
_ROUTES = 16  # the most routes that are remembered
_SIZES = 4096  # the most keys of ``by_sizes``


@dataclass(frozen=True, slots=True)
class Served:
    """A call for program ``index``: its input leaves, and by name the arguments that it changes."""

    index: int
    leaves: Sequence[Any]
    changed_arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServedByModules:
    """A call that runs module by module, and ``call_record``, how calls like it run."""

    entry: str
    call: BoundCall
    call_record: CallForm | Untraced


def serve(
    module: nn.Module,
    state: ModuleState,
    entry: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: Differentiation | None = None,
) -> Served | ServedByModules | None:
    """Return the call as its program takes it, or as one that runs module by module; capture a new structure.

    None if the module must be placed anew first: the caller then begins again. ``entry`` and ``signature``
    are those of the callable, as in :func:`graphplan.capture.model_methods.method_of`; ``step`` says what is
    differentiated, if a backward pass may follow.

    Raises:
        GraphplanError: the call has a new structure, and cannot be traced or placed.
    """
    if state.untraced is not None and not state.untraced.tries:
        return ServedByModules(entry, bind_call(signature, args, kwargs), state.untraced)
    reader = state.reader  # None in a copy, and while another thread places the module anew
    if reader is None:
        reader = state.reader = state.new_reader(module)
    modes = reader.read(module)
    if step is not None:
        modes = replace(modes, step=step)
    if state.untraced is not None:
        call = bind_call(signature, args, kwargs)
        if state.modulewise.find(entry, call, modes) is None:
            state.start = state.retry
            return None
        return ServedByModules(entry, call, state.untraced)
    if state.hooked():
        with state.turns:  # hooks that a running call of another thread uses do not count
            hooked = state.hooked()
        if hooked:
            return _serve_by_modules(state, entry, bind_call(signature, args, kwargs), modes)
    if state.stale:
        call = bind_call(signature, args, kwargs)
        form = state.modulewise.find(entry, call, modes)
        if form is None:
            state.begin_again(module, state.stale)
        return None if form is None else ServedByModules(entry, call, form)
    sizes = _sizes(entry, args, kwargs)
    likely = state.by_sizes.get(sizes, ())
    for number, known in enumerate(chain(likely, state.routes)):
        served = _routed(module, state, known, entry, modes, args, kwargs)
        if served is not None:
            if number >= len(likely):
                _remember(state, sizes, known)
            return served
    call = bind_call(signature, args, kwargs)
    index = _find_or_capture(module, state, entry, call, modes, [known.index for known in likely])
    if not isinstance(index, int):
        return index
    program = state.programs[index]
    route = find_route(signature, program.signature, args, kwargs)
    known = KnownForm(
        route, index, () if route is None else _positions(signature, program.changed_names, kwargs)
    )
    if route is not None:
        order = list(_smallest_first(state))
        state.routes = sorted([known, *state.routes[: _ROUTES - 1]], key=lambda form: order.index(form.index))
    if route is not None or all(form.index != index for form in likely):
        _remember(state, sizes, known)
    changed = {name: call.kwargs[name] for name in program.changed_names}
    traced = program.signature.traced(call)
    return Served(index, traced.leaves, changed)


def _sizes(entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that tells most calls apart: the sizes of tensors, the types of other arguments."""
    values = (*args, *kwargs.values()) if kwargs else args
    sizes = [value.shape if isinstance(value, torch.Tensor) else type(value) for value in values]
    return entry, tuple(kwargs), tuple(sizes)


def _remember(state: ModuleState, sizes: tuple[Any, ...], known: KnownForm) -> None:
    """Let calls of these sizes try this form first."""
    if len(state.by_sizes) >= _SIZES:
        state.by_sizes = {}
    state.by_sizes[sizes] = (known, *state.by_sizes.get(sizes, ())[: _ROUTES - 1])


def _routed(
    module: nn.Module,
    state: ModuleState,
    known: KnownForm,
    entry: str,
    modes: Modes,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Served | None:
    """Return the call for the program of a known form; None if the call does not match it."""
    program = state.programs[known.index]
    if known.route is None or program.entry != entry or program.modes != modes:
        return None
    leaves = known.route.leaves(args, kwargs, program.host)
    if leaves is None or not program.takes(leaves, module):
        return None
    places = known.changed_places
    changed = {name: args[key] if isinstance(key, int) else kwargs[key] for name, key in places}
    return Served(known.index, leaves, changed)


def _serve_by_modules(state: ModuleState, entry: str, call: BoundCall, modes: Modes) -> ServedByModules:
    """Have a call run module by module, since graphs do not call hooks that were added to submodules."""
    form = state.modulewise.find(entry, call, modes)
    if form is None:
        warn(_HOOKED)
        form = state.modulewise.note(entry, call, modes, hooked=True)
    return ServedByModules(entry, call, form)


def _find_or_capture(
    module: nn.Module,
    state: ModuleState,
    entry: str,
    call: BoundCall,
    modes: Modes,
    likely: Sequence[int],
) -> int | ServedByModules | None:
    found = _find(module, state, entry, call, modes, likely)
    if found is not None:
        return found
    with CAPTURE_LOCK:
        if state.start is not None:
            return None
        found = _find(module, state, entry, call, modes)  # another thread may have captured it meanwhile
        if found is None and len(state.programs) >= _MOST:
            warn(_FULL)
            state.start = state.restart
            return None
        return _capture(module, state, entry, call, modes) if found is None else found


def _find(
    module: nn.Module,
    state: ModuleState,
    entry: str,
    call: BoundCall,
    modes: Modes,
    likely: Sequence[int] = (),
) -> int | ServedByModules | None:
    device = call.device
    for index in chain(likely, _smallest_first(state)):
        program = state.programs[index]
        same_entry = program.entry == entry and (device is None or device == program.host)
        fits = same_entry and program.modes == modes and program.signature.mismatch(call) is None
        if fits and program.takes(call.leaves, module):
            return index
    form = state.modulewise.find(entry, call, modes)
    return None if form is None else ServedByModules(entry, call, form)


def _smallest_first(state: ModuleState) -> Iterator[int]:
    """Yield the indices of programs, smallest inputs first: plans for larger ones had less free memory.

    Of several for inputs of one size, the oldest comes first: later ones are for calls with less free memory.
    """
    yield from sorted(range(len(state.programs)), key=lambda index: state.programs[index].reach)


@outside_inference_mode
def _capture(
    module: nn.Module, state: ModuleState, entry: str, call: BoundCall, modes: Modes
) -> int | ServedByModules | None:
    """Capture and plan a call of a new structure; None if the model runs without graphs from now on."""
    assert state.compile is not None
    assert state.guard is not None
    try:
        if state.refused is not None and modes.step is None:
            _require_few_graphs(state, entry, call, modes)
        barely, values, current = not state.may_move(entry, call), state.guard.values, weights_now(module)
        state.programs.append(state.compile(call, entry, modes, values, current, barely=barely))
        if state.values is not values:
            state.values = None
    except NoGraphError as error:
        own_code = isinstance(error, RunAsItIs | UntracedMethodError)
        if state.refused is None or own_code or modes.step is not None:  # a planned step needs a graph
            raise
        state.refused(error)
        if isinstance(error, KeptStateError):
            state.start = state.restart
            return None
        form = state.modulewise.note(entry, call, modes, keeps_grad=state.keep_grad)
        return ServedByModules(entry, call, form)
    share_prefetch_buffers(state.programs)
    if len(state.programs) == _MANY:
        warn(_MANY_PROGRAMS)
    return len(state.programs) - 1


def _require_few_graphs(state: ModuleState, entry: str, call: BoundCall, modes: Modes) -> None:
    """Raise NoGraphError if many graphs serve calls of this structure, each for other values at branches."""
    like = [p for p in state.programs if p.entry == entry and p.modes == modes]
    by_weights = sum(bool(p.branches) and p.signature.mismatch(call) is None for p in like)
    by_inputs = sum(p.signature.spec == call.spec and took_other_inputs(p.signature, call) for p in like)
    if max(by_weights, by_inputs) >= _MOST_GRAPHS:
        raise NoGraphError(_MANY_GRAPHS)


def _positions(
    signature: inspect.Signature, names: Sequence[str], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, int | str], ...]:
    """Return (name, its position, or its keyword) of each of these arguments of a call."""
    order = list(signature.parameters)
    return tuple((name, name if name in kwargs else order.index(name)) for name in names)


def share_prefetch_buffers(programs: list[Program]) -> None:
    """Have every plan count the prefetch buffers at the largest size that any call structure needs."""
    sizes = prefetch_bytes(
        buffer for program in programs for buffer in program.plan.schedule.prefetch_buffers
    )
    if sizes:
        programs[:] = [
            replace(program, plan=program.plan.with_prefetch_buffers(sizes)) for program in programs
        ]
