"""The state of a placed module besides the model's own attributes: its programs, and how to compile more."""

from __future__ import annotations

import inspect
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, Protocol

import torch
from torch import fx, nn

from graphplan.capture.model.model_copy import AttributeValues
from graphplan.capture.model.model_weights import tensor_bytes
from graphplan.capture.model.modes import Differentiation, ModeReader, Modes
from graphplan.capture.signature import BoundCall
from graphplan.capture.value_branches import ValueOf
from graphplan.errors import NoGraphError
from graphplan.ir.plan_data import PlanData
from graphplan.runtime.fallback.module_by_module import ModularCalls, Untraced
from graphplan.runtime.memory.gradient_copies import GradientCopies
from graphplan.runtime.memory.stored_tensors import StoredPlace, StoredValue
from graphplan.runtime.module.dispatch_cache import Route
from graphplan.runtime.module.module_guard import ModuleGuard
from graphplan.runtime.module.program import Program
from graphplan.runtime.module.result_structure import Rebuild
from graphplan.runtime.module.weight_binding import BoundCode
from graphplan.runtime.profile.call_profile import ProfilingInterpreter
from graphplan.runtime.weights.resident_parts import ResidentPart
from graphplan.runtime.weights.weight_streams import ModuleStreams
from graphplan.warnings import warn

_LONG_WAIT = 60.0  # seconds, more than most calls take
_WAITS = (
    f"a call of a placed model or its submodule has waited {_LONG_WAIT:g} s for a call in another thread: "
    "the plan has memory for one call at a time. If that call waits for this thread, for example because "
    "forward runs submodules in its own threads, this is a deadlock: run them one after the other"
)


class CallLock:
    """A reentrant lock, which is free again in a forked child process.

    ``changes`` counts acquisitions and releases, like the counter of a sequence lock: what was read when it
    was ``n`` is still valid if it is ``n + 1`` while the lock is held.
    """

    def __init__(self) -> None:
        self._lock, self._process = threading.RLock(), os.getpid()
        self.changes = 0

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            self._lock, self._process = threading.RLock(), os.getpid()
        if not self._lock.acquire(timeout=_LONG_WAIT):
            warn(_WAITS)
            self._lock.acquire()
        self.changes += 1

    def __exit__(self, *_: Any) -> None:
        self.changes += 1
        self._lock.release()


class Compile(Protocol):
    """Compiles a call to a program: :meth:`graphplan.compiler.pipeline.Compiler.compile_new_structure`."""

    def __call__(
        self,
        call: BoundCall,
        modes: Modes,
        values: AttributeValues,
        current: ValueOf,
        *,
        barely: bool,
    ) -> Program:
        """Return the program; if ``barely``, without memory for larger calls."""


Refused = Callable[[NoGraphError], None]
"""Warns of a call structure that cannot be traced, or raises."""


class Start(Protocol):
    """A callable that places a module at its next call."""

    @property
    def known_plan(self) -> PlanData | None:
        """The plan by which the weights are placed, if there is one."""

    @property
    def strict(self) -> bool:
        """Whether a model or call that cannot be traced is an error."""

    def __call__(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], entry: str
    ) -> nn.Module:
        """Return the placed module; ``entry`` is the path of what is called."""


MoveWeights = Callable[[BoundCall, Modes, AttributeValues, ValueOf], Start]
"""Returns the start that moves the weights so that a call has room, or raises InfeasibleError."""


@dataclass(frozen=True, slots=True)
class Code:
    """The code of one program, ready to run on one module's weights.

    ``reduced`` has the backward passes for missing gradients of results, by (names of these results, whether
    gradients of parameters are added up, sizes). ``places`` are where it stores tensors, ``sets`` has the
    attributes that it sets to plain values, ``stored`` all attributes in which programs store tensors.
    """

    module: fx.GraphModule
    bound: BoundCode | ProfilingInterpreter
    rebuild: Rebuild
    backward: BoundCode | ProfilingInterpreter | None = None
    places: tuple[StoredPlace, ...] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)
    stored: Mapping[str, StoredValue] = field(default_factory=dict)
    reduced: dict[tuple[Any, ...], BoundCode] = field(default_factory=dict)

    def release_stored(self) -> None:
        """Free the accelerators of what earlier calls have stored, before the code runs.

        Where the code stores tensors itself, nothing is left, or the constant that it reads.
        """
        for place in self.places:
            place.release()
        if len(self.stored) > len(self.places):
            own = {id(place.value) for place in self.places}
            for name, value in self.stored.items():
                if name in self.sets:
                    value.replace(self.sets[name], in_place=False)
                elif id(value) not in own:
                    value.move_to_host()


@dataclass(frozen=True, slots=True)
class CachedRoute:
    """The program, by its index, for calls of one structure, and the route of their arguments to it."""

    route: Route | None  # None: such calls are bound and flattened
    index: int
    changed_arguments: tuple[tuple[str, int | str], ...]  # (name, position or keyword) of each


@dataclass
class ModuleState:
    """The state of a placed module besides the model's own attributes.

    Programs are appended under the capture lock, and never removed. Fields with ``init=False`` belong to this
    module and its weights: a copy has its own.

    Attributes:
        restart: what pickling keeps, to place the module again.
        start: if set, places the module at its next call: there were no inputs to plan with, pickling has
            dropped the programs, or the graphs are stale.
        own_code_methods: the methods that run their own code.
        untraced: how a model without a graph runs.
        retry: places such a model at a call that may have a graph.
        step: what a planned training step differentiates.
        move: has the weights moved; None if they must stay.
        moved_for: bytes of the inputs for which they were last moved: only larger ones move them again.
        no_room_for: entry -> bytes of inputs for which no placement has room, so that they are not moved.
        train_called: whether ``train()`` was called last, not ``eval()``, on the placed module.
        copied: whether a copy of the module shares the compiler.
        stale: what calls that ran module by module have changed in the module, as text.
        values: the tensors in attributes whose values were given to the code; None if it may lack some.
        codes: index of a program -> its code, bound to the weights.
        parts: parts of sliced weights on accelerators, by name and device, for all programs.
        stored: the attributes in which programs store tensors, by name.
        run_lock: held by each run, since a plan has memory for one; a move of weights waits for it.
    """

    programs: list[Program]
    compile: Compile | None = None
    signature: inspect.Signature | None = None
    restart: Start | None = None
    keep_grad: bool = False
    return_outputs: bool = True
    refused: Refused | None = None
    start: Start | None = None
    device: torch.device | None = None
    device_types: tuple[str, ...] = ()
    own_code_methods: set[tuple[str, bool]] = field(default_factory=set)
    modular_calls: ModularCalls = field(default_factory=ModularCalls)
    untraced: Untraced | None = None
    retry: Start | None = None
    step: Differentiation | None = None
    move: MoveWeights | None = None
    moved_for: int = 0
    no_room_for: dict[str, int] = field(default_factory=dict)
    warned_of_gradients: bool = False
    train_called: bool = False
    copied: bool = False
    stale: str = ""
    values: Mapping[str, torch.Tensor] | None = field(default=None, init=False)
    codes: dict[int, Code] = field(default_factory=dict, init=False)
    routes: list[CachedRoute] = field(default_factory=list, init=False)
    routes_by_size: dict[tuple[Any, ...], tuple[CachedRoute, ...]] = field(default_factory=dict, init=False)
    reader: ModeReader | None = field(default=None, init=False)
    guard: ModuleGuard | None = field(default=None, init=False)
    stored: dict[str, StoredValue] = field(default_factory=dict, init=False)
    streams: ModuleStreams = field(default_factory=ModuleStreams, init=False)
    parts: dict[tuple[str, torch.device], ResidentPart] = field(default_factory=dict, init=False)
    gradients: GradientCopies = field(default_factory=GradientCopies, init=False)
    run_lock: CallLock = field(default_factory=CallLock, init=False)

    def watch(self, module: nn.Module) -> None:
        """Start to detect changes of the module, whose graphs have just been traced."""
        if self.start is None and self.untraced is None:
            self.modular_calls.watch(module)
            self.reader = self.new_reader(module)
            self.guard = ModuleGuard(module)
            self.expect_stored(module)
            for one, other in permutations(self.programs, 2):  # of calls=
                if (name := one.conflict(other)) is not None:
                    raise NoGraphError(
                        f"one of calls= stores {name}, and another reads a part of it or sets it otherwise: "
                        "leave one of them out, so that it is traced when it is called"
                    )

    def new_reader(self, module: nn.Module) -> ModeReader:
        """Return a reader of the module's modes, for the types of devices on which it is placed."""
        return ModeReader(module, self.device_types)

    def expect_stored(self, module: nn.Module) -> None:
        """Expect the programs so far to store tensors in attributes of the module."""
        assert self.guard is not None
        for name in dict.fromkeys(name for program in self.programs for name in program.stored_names):
            path, _, attribute = name.rpartition(".")
            value = self.stored.setdefault(name, StoredValue(vars(module.get_submodule(path)), attribute))
            value.grows = any(name in program.growing for program in self.programs)
            value.is_read_as([one for program in self.programs for one in program.constants_of(name)])
        self.guard.leave_out(module, frozenset(self.stored))

    def attribute_values(self) -> AttributeValues:
        """Return the attributes that may have changed without a change of the graphs."""
        assert self.guard is not None
        absent = {name for name, value in self.stored.items() if value.is_absent}
        stored = {name: value.to_trace() for name, value in self.stored.items() if name not in absent}
        return AttributeValues(self.guard.values, stored, absent)

    def stored_change(self) -> str | None:
        """Return a description of a change of an attribute in which calls store tensors; None without one."""
        changed = (name for name, value in self.stored.items() if not value.is_expected())
        return next((f"{name!r} is not what a call has stored" for name in changed), None)

    def has_untraced_hooks(self) -> bool:
        """Whether submodules have hooks that graphs do not call."""
        return self.guard is not None and self.guard.has_untraced_hooks(len(self.modular_calls.traced))

    def retrace_at_next_call(self, module: nn.Module, why: str) -> None:
        """Have the module placed again at its next call, and warn why."""
        warn(f"{why}: {type(module).__name__} is traced again, as it is now")
        self.start = self.restart

    @property
    def allows_other_values(self) -> bool:
        """Whether all graphs remain valid if tensors in attributes change their values."""
        return not self.copied and all(program.constant_attributes is not None for program in self.programs)

    def update_constants(self) -> None:
        """Copy the present values of tensors in attributes to the code, unless it has them."""
        for value in self.stored.values():
            value.update_constants()
        current = None if self.guard is None else self.guard.values
        if current is None or current is self.values:
            return
        self.values = current  # set first: a thread that adds a program meanwhile resets it to None
        for program in self.programs:
            for constant, attribute in (program.constant_attributes or {}).items():
                if attribute in current:
                    program.constants[constant].detach().copy_(current[attribute])

    def may_move(self, call: BoundCall) -> bool:
        """Whether weights may move to give a call room: only for larger inputs than the last time."""
        limit = self.no_room_for.get(call.entry, math.inf)
        return self.move is not None and self.moved_for < _input_bytes(call) < limit

    def record_no_room(self, call: BoundCall) -> None:
        """Record that no placement of weights has room for this call, or for larger inputs."""
        self.no_room_for[call.entry] = _input_bytes(call)

    @property
    def known_plan(self) -> PlanData | None:
        """The plan by which the weights of an unpickled module are placed; None for other modules."""
        unpickled = None if self.programs else self.start or self.restart
        return None if unpickled is None else unpickled.known_plan

    @property
    def strict(self) -> bool:
        """Whether a model or call that cannot be traced is an error."""
        return self.refused is None if self.start is None else self.start.strict

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        # each copy has its own constants, since the code may write to them
        copies = {id(t): t.clone() for p in self.programs for t in p.constants.values()}
        programs = [
            replace(p, constants={name: copies[id(tensor)] for name, tensor in p.constants.items()})
            for p in self.programs
        ]
        no_room_for = dict(self.no_room_for)
        self.copied = True
        return replace(
            self, programs=programs, modular_calls=self.modular_calls.copy(), no_room_for=no_room_for
        )

    def __reduce__(self) -> Any:
        return _restored, (self.restart or self.start,)


def _input_bytes(call: BoundCall) -> int:
    return sum(map(tensor_bytes, call.tensors))


def _restored(start: Start) -> ModuleState:
    return ModuleState([], start=start)
