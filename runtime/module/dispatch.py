"""Find the program that serves a call: by a cached route, else by the call's structure, else a new one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from graphplan.capture.changes.kept_state import KeptStateError
from graphplan.capture.model.model_weights import weights_now
from graphplan.capture.model.modes import Differentiation, Modes
from graphplan.capture.model_methods import RunAsItIs, UntracedMethodError
from graphplan.capture.signature import BoundCall, bind_call
from graphplan.capture.thread_patches import CAPTURE_LOCK, outside_inference_mode
from graphplan.capture.value_branches import branched_on_other_values
from graphplan.errors import NoGraphError
from graphplan.ir.schedule import prefetch_bytes
from graphplan.runtime.fallback.module_by_module import ModularCall, Untraced
from graphplan.runtime.module.dispatch_cache import find_route
from graphplan.runtime.module.module_state import CachedRoute, ModuleState
from graphplan.runtime.module.program import Program
from graphplan.warnings import warn

logger = logging.getLogger("graphplan")

_MANY = 8  # as many compilations as torch.compile allows by default
_MANY_GRAPHS = (
    f"{_MANY} graphs have been traced for one model, the last for this reason: {{}}. Sizes, an argument that "
    "is not a tensor (a float, a string, how long a list is), or the shape of a state in an attribute change "
    "from one forward pass to the next. "
    "Pass tensors, or dynamic_shapes; make no text of a size in forward(). Each reason is logged at INFO"
)
_MANY_PLANS = (
    f"one model has been planned {_MANY} times more for larger inputs, the last for this reason: {{}}. Give "
    "partition max_batch and max_length, or the largest inputs as its example, so that one plan serves all. "
    "Each reason is logged at INFO"
)
_MAX_PROGRAMS = 256  # each with its plan and its code
_FULL = (
    f"{_MAX_PROGRAMS} call structures have been traced for this model: the cache of graphs is cleared, and "
    "later calls are traced again. Give partition dynamic_shapes, or max_batch and max_length, so that one "
    "graph serves many sizes; pass tensors, not numbers"
)
_HOOKED = (
    "hooks were added to submodules of the placed model, and its graphs do not call them: until they are "
    "removed, the model runs module by module, each where its weights reside, which is slower"
)
_MOST_GRAPHS = 8  # of one structure, for different values at branches; torch.compile has the same limit
_MANY_BRANCHES = (
    "the code branches on values of weights or of integer inputs, which differ from one forward pass to the "
    f"next: {_MOST_GRAPHS} graphs have been traced for inputs of one structure. Branch on a comparison of "
    "tensors, not on a number read from one: self.count > 100 has two results, int(self.count) > 100 has "
    "many. Resize images to a few sizes"
)
_ROUTES = 16  # that are remembered
_SIZES = 4096  # the most keys of ``routes_by_size``


@dataclass(slots=True)
class CallRequest:
    """A call of a placed module or of a part of it, as the caller makes it.

    Attributes:
        entry: what is called, as in :func:`graphplan.capture.model_methods.method_of`.
        signature: that of the callable.
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

    entry: str
    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    _bound: BoundCall | None = None

    @property
    def call(self) -> BoundCall:
        """The call, bound and flattened; a cached route does not need it."""
        if self._bound is None:
            self._bound = bind_call(self.signature, self.args, self.kwargs, self.entry)
        return self._bound

    def sizes(self) -> tuple[Any, ...]:
        """Return a key that tells most calls apart: the sizes of tensors, the types of other arguments."""
        values = (*self.args, *self.kwargs.values()) if self.kwargs else self.args
        sizes = [value.shape if isinstance(value, torch.Tensor) else type(value) for value in values]
        return self.entry, *self.kwargs, *sizes


@dataclass(frozen=True, slots=True)
class Served:
    """A call for program ``index``: its input leaves, and by name the arguments that it changes."""

    index: int
    leaves: Sequence[Any]
    changed_arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServedByModules:
    """A call that runs module by module, and ``call_record``, how calls like it run."""

    call: BoundCall
    call_record: ModularCall | Untraced


class PlaceAgain(Exception):  # noqa: N818  # not an error: the caller places the module and tries again
    """The module must be placed again before the call."""


def serve(
    module: nn.Module, state: ModuleState, request: CallRequest, step: Differentiation | None = None
) -> Served | ServedByModules:
    """Return the call for its program, or as one that runs module by module; capture a new structure.

    ``step`` says what is differentiated, if a backward pass may follow.

    Raises:
        PlaceAgain: the module must be placed again first: its next call does so.
        GraphplanError: the call has a new structure, and cannot be traced or placed.
    """
    if state.untraced is not None and not state.untraced.tries:
        return ServedByModules(request.call, state.untraced)
    reader = state.reader  # None in a copy, and while another thread places the module again
    if reader is None:
        reader = state.reader = state.new_reader(module)
    modes = reader.read(module)
    search = _ProgramSearch(module, state, request, modes if step is None else replace(modes, step=step))
    if state.untraced is not None:
        if search.find_modular() is None:
            state.start = state.retry
            raise PlaceAgain
        return ServedByModules(request.call, state.untraced)
    if state.has_untraced_hooks():
        with state.run_lock:  # hooks that a running call of another thread uses do not count
            hooked = state.has_untraced_hooks()
        if hooked:
            return search.find_modular() or search.run_modular_from_now_on(while_hooked=True)
    if state.stale:
        served = search.find_modular()
        if served is None:
            state.retrace_at_next_call(module, state.stale)
            raise PlaceAgain
        return served
    return search.find_program()


@dataclass(slots=True)
class _ProgramSearch:
    """The search for what serves a request, while the modules are in these modes."""

    module: nn.Module
    state: ModuleState
    request: CallRequest
    modes: Modes

    def find_program(self) -> Served | ServedByModules:
        """Return the call for a program: by a cached route, else by its structure, else for a new one."""
        state, request, sizes = self.state, self.request, self.request.sizes()
        likely = state.routes_by_size.get(sizes, ())
        for cached in likely:
            served = self.routed(cached)
            if served is not None:
                return served
        for cached in state.routes:
            served = self.routed(cached)
            if served is not None:
                _remember(state, sizes, cached)
                return served
        index = self._find_or_capture([cached.index for cached in likely])
        if not isinstance(index, int):
            return index
        program = state.programs[index]
        route = find_route(request.signature, program.signature, request.args, request.kwargs)
        new = CachedRoute(route, index, () if route is None else self._positions(program.changed_names))
        if route is not None:
            order = list(_smallest_first(state))
            routes = [new, *state.routes[: _ROUTES - 1]]
            state.routes = sorted(routes, key=lambda cached: order.index(cached.index))
        if route is not None or all(cached.index != index for cached in likely):
            _remember(state, sizes, new)
        changed = {name: request.call.kwargs[name] for name in program.changed_names}
        return Served(index, program.signature.traced(request.call).leaves, changed)

    def routed(self, cached: CachedRoute) -> Served | None:
        """Return the call for the program of a cached route; None if the call does not match it."""
        program, request = self.state.programs[cached.index], self.request
        if cached.route is None or program.entry != request.entry or program.modes != self.modes:
            return None
        leaves = cached.route.leaves(request.args, request.kwargs, program.host)
        if leaves is None or not self._accepts(program, leaves):
            return None
        keys = cached.changed_arguments
        changed = {n: request.args[k] if isinstance(k, int) else request.kwargs[k] for n, k in keys}
        return Served(cached.index, leaves, changed)

    def find_modular(self) -> ServedByModules | None:
        """Return the call as one that runs module by module; None if calls like it do not."""
        call = self.request.call
        known = self.state.modular_calls.find(call, self.modes)
        return None if known is None else ServedByModules(call, known)

    def run_modular_from_now_on(self, *, while_hooked: bool = False) -> ServedByModules:
        """Have such calls run module by module; if ``while_hooked``, only while there are untraced hooks."""
        call, state = self.request.call, self.state
        if while_hooked:
            warn(_HOOKED)
        keeps_grad = state.keep_grad and not while_hooked
        calls = state.modular_calls
        known = calls.add(call, self.modes, keeps_grad=keeps_grad, while_hooked=while_hooked)
        return ServedByModules(call, known)

    def _find_or_capture(self, likely: Sequence[int]) -> int | ServedByModules:
        found = self._find(likely)
        if found is not None:
            return found
        with CAPTURE_LOCK:
            if self.state.start is not None:
                raise PlaceAgain
            found = self._find()  # another thread may have captured it meanwhile
            if found is not None:
                return found
            if len(self.state.programs) >= _MAX_PROGRAMS:
                warn(_FULL)
                self.state.start = self.state.restart
                raise PlaceAgain
            return self._capture()

    def _find(self, likely: Sequence[int] = ()) -> int | ServedByModules | None:
        call, device = self.request.call, self.request.call.device
        for index in chain(likely, _smallest_first(self.state)):
            program = self.state.programs[index]
            fits = self._is_like(program) and device in (None, program.host)
            if fits and program.signature.mismatch(call) is None and self._accepts(program, call.leaves):
                return index
        return self.find_modular()

    def _is_like(self, program: Program) -> bool:
        return program.entry == self.request.entry and program.modes == self.modes

    def _accepts(self, program: Program, leaves: Sequence[Any]) -> bool:
        """Whether caches are where the program expects them, and code branches as in its trace."""
        values = ((name, value.to_trace()) for name, value in self.state.stored.items())
        return program.accepts(leaves, self.module) and program.presence.allows(values)

    @outside_inference_mode
    def _capture(self) -> int | ServedByModules:
        """Capture and plan a call of a new structure; return the index of its program."""
        state, call = self.state, self.request.call
        assert state.compile is not None
        assert state.guard is not None
        try:
            if state.refused is not None and self.modes.step is None:
                self._require_few_graphs()
            why = self._why_another()
            logger.info("planning another call of %s: %s", type(self.module).__name__, why)
            barely, values = not state.may_move(call), state.guard.values
            weights, attributes = weights_now(self.module), state.attribute_values()
            program = state.compile(call, self.modes, attributes, weights, barely=barely)
            _require_no_conflict(self.module, state, program)
            state.programs.append(program)
            if state.values is not values:
                state.values = None
            state.expect_stored(self.module)
        except NoGraphError as error:
            own_code = isinstance(error, RunAsItIs | UntracedMethodError)
            if state.refused is None or own_code or self.modes.step is not None:  # a planned step needs one
                raise
            state.refused(error)
            if isinstance(error, KeptStateError):
                state.start = state.restart
                raise PlaceAgain from error
            return self.run_modular_from_now_on()
        share_prefetch_buffers(state.programs)
        self._warn_of_many(why)
        return len(state.programs) - 1

    def _warn_of_many(self, why: str) -> None:
        """Warn once of many graphs of one entry, and once of many plans of graphs that were traced before."""
        entry = self.request.entry
        *before, latest = [program.trace for program in self.state.programs if program.entry == entry]
        is_new, graphs = latest not in before, len({*before, latest})
        if is_new and graphs == _MANY:
            warn(_MANY_GRAPHS.format(why))
        elif not is_new and len(before) + 1 - graphs == _MANY:
            warn(_MANY_PLANS.format(why))

    def _why_another(self) -> str:
        """Return why the latest graph of this entry and mode does not serve the call."""
        latest = next(filter(self._is_like, reversed(self.state.programs)), None)
        if latest is None:
            return f"the first call of {self.request.entry or 'forward'} in this mode"
        changed = "its code takes another branch, or what an attribute is has changed"
        return latest.signature.mismatch(self.request.call) or changed

    def _require_few_graphs(self) -> None:
        """Raise NoGraphError if many graphs serve calls of this structure, each for other values."""
        call, like = self.request.call, [p for p in self.state.programs if self._is_like(p)]
        by_weights = sum(bool(p.branches) and p.signature.mismatch(call) is None for p in like)
        by_inputs = sum(
            p.signature.spec == call.spec and branched_on_other_values(p.signature, call) for p in like
        )
        if max(by_weights, by_inputs) >= _MOST_GRAPHS:
            raise NoGraphError(_MANY_BRANCHES)

    def _positions(self, names: Sequence[str]) -> tuple[tuple[str, int | str], ...]:
        """Return (name, its position, or its keyword) of each of these arguments."""
        order = list(self.request.signature.parameters)
        return tuple((n, n if n in self.request.kwargs else order.index(n)) for n in names)


def _require_no_conflict(module: nn.Module, state: ModuleState, program: Program) -> None:
    """Raise NoGraphError or PlaceAgain if calls of several programs depend on an attribute differently."""
    for earlier in state.programs:
        if (name := earlier.conflict(program)) is not None:
            raise NoGraphError(
                f"the call reads a part of {name}, in which other calls store tensors, or sets it to what a "
                "graph does not store, such as a weight"
            )
        if (name := program.conflict(earlier)) is not None:
            state.retrace_at_next_call(module, f"this call stores {name!r}, which others read or set")
            raise PlaceAgain


def _remember(state: ModuleState, sizes: tuple[Any, ...], cached: CachedRoute) -> None:
    """Let calls of these sizes try this route first."""
    if len(state.routes_by_size) >= _SIZES:
        state.routes_by_size = {}
    state.routes_by_size[sizes] = (cached, *state.routes_by_size.get(sizes, ())[: _ROUTES - 1])


def _smallest_first(state: ModuleState) -> Iterator[int]:
    """Yield the indices of programs, smallest inputs first: plans for larger ones had less free memory.

    Of several for inputs of one size, the oldest comes first: later ones are for calls with less free memory.
    """
    yield from sorted(range(len(state.programs)), key=lambda index: state.programs[index].max_input_bytes)


def share_prefetch_buffers(programs: list[Program]) -> None:
    """Have every plan count the prefetch buffers at the largest size that any call structure needs."""
    sizes = prefetch_bytes(
        buffer for program in programs for buffer in program.plan.schedule.prefetch_buffers
    )
    if sizes:
        programs[:] = [
            replace(program, plan=program.plan.with_prefetch_buffers(sizes)) for program in programs
        ]
