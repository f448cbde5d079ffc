"""The module that a user calls: the model itself, with placed weights and generated code inside.

A placed module is of a class made from the model's own, with the same name, so that it answers to
everything that the model did; only ``forward`` is new. It looks for the program whose input structure
fits the call, has one made if there is none, and runs it.

Several threads may call one module. Calls that stream weights follow one another, since they share the
slots; the others run at the same time.
"""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphplan.caches import Part, layout_of
from graphplan.device import DeviceKey
from graphplan.errors import CaptureError, InputError, NoGraphError, PlanError
from graphplan.ops import constant_attribute, part_attribute, stream_attribute
from graphplan.runtime.binding import BoundCode
from graphplan.runtime.mapped import MappedFile
from graphplan.runtime.modulewise import Modulewise
from graphplan.runtime.pages import HostPages
from graphplan.runtime.parts import ModuleParts, rows_of
from graphplan.runtime.pretrained import answers
from graphplan.runtime.profile import Profile, Recorder
from graphplan.runtime.results import Rebuild, rebuilder
from graphplan.runtime.routes import Route, find_route
from graphplan.runtime.streams import ModuleStreams
from graphplan.signature import BoundCall, InputSignature, bind_call
from graphplan.twin import method_of

if TYPE_CHECKING:
    from graphplan.placement import Plan  # which lies above, since a plan can be asked for others

__all__ = ["PlacedModule", "Program", "State", "attach", "attach_start", "placed_class", "unplaced"]


@dataclass(frozen=True, slots=True)
class State:
    """A tensor of a cache that the caller passes in.

    Attributes:
        position: of its placeholder in the code.
        leaf: its index among the leaves of the caller's call.
        home: the device on which it is used, and stays.
        found: the device on which it was when the call was planned: from there it is brought home.
    """

    position: int
    leaf: int
    home: torch.device
    found: torch.device


@dataclass(frozen=True, slots=True)
class Program:
    """One call structure, planned and lowered.

    Attributes:
        plan: what the code carries out.
        signature: which calls it serves.
        graph: from the call's tensors to a flat tuple of results.
        constants: attribute name -> tensor that the code lifted out of the model's.
        attributes: name -> module that the code calls: a graph of a control-flow operation, a stage.
        inputs: for each placeholder, the index of its leaf.
        on_host: those of the placeholders that are read where the caller's tensors were planned
            to be, without a move.
        changed: those of the placeholders that the call writes to.
        host: the device where the caller's tensors were planned to be.
        out_spec: the structure of the result.
        modes: training or not, for each module, as traced.
        prepare: turns the caller's arguments into the traced ones, or None.
        states: the tensors of the caller's caches, and where each is to be.
        caches: names of the arguments that are caches.
        entry: path of the submodule whose call it serves; empty for the module itself.
        dense: those of the placeholders that are made contiguous.
    """

    plan: Plan
    signature: InputSignature
    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]
    attributes: Mapping[str, nn.Module]
    inputs: tuple[int, ...]
    on_host: frozenset[int]
    changed: frozenset[int]
    host: torch.device
    out_spec: pytree.TreeSpec
    modes: tuple[bool, ...]
    prepare: Callable[[BoundCall], BoundCall] | None = None
    states: tuple[State, ...] = ()
    caches: tuple[str, ...] = ()
    entry: str = ""
    dense: tuple[int, ...] = ()

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether the caches of a call are where the plan has them, or where they were when it was made."""
        return all((device := leaves[s.leaf].device) == s.home or device == s.found for s in self.states)

    def at_home(self, leaves: Sequence[Any]) -> bool:
        """As :meth:`takes`, of the leaves of the code's inputs."""
        inputs = self.inputs
        for state in self.states:
            device = leaves[inputs[state.position]].device
            if device != state.home and device != state.found:
                return False
        return True

    @property
    def streams(self) -> bool:
        """Whether it copies weights through a ring, so that its calls must follow one another."""
        return any(ring.segments for ring in self.plan.schedule.rings)


_MANY = 32
_MANY_PROGRAMS = (
    f"{_MANY} call structures have been captured for one model: an argument that is no tensor (a float, a "
    "string) may differ from call to call, or sizes may: pass tensors, or dynamic_shapes"
)

Compile = Callable[[BoundCall, Sequence[bool], str], Program]
Record = Callable[[Program, fx.GraphModule], Recorder]
Start = Callable[[nn.Module, Sequence[Any], Mapping[str, Any], str], nn.Module]
Refused = Callable[[NoGraphError], None]
"""Warns of a call structure that no capture takes, or raises."""


_training = attrgetter("training")
_ROUTES = 16  # forms of calls that are remembered


@dataclass(frozen=True, slots=True)
class _Code:
    """The code of one program, ready to run on one module's weights."""

    module: fx.GraphModule
    bound: BoundCode | Recorder
    rebuild: Rebuild


@dataclass(frozen=True, slots=True)
class _Known:
    """A form of call that has been served, and by which program."""

    route: Route
    index: int
    caches: tuple[tuple[str, int | str], ...]  # with the position or name of the argument that each is


@dataclass(frozen=True, slots=True)
class _Served:
    """A call as its program takes it: the leaves of its inputs, and the caches that it was given."""

    index: int
    leaves: Sequence[Any]
    caches: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Modulewise:
    """A call that no program serves: which of the forms that run module by module it has."""

    form: int
    call: BoundCall


@dataclass
class _State:
    """What a placed module keeps beside the model's own attributes.

    ``codes`` are bound to one module's weights, so a copy of the module makes its own.
    ``start`` places the module at its next call: where there were no inputs to plan with, and where
    pickling has dropped the programs. ``restart`` is what pickling keeps for that.
    """

    programs: list[Program]
    compile: Compile | None = None
    signature: inspect.Signature | None = None
    restart: Any = None
    keep_grad: bool = False
    return_outputs: bool = True
    refused: Refused | None = None
    start: Start | None = None
    device: torch.device | None = None
    codes: dict[int, _Code] = field(default_factory=dict)
    routes: list[_Known] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    streams: ModuleStreams = field(default_factory=ModuleStreams)
    parts: ModuleParts = field(default_factory=ModuleParts)
    modulewise: Modulewise = field(default_factory=Modulewise)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        # constants of the code may be written to, so each copy has its own
        own = {id(t): t.clone() for p in self.programs for t in p.constants.values()}
        programs = [
            replace(p, constants={name: own[id(tensor)] for name, tensor in p.constants.items()})
            for p in self.programs
        ]
        copied = replace(self, programs=programs, codes={}, routes=[], modules=[])
        copied.modulewise = self.modulewise.renewed()
        copied.streams, copied.parts, copied.lock = ModuleStreams(), ModuleParts(), threading.RLock()
        return copied

    def __reduce__(self) -> Any:
        return _restored, (self.restart if self.start is None else self.start,)


def _restored(start: Start) -> _State:
    return _State([], start=start)


class PlacedModule(nn.Module):
    """What :func:`graphplan.partition` makes of a model's class."""

    _graphplan: _State

    @property
    def plan(self) -> Plan:
        """The plan of the first call structure.

        Raises:
            PlanError: nothing has been captured yet.
        """
        known: Plan | None = getattr(self._graphplan.start, "known_plan", None)
        return self._first().plan if known is None else known

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
        return tuple(_code_of(self, index).module for index in range(len(self._graphplan.programs)))

    @property
    def graph_module(self) -> fx.GraphModule:
        """The generated code of the first call structure; PlanError as :attr:`plan`."""
        self._first()
        return _code_of(self, 0).module

    @property
    def code(self) -> str:
        """The generated Python of the first call structure."""
        return str(self.graph_module.code)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the placed model on the model's own arguments."""
        return self._enter("", self._graphplan.signature, args, kwargs)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run one call and measure it: its timeline and peaks, beside the modelled ones.

        Call the module before, so that what only the first call does is not measured. On a simulated
        machine peaks are measured from now on.
        """
        recorders: list[Recorder] = []

        def record(program: Program, code: fx.GraphModule) -> Recorder:
            recorders.append(Recorder(code, program.plan))
            return recorders[0]

        self._enter("", self._graphplan.signature, args, kwargs, record)
        measured = recorders[0].measured
        assert measured is not None
        return Profile(recorders[0].plan, measured)

    def _enter(
        self,
        entry: str,
        signature: inspect.Signature | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: Record | None = None,
    ) -> Any:
        """Run the module, or a submodule of it, on its own arguments."""
        with self._graphplan.lock:
            if self._graphplan.start is not None:
                started = self._graphplan.start(self, args, kwargs, entry)
                self.__dict__.clear()
                self.__dict__.update(started.__dict__)
                if not isinstance(started, PlacedModule):  # hooks run it
                    self.__class__ = type(started)  # type: ignore[assignment]  # of the same original
                    if record is not None:
                        raise PlanError("hooks run this model, there is no graph to profile")
                    return method_of(self, entry)(*args, **kwargs)
        state = self._graphplan
        signature = signature or state.signature
        assert signature is not None
        state.streams.check_files()
        with torch.set_grad_enabled(torch.is_grad_enabled() and state.keep_grad):
            with state.lock:
                served = self._serve(entry, signature, args, kwargs)
                if isinstance(served, _Modulewise):
                    return self._run_modulewise(served, record)
                program, code = state.programs[served.index], _code_of(self, served.index)
                if record is not None:
                    code = replace(code, bound=record(program, code.module))
                if program.streams:
                    return _run(self, program, code, served)
            return _run(self, program, code, served)

    def _serve(
        self, entry: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Served | _Modulewise:
        """The program that serves a call, and what it takes of it; or that no program does."""
        state = self._graphplan
        if not state.modules:
            state.modules = list(self.modules())[1:]  # not itself: that would be a cycle
        modes = (self.training, *map(_training, state.modules))
        for known in state.routes:
            program = state.programs[known.index]
            if program.modes == modes and program.entry == entry:
                leaves = known.route.leaves(args, kwargs, program.host)
                if leaves is not None and program.at_home(leaves):
                    given = {
                        name: args[at] if isinstance(at, int) else kwargs[at] for name, at in known.caches
                    }
                    return _Served(known.index, leaves, given)
        call = bind_call(signature, args, kwargs)
        index = self._find(entry, call, modes)
        if isinstance(index, _Modulewise):
            return index
        program = state.programs[index]
        route = find_route(signature, program.signature, program.prepare, args, kwargs)
        if route is not None:
            places = _places(signature, program.caches, kwargs)
            state.routes = [_Known(route, index, places), *state.routes[: _ROUTES - 1]]
        given = {name: call.kwargs[name] for name in program.caches}
        traced = call if program.prepare is None else program.prepare(call)
        return _Served(index, traced.leaves, given)

    def _find(self, entry: str, call: BoundCall, modes: tuple[bool, ...]) -> int | _Modulewise:
        state = self._graphplan
        device = call.device
        for index, program in enumerate(state.programs):
            here = program.entry == entry and (device is None or device == program.host)
            alike = here and program.modes == modes and program.signature.mismatch(call) is None
            if alike and program.takes(call.leaves):
                return index
        form = state.modulewise.find(entry, call, modes)
        if form is not None:
            return _Modulewise(form, call)
        assert state.compile is not None
        try:
            state.programs.append(state.compile(call, modes, entry))
        except NoGraphError as error:
            if state.refused is None:
                raise
            state.refused(error)
            return _Modulewise(state.modulewise.note(entry, call, modes), call)
        _share_rings(state.programs)
        if len(state.programs) == _MANY:
            warnings.warn(_MANY_PROGRAMS, stacklevel=5)
        return len(state.programs) - 1

    def _run_modulewise(self, served: _Modulewise, record: Record | None) -> Any:
        if record is not None:
            raise PlanError("modules run this call one by one, there is no graph to profile")
        state = self._graphplan
        plain, home = unplaced(self), state.return_outputs
        return state.modulewise.run(self, plain, served.form, served.call, home=home)

    def __reduce_ex__(self, protocol: Any) -> Any:
        original = type(self).__mro__[2]
        return _rebuild, (original,), self.__dict__


def _places(
    signature: inspect.Signature, names: Sequence[str], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, int | str], ...]:
    """For each argument, its position or its name in a call."""
    order = list(signature.parameters)
    return tuple((name, name if name in kwargs else order.index(name)) for name in names)


def _rebuild(original: type[nn.Module]) -> nn.Module:
    cls = placed_class(original)
    return cls.__new__(cls)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def placed_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class of the placed copies of a model, under the model's own name."""
    if original not in _classes:
        names = ("__module__", "__qualname__", "__doc__")
        body = {name: getattr(original, name) for name in names} | answers(PlacedModule, original)
        _classes[original] = type(original.__name__, (PlacedModule, original), body)
    return _classes[original]


def unplaced(module: nn.Module) -> nn.Module:
    """The module as its own class, with the attributes and weights that it has now."""
    original: type[nn.Module] = type(module).__mro__[2]
    plain = object.__new__(original)
    plain.__dict__.update({k: v for k, v in module.__dict__.items() if k != "_graphplan"})
    return plain


def attach(
    module: nn.Module,
    programs: list[Program],
    compile: Compile,
    signature: inspect.Signature,
    restart: Start,
    *,
    keep_grad: bool,
    return_outputs: bool,
    refused: Refused | None = None,
    memory: Sequence[HostPages | MappedFile] = (),
) -> None:
    """Give a placed copy its programs, the way to make more, and the memory of its weights."""
    _refuse_names(module)
    state = _State(programs, compile, signature, restart, keep_grad, return_outputs, refused)
    state.streams.pages.extend(memory)
    module.__dict__["_graphplan"] = state
    for index in range(len(programs)):
        _code_of(cast(PlacedModule, module), index)  # takes the ring's memory now, while it is there


def attach_start(module: nn.Module, start: Start) -> None:
    """Give a copy that is not placed yet the way to be, at its first call."""
    _refuse_names(module)
    module.__dict__["_graphplan"] = _State([], start=start)


def _refuse_names(module: nn.Module) -> None:
    """Names of children that would hide behind attributes of the generated module."""
    taken = set(dir(PlacedModule)) | set(dir(fx.GraphModule))
    children = {*module._modules, *module._parameters, *module._buffers}
    own = set(dir(nn.Module))
    if hidden := sorted(children & (taken - own)):
        raise CaptureError(
            f"the model has a child named {hidden[0]!r}, an attribute of generated modules: rename it"
        )


def _share_rings(programs: list[Program]) -> None:
    """Let every plan count the rings as large as any call structure needs them."""
    sizes: dict[DeviceKey, int] = {}
    for ring in (ring for program in programs for ring in program.plan.schedule.rings):
        sizes[ring.device] = max(ring.nbytes, sizes.get(ring.device, 0))
    if sizes:
        programs[:] = [replace(program, plan=program.plan.with_rings(sizes)) for program in programs]


def _code_of(module: PlacedModule, index: int) -> _Code:
    """The program's code over the module's weights."""
    state = module._graphplan
    found = state.codes.get(index)
    if found is None:
        program = state.programs[index]
        code = _graph_module(module, program)
        rebuild = rebuilder(program.out_spec, _layouts(program))
        found = state.codes[index] = _Code(code, BoundCode(code), rebuild)
    return found


def _layouts(program: Program) -> dict[str, Part]:
    """The layout of each cache that the caller passes in."""
    named = program.signature.spec.children()[1]
    specs = dict(zip(named.context, named.children(), strict=True))
    return {name: layout_of(specs[name]) for name in program.caches}


def _graph_module(module: PlacedModule, program: Program) -> fx.GraphModule:
    """The code and the module: one namespace, seen through two objects."""
    found = fx.GraphModule(nn.Module(), fx.Graph(), class_name=type(module).__name__)
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        found.__dict__[name] = module.__dict__[name]
    for name, tensor in program.constants.items():
        found.__dict__[name] = tensor
    found.__dict__.update(program.attributes)
    _bind_streams(module, program, found)  # before parts are copied: it may bring the whole elsewhere
    _bind_parts(module, program, found)
    found.graph = copy.deepcopy(program.graph)
    found.graph.owning_module = None  # a cycle would keep device memory until the next collection
    found.training = module.training
    return found


def _bind_streams(module: PlacedModule, program: Program, code: fx.GraphModule) -> None:
    """Give the code what copies its segments."""
    state, plan = module._graphplan, program.plan
    rings = {plan.devices[ring.device]: ring for ring in plan.schedule.rings}
    if not rings:
        return
    weights = dict(_named_tensors(module))
    for weight in plan.graph.weights.values():
        if weight.kind == "constant" and constant_attribute(weight.name) in program.constants:
            weights[weight.name] = program.constants[constant_attribute(weight.name)]
    if state.streams.must_grow(rings):
        state.codes.clear()  # they hold on to the smaller ring
    parts = plan.graph.parts
    state.streams.prepare(rings, {**weights, **{part.name: weights[part.part_of] for part in parts}})
    weights.update({part.name: rows_of(weights[part.part_of], part) for part in parts})
    for index, (device, ring) in enumerate(rings.items()):
        if ring.segments:
            code.__dict__[stream_attribute(index)] = state.streams.bind(device, ring, weights)


def _bind_parts(module: PlacedModule, program: Program, code: fx.GraphModule) -> None:
    """Give the code the parts of sliced weights that are kept on accelerators."""
    plan = program.plan
    if not plan.graph.parts:
        return
    weights, home = dict(_named_tensors(module)), plan.schedule.assignment.weights
    for index, part in enumerate(plan.graph.parts):
        if home[part.name] != home[part.part_of]:
            device = plan.devices[home[part.name]]
            kept = module._graphplan.parts.keep(part, weights[part.part_of], device)
            code.__dict__[part_attribute(index)] = kept


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _run(module: PlacedModule, program: Program, code: _Code, served: _Served) -> Any:
    leaves = served.leaves
    tensors = [leaves[index] for index in program.inputs]
    if program.changed:
        _refuse_overlap(program, tensors)
    back: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position in program.on_host:
        tensor = tensors[position]
        if isinstance(tensor, torch.Tensor) and tensor.device != program.host:
            tensors[position] = tensor.to(program.host)
            if position in program.changed:
                back.append((tensor, tensors[position]))
    for position in program.dense:
        tensors[position] = tensors[position].contiguous()
    for state in program.states:
        if tensors[state.position].device != state.home:
            tensors[state.position] = tensors[state.position].to(state.home)
    try:
        results = code.bound(tensors)
    except RuntimeError as error:
        _explain_moved_weights(module, program.plan, error)
        raise
    for original, changed in back:
        original.copy_(changed)
    return code.rebuild(results, served.caches)


def _refuse_overlap(program: Program, tensors: Sequence[Any]) -> None:
    """A call that writes to an input cannot be given the same memory as another input."""
    seen: dict[int, int] = {}
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            first = seen.setdefault(tensor.untyped_storage()._cdata, position)
            if first != position and {first, position} & program.changed:
                names = program.signature.names
                one, two = names[program.inputs[first]], names[program.inputs[position]]
                raise InputError(
                    f"{one} and {two} share memory, and the model writes to it: pass a copy of one"
                )


def _explain_moved_weights(module: PlacedModule, plan: Plan, error: RuntimeError) -> None:
    """Where weights are no longer where the plan has put them, say so instead of torch."""
    named = dict(_named_tensors(module))
    for name, key in plan.placement.items():
        planned = plan.devices[key]
        tensor = named.get(name)
        if tensor is None or tensor.device != planned:
            where = "gone" if tensor is None else f"on {tensor.device}"
            raise PlanError(
                f"{name!r} is {where}, the plan has it on {planned}: a placed model cannot be moved, only "
                "partitioned anew"
            ) from error
