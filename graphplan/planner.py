"""From a call to a program: the passes in order.

::

    Twin            a copy to trace, without weights of its own
    capture         -> fx graph
    simplify        checks and no-ops go
    Annotator       -> Graph: bytes, FLOPs, aliases
    constrain       what the caller asks for
    place           -> where everything is
    slice_weights   the same again in parts, where no accelerator holds an operation's weight
    check_schedule  proof that nothing passes a budget
    lower           -> fx graph with every move
    quicken         the fastest calls that do the same
    verify_lowered  proof that its tensors meet
    cut_stages      where stages are to be compiled
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from graphplan.captured import Capture, Part
from graphplan.checks import check_schedule
from graphplan.device import CPU, DISK, DeviceKey, Topology
from graphplan.errors import CaptureError, InfeasibleError, InputError
from graphplan.extents import Extents, bounded
from graphplan.graph import Graph, Weight
from graphplan.ops import constant_attribute
from graphplan.passes.annotate import Annotator, costlier, part_weight
from graphplan.passes.constrain import Wishes, constrain
from graphplan.passes.disk import place_or_map
from graphplan.passes.evaluate import Problem, evaluate
from graphplan.passes.joint import Call, place_jointly
from graphplan.passes.limits import Limits
from graphplan.passes.lower import host_device, lower
from graphplan.passes.oversized import find_oversized, offered_parts
from graphplan.passes.place import Solution, sketch
from graphplan.passes.quicken import quicken
from graphplan.passes.shared_rings import fit_together
from graphplan.passes.simplify import simplify
from graphplan.passes.slicing import is_sliceable, slice_weights
from graphplan.passes.stages import cut_stages
from graphplan.passes.verify import verify_lowered
from graphplan.placement import Plan
from graphplan.runtime.executor import Program, State
from graphplan.runtime.storage import Layout
from graphplan.schedule import Assignment, Schedule
from graphplan.signature import BoundCall, TensorLeaf, leaf_names
from graphplan.tracing import capture
from graphplan.twin import Twin, tensor_bytes

__all__ = ["Compiler", "Options", "Planned"]

logger = logging.getLogger("graphplan")

_RING_SLACK = 2 << 20  # bytes by which CUDA's allocator may count a larger ring differently
_HOPE = 1.1  # a sketch of more than so many times the seconds of another plan is not worth refining
_PASSING = ("constant", "cache")  # kinds of weights that are none of the model's own
_SETTLING = 4  # times that a placement is made again because its own moves made operations take more


@dataclass(frozen=True, slots=True)
class Options:
    """What does not change from call to call; as in :func:`graphplan.partition`."""

    dynamic_shapes: Any = None
    grad: bool = False
    return_outputs: bool = True
    wishes: Wishes = field(default_factory=Wishes)
    extents: Extents = field(default_factory=Extents)
    compile: Mapping[str, Any] | None = None
    time_limit: float | None = None

    def __post_init__(self) -> None:
        limit = self.time_limit
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise InputError(f"time_limit must be a positive number of seconds or None, not {limit!r}")


_NOT_ON_DISK = (
    "with several example calls no weight is left on 'disk'; give the most important call alone to use it"
)


class Compiler:
    """Plans and lowers calls of one model; the first decides where weights are."""

    def __init__(
        self,
        twin: Twin,
        topology: Topology,
        options: Options,
        homes: dict[str, DeviceKey] | None = None,
        mappable: Set[str] | None = None,
    ) -> None:
        self.twin, self.topology, self.options = twin, topology, options
        self.homes, self.mappable = homes, mappable
        self.captures: list[_Captured] = []
        self.constants: list[_Constant] = []
        self.plans: list[Plan] = []

    def layout(self) -> Layout:
        """Where the first plans have put the weights, and which of them they stream."""
        assert self.homes is not None
        rings = [ring for plan in self.plans for ring in plan.schedule.rings]
        of = {part.name: part.part_of for plan in self.plans for part in plan.graph.parts}
        streamed = (of.get(n, n) for ring in rings for segment in ring.segments for n in segment.weights)
        return Layout(
            {name: self.topology[key].torch_device for name, key in self.homes.items()},
            [name for name in dict.fromkeys(streamed) if self.homes.get(name) != DISK],
            any(self.topology[ring.device].type == "cuda" for ring in rings),
            frozenset(name for name, key in self.homes.items() if key == DISK),
        )

    def plan(self, call: BoundCall | None, entry: str = "") -> Planned:
        """Capture, annotate and place.

        Args:
            call: what is planned for, with larger sizes as the options say.
            entry: path of the submodule that is called; empty for the model itself.
        """
        if call is None or self.homes is None:
            return self._plan(call, self._capture(call, entry))
        for ahead in (1.0, 0.25):
            try:
                return self._plan(call, self._capture(call, entry, ahead))
            except InfeasibleError as error:  # there is no room for what is to come: what is there may fit
                logger.info("no room for sizes ahead of the call's: %s", error)
        return self._plan(call, self._capture(call, entry))

    def _plan(self, call: BoundCall | None, annotator: Annotator) -> Planned:
        choice = self._choose(self._sliced_as_before(annotator), call)
        asked = Call(choice.plain, choice.wishes, 1.0)
        made = self._planned(choice.annotator.capture, choice.problem, choice.solution, asked)
        return replace(made, call=call)

    def plan_together(self, calls: Sequence[BoundCall], weights: Sequence[float]) -> tuple[Planned, ...]:
        """Capture several calls, and place them over the same homes of weights.

        Calls of one structure are one call with the sum of their weights.
        """
        parts: dict[tuple[int, DeviceKey], _Part] = {}
        for call, weight in zip(calls, weights, strict=True):
            annotator = self._capture(call)
            key = id(annotator), self._host(call)
            before = parts[key].weight if key in parts else 0.0
            parts[key] = _Part(annotator, key[1], before + weight, call)
        found = list(parts.values())
        joint, solutions = self._settle_together(found)
        made = [
            replace(self._planned(part.annotator.capture, call.settled({}), solution, call), call=part.call)
            for part, call, solution in zip(found, joint, solutions, strict=True)
        ]
        first = replace(made[0].plan, others=tuple(planned.plan for planned in made[1:]))
        return replace(made[0], plan=first), *made[1:]

    def _planned(self, captured: Capture, problem: Problem, solution: Solution, call: Call) -> Planned:
        graph, evaluation = problem.graph, solution.evaluation
        check_schedule(graph, self.topology, evaluation.schedule)
        _refuse_shared(graph, self.twin)
        made = Plan(
            graph,
            self.topology,
            evaluation.schedule,
            evaluation.seconds,
            solution.lower_bound,
            solution.proof,
            captured.method,
            call.wishes,
            call.problem.fixed_weights,
            call.weight,
            shared_rings=call.problem.rings,
            ring_limits=call.problem.growth,
            streams=call.problem.streams,
        )
        return Planned(captured, made)

    def _capture(self, call: BoundCall | None, entry: str = "", ahead: float = 0.0) -> Annotator:
        """Trace a call, unless one of its structure was traced before, and bound its sizes."""
        known = self._traced(call, entry)
        capture = known.capture
        bound = capture if call is None else bounded(capture, call, self.options.extents, ahead=ahead)
        for annotator in known.annotators:
            if annotator.capture.signature == bound.signature:
                return annotator
        if known.annotators and call is not None:
            outgrown = known.annotators[-1].capture.signature.mismatch(call)
            logger.info("planning for larger sizes: %s", outgrown)
        types = [spec.type for spec in self.topology.devices if spec.computes]
        known.annotators.append(Annotator(bound, self.twin.weights, types))
        return known.annotators[-1]

    def _traced(self, call: BoundCall | None, entry: str) -> _Captured:
        modes, reason = self.twin.modes, None
        for known in self.captures:
            if call is not None and known.modes == modes and known.capture.entry == entry:
                mismatch = known.capture.signature.mismatch(call)
                if mismatch is None:
                    return known
                alike = known.capture.signature.spec == call.spec
                reason = mismatch if alike or reason is None else reason
        options = self.options
        if call is not None and self.captures:
            what = entry or type(self.twin.module).__name__
            logger.info(
                "capturing another graph of %s for (%s): %s",
                what,
                ", ".join(leaf_names(call)),
                reason or "its modules are in other modes, or it was not called before",
            )
        twin = self.twin.part(entry)
        captured = capture(twin, call, options.dynamic_shapes, keep_grad=options.grad)
        simplify(captured, keep_grad=options.grad)
        _rename_constants(captured, [other.capture for other in self.captures])
        self.captures.append(_Captured(modes, captured, []))
        return self.captures[-1]

    def _sliced_as_before(self, annotator: Annotator) -> Annotator:
        """The capture with the parts that earlier plans have placed, of weights that it can read so."""
        known = [part for name in self.homes or () if (part := Part.named(name)) is not None]
        here = [part for part in known if is_sliceable(annotator.capture, part.weight)]
        return annotator.of(slice_weights(annotator.capture, here)) if here else annotator

    def _choose(self, annotator: Annotator, call: BoundCall | None) -> _Choice:
        """Place the graph as it was captured and, where that may help, with weights sliced: the faster."""
        limits = Limits.within(self.options.time_limit)
        sliced = self._best_slicing(annotator, call) if self.homes is None else None
        if sliced is None:
            return self._settle(annotator, call, limits)
        whole = None
        if sketch(self._constrained(annotator, call)) is not None:
            whole = self._settle(annotator, call, limits.until(0.5))
            if whole.seconds * _HOPE < sliced.seconds:
                return whole
        try:
            found = self._settle(sliced.annotator, call, limits)
        except InfeasibleError:  # the moves that slicing brings made operations take more
            return whole or self._settle(annotator, call, limits)
        return found if whole is None else _faster(whole, found)

    def _best_slicing(self, annotator: Annotator, call: BoundCall | None) -> _Sketch | None:
        """Oversized weights in as many parts as seem best; None where no number of parts would do."""
        wishes, weights = self.options.wishes, self.twin.weights
        named = {*wishes.pin, *(n for g in wishes.together for n in ([g] if isinstance(g, str) else g))}
        capture = annotator.capture
        oversized = [
            one
            for one in find_oversized(self._constrained(annotator, call), named)
            if is_sliceable(capture, one.weight.name) and weights.has_rows(one.weight.name)
        ]
        best: _Sketch | None = None
        for parts in offered_parts(oversized):
            sliced = annotator.of(slice_weights(capture, parts))
            found = sketch(self._constrained(sliced, call))
            if found is not None and best is not None and found.seconds >= best.seconds:
                break
            if found is not None:
                best = _Sketch(sliced, found.seconds)
        return best

    def _constrained(self, annotator: Annotator, call: BoundCall | None) -> Problem:
        plain = self._problem(annotator, call)
        return constrain(plain, self._wishes(plain.graph))

    def _problem(self, annotator: Annotator, call: BoundCall | None) -> Problem:
        """What is to be placed, without the caller's rules."""
        return self._problem_of(self._graph(annotator), annotator, self._host(call), call)

    def _state_homes(self, capture: Capture, call: BoundCall | None) -> dict[str, DeviceKey]:
        """Where the tensors of a call's caches are, as far as accelerators hold them."""
        if call is None:
            return {}
        of = {spec.torch_device: spec.key for spec in self.topology.devices if spec.is_accelerator}
        found = ((name, of.get(call.leaves[leaf].device)) for name, leaf in capture.states.items())
        return {name: key for name, key in found if key is not None}

    def _problem_of(
        self, graph: Graph, annotator: Annotator, host: DeviceKey, call: BoundCall | None
    ) -> Problem:
        """What is asked of one call beside what earlier plans have settled."""
        return Problem(
            graph,
            self.topology,
            host,
            self.options.return_outputs,
            {
                **(self.homes or {}),
                **self._constant_homes(annotator.capture.constants),
                **self._state_homes(annotator.capture, call),
            },
            rings=self._rings(),
            growth=self._ring_limits(),
            streams=not self.options.grad,
        )

    def _wishes(self, graph: Graph) -> Wishes:
        """What the caller asks for; a further call may not run everything that is named there."""
        return self.options.wishes if self.homes is None else self.options.wishes.within(graph)

    def _settle(self, annotator: Annotator, call: BoundCall | None, limits: Limits) -> _Choice:
        """Place the graph, and again where the moves themselves make operations take more.

        The graph that is returned is that of the returned placement: its bytes are exact.
        """
        plain = self._problem(annotator, call)
        wishes = self._wishes(plain.graph)
        problem = constrain(plain, wishes)
        near: Assignment | None = None
        for _ in range(_SETTLING):
            solution = place_or_map(problem, self.mappable, limits, near=near)
            near = solution.evaluation.schedule.assignment
            moved = self._graph(annotator, solution.evaluation.schedule)
            exact = constrain(replace(plain, graph=moved), wishes)
            if exact.graph == problem.graph:
                return _Choice(annotator, plain, wishes, problem, solution)
            again = evaluate(exact, solution.evaluation.schedule.assignment)
            if again.feasible:
                return _Choice(annotator, plain, wishes, exact, replace(solution, evaluation=again))
            problem = replace(exact, graph=costlier(problem.graph, exact.graph))
        solution = place_or_map(problem, self.mappable, limits, near=near)
        return _Choice(annotator, plain, wishes, problem, solution)

    def _settle_together(self, parts: Sequence[_Part]) -> tuple[list[Call], list[Solution]]:
        """As :meth:`_settle`, for several calls."""
        if DISK in self.topology:
            warnings.warn(_NOT_ON_DISK, stacklevel=5)
        union: dict[str, torch.Tensor] = {}
        for part in parts:
            union |= part.annotator.capture.constants
        states = [name for part in parts for name in part.annotator.capture.states]
        calls = []
        for part in parts:
            graph = self._graph(part.annotator, union=union, states=states)
            plain = self._problem_of(graph, part.annotator, part.host, part.call)
            calls.append(Call(plain, self.options.wishes.within(plain.graph), part.weight))
        _check_named(self.options.wishes, calls)
        limits = Limits.within(self.options.time_limit)
        for _ in range(_SETTLING):
            solutions = place_jointly(calls, limits)
            moved = [
                self._graph(part.annotator, found.evaluation.schedule, union, states)
                for part, found in zip(parts, solutions, strict=True)
            ]
            exact = [
                replace(call, problem=replace(call.problem, graph=graph))
                for call, graph in zip(calls, moved, strict=True)
            ]
            again = fit_together(
                [call.settled({}) for call in exact],
                [found.evaluation.schedule.assignment for found in solutions],
            )
            if all(found.feasible for found in again):
                judged = zip(solutions, again, strict=True)
                return exact, [replace(solution, evaluation=found) for solution, found in judged]
            calls = [
                replace(new, problem=replace(new.problem, graph=costlier(old.problem.graph, graph)))
                for old, new, graph in zip(calls, exact, moved, strict=True)
            ]
        return calls, list(place_jointly(calls, limits))

    def _rings(self) -> dict[DeviceKey, int]:
        """Bytes of the rings that earlier plans of this model have made."""
        sizes: dict[DeviceKey, int] = {}
        for ring in (ring for made in self.plans for ring in made.schedule.rings):
            sizes[ring.device] = max(ring.nbytes, sizes.get(ring.device, 0))
        return sizes

    def _ring_limits(self) -> dict[DeviceKey, int]:
        """Bytes that the rings may have so that earlier plans keep their budgets."""
        here = self._rings()
        limits: dict[DeviceKey, int] = {}
        for made in self.plans:
            for spec in self.topology.devices:
                own = sum(ring.nbytes for ring in made.schedule.rings if ring.device == spec.key)
                slack = _RING_SLACK if spec.type == "cuda" else 0
                limit = max(own + spec.room - made.peak_bytes[spec.key] - slack, here.get(spec.key, 0))
                limits[spec.key] = min(limit, limits.get(spec.key, limit))
        return limits

    def _known(self, name: str, tensor: torch.Tensor) -> _Constant | None:
        """The constant of an earlier plan that has the same name and values."""
        return next((known for known in self.constants if known.is_same(name, tensor)), None)

    def _constant_homes(self, constants: Mapping[str, torch.Tensor]) -> dict[str, DeviceKey]:
        """Where constants are already: by the names of this capture, and those of others."""
        here = {n: known.key for n, t in constants.items() if (known := self._known(n, t)) is not None}
        return {**here, **{other.name: other.key for other in self._others(constants)}}

    def _others(self, constants: Mapping[str, torch.Tensor]) -> list[_Constant]:
        """Constants of earlier plans that this capture has not: they stay where they are."""
        return [
            known
            for known in self.constants
            if not any(known.is_same(name, tensor) for name, tensor in constants.items())
        ]

    def _graph(
        self,
        annotator: Annotator,
        schedule: Schedule | None = None,
        union: Mapping[str, torch.Tensor] | None = None,
        states: Sequence[str] = (),
    ) -> Graph:
        """The graph with the constants and parts of other calls, which take their bytes all the same.

        Args:
            annotator: of one call.
            schedule: as in :meth:`Annotator.graph`.
            union: constants of all calls that are planned together with it.
            states: tensors of all their caches.
        """
        kinds = {spec.key: spec.type for spec in self.topology.devices}
        graph, capture = annotator.graph(schedule, kinds), annotator.capture
        beside = {other.name: other.tensor for other in self._others({**capture.constants, **(union or {})})}
        beside |= {n: tensor for n, tensor in (union or {}).items() if n not in capture.constants}
        others = [
            Weight(name, tensor_bytes(tensor), (name,), "constant", False) for name, tensor in beside.items()
        ]
        others += [Weight(name, 0, (name,), "cache", False) for name in states if name not in capture.states]
        for name, key in (self.homes or {}).items():
            part = Part.named(name)
            if part is not None and name not in capture.parts:
                kept = part_weight(graph.weights[part.weight], part)
                nbytes = kept.nbytes if self.topology[key].is_accelerator else 0  # else a view
                others.append(replace(kept, nbytes=nbytes, part_of=""))
        if not others:
            return graph
        parts = (graph.operations.values(), graph.values.values(), [*graph.weights.values(), *others])
        return Graph(*parts, graph.inputs, graph.outputs, graph.together, shapes_known=graph.shapes_known)

    def _place_constants(
        self, constants: Mapping[str, torch.Tensor], homes: Mapping[str, DeviceKey]
    ) -> dict[str, torch.Tensor]:
        """Each constant on its device: one tensor for all plans that have it."""
        placed = {}
        for name, tensor in constants.items():
            known = self._known(name, tensor)
            if known is None:
                device = self.topology[homes[name]].torch_device
                copy = tensor.detach().to(device, copy=True)
                known = _Constant(f"{name}@{len(self.constants)}", name, tensor, homes[name], copy)
                self.constants.append(known)
            placed[constant_attribute(name)] = known.placed
        return placed

    def _host(self, call: BoundCall | None) -> DeviceKey:
        """The key of the device where the caller's tensors are; meta ones are taken to be on the CPU."""
        device = call.device if call is not None else None
        if device is None or device.type == "meta":
            device = torch.device(CPU)
        for spec in self.topology.devices:
            if spec.computes and spec.torch_device == device:
                return spec.key
        return str(device)

    def first(self, call: BoundCall | None, entry: str = "") -> Program:
        """Plan and lower the call that decides where weights are, unless that is settled."""
        planned = self.plan(call, entry)
        self._settle_homes(planned.plan)
        return self._lower(planned)

    def first_together(self, calls: Sequence[BoundCall], weights: Sequence[float]) -> list[Program]:
        """Plan and lower the calls that decide together where weights are."""
        planned = self.plan_together(calls, weights)
        self._settle_homes(planned[0].plan)
        return [self._lower(one) for one in planned]

    def _settle_homes(self, made: Plan) -> None:
        weights, homes = made.graph.weights, made.schedule.assignment.weights
        self.homes = {name: key for name, key in homes.items() if weights[name].kind not in _PASSING}

    def further(self, call: BoundCall, modes: Sequence[bool], entry: str = "") -> Program:
        """Plan and lower a call of another structure, with the weights where they are."""
        self.twin.set_modes(modes)
        return self._lower(self.plan(call, entry))

    def _lower(self, planned: Planned) -> Program:
        captured, made = planned.capture, planned.plan
        self.plans.append(made)
        graph, schedule = made.graph, made.schedule
        lowered = lower(captured, graph, schedule, self.topology)
        quicken(lowered.graph, keep_grad=self.options.grad)
        verify_lowered(lowered, graph, schedule, self.topology)
        code, attributes = lowered.graph, dict[str, nn.Module](lowered.branches)
        if self.options.compile is not None:
            staged = cut_stages(code, schedule.assignment.operations, attributes)
            code = staged.graph
            for name, stage in staged.stages.items():
                attributes[name] = cast(nn.Module, torch.compile(stage, **self.options.compile))
        return Program(
            plan=made,
            signature=captured.signature,
            graph=code,
            constants=self._place_constants(captured.constants, schedule.assignment.weights),
            attributes=attributes,
            inputs=tuple(captured.inputs.index(n) for n in (*graph.inputs, *_states_of(captured, graph))),
            states=self._states(captured, made, planned.call),
            caches=captured.caches,
            entry=captured.entry,
            dense=_made_dense(captured, graph),
            on_host=frozenset(_read_on_host(made)),
            changed=frozenset(graph.inputs.index(name) for name in graph.changed_inputs),
            host=host_device(schedule, self.topology),
            out_spec=captured.out_spec,
            modes=self.twin.modes,
            prepare=captured.prepare,
        )

    def _states(self, captured: Capture, made: Plan, call: BoundCall | None) -> tuple[State, ...]:
        """Where each tensor of the caller's caches is to be."""
        found = []
        for position, name in enumerate(_states_of(captured, made.graph), len(made.graph.inputs)):
            home = self.topology[made.schedule.assignment.weights[name]].torch_device
            leaf = captured.states[name]
            here = home if call is None else call.leaves[leaf].device
            found.append(State(position, leaf, home, torch.device(CPU) if here.type == "meta" else here))
        return tuple(found)


def _made_dense(captured: Capture, graph: Graph) -> tuple[int, ...]:
    """Positions of the inputs that may have any strides: they were traced with the usual ones."""
    found = []
    for position, name in enumerate(graph.inputs):
        index = captured.order[captured.inputs.index(name)] if captured.order else None
        leaf = None if index is None else captured.signature.leaves[index]
        if isinstance(leaf, TensorLeaf) and leaf.stride == () and leaf.shape:
            found.append(position)
    return tuple(found)


def _states_of(captured: Capture, graph: Graph) -> list[str]:
    """The caches' tensors in the order in which the code takes them."""
    return [name for name in graph.weights if name in captured.states]


@dataclass(frozen=True, slots=True)
class _Choice:
    """A capture, annotated, as a problem, and the solution of it.

    Attributes:
        annotator: of the capture.
        plain: the problem without the caller's wishes.
        wishes: of the caller.
        problem: with them.
        solution: of the problem.
    """

    annotator: Annotator
    plain: Problem
    wishes: Wishes
    problem: Problem
    solution: Solution

    @property
    def seconds(self) -> float:
        """Of one call, as modelled."""
        return self.solution.evaluation.seconds


def _faster(whole: _Choice, sliced: _Choice) -> _Choice:
    """The faster of two placements, with the lower of their bounds, which holds for both graphs."""
    best = min(whole, sliced, key=lambda choice: choice.seconds)
    least = min(whole, sliced, key=lambda choice: choice.solution.lower_bound).solution
    proof = least.proof + (", with weights sliced" if least is sliced.solution else "")
    return replace(best, solution=replace(best.solution, lower_bound=least.lower_bound, proof=proof))


@dataclass(frozen=True, slots=True)
class _Sketch:
    """A capture, annotated, and the seconds of a placement of it that was found without much work."""

    annotator: Annotator
    seconds: float


@dataclass(frozen=True, slots=True)
class _Constant:
    """A constant of the code that an earlier plan has placed.

    Attributes:
        name: unique among plans.
        origin: its name in the capture.
        tensor: its values, as traced.
        key: where it is.
        placed: it, there.
    """

    name: str
    origin: str
    tensor: torch.Tensor
    key: DeviceKey
    placed: torch.Tensor

    def is_same(self, origin: str, tensor: torch.Tensor) -> bool:
        """Whether a capture's constant is this one."""
        return self.tensor is tensor or (origin == self.origin and _same(self.tensor, tensor))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = a.dtype == b.dtype and a.shape == b.shape
    return a is b or (alike and bool(torch.equal(a, b)))


@dataclass(frozen=True, slots=True)
class _Part:
    """One of several calls: what was captured, where the caller's tensors are, its weight, it itself."""

    annotator: Annotator
    host: DeviceKey
    weight: float
    call: BoundCall


@dataclass(frozen=True, slots=True)
class _Captured:
    """What was traced, for all sizes, in some modes of the modules; and annotated, for some sizes."""

    modes: tuple[bool, ...]
    capture: Capture
    annotators: list[Annotator]


def _rename_constants(captured: Capture, others: Sequence[Capture]) -> None:
    """Let constants of different values have different names in all captures of one model."""
    for name, tensor in list(captured.constants.items()):
        known = [other.constants[name] for other in others if name in other.constants]
        if all(_same(mine, tensor) for mine in known):
            continue
        new = f"{name}_of_capture_{len(others)}"
        captured.constants[new] = captured.constants.pop(name)
        for node, weight in captured.weights.items():
            if weight == name:
                captured.weights[node] = new


def _check_named(wishes: Wishes, calls: Sequence[Call]) -> None:
    """Raise PlanError for a name that the caller gives and that runs in none of the calls."""
    pinned = {name for call in calls for name in call.wishes.pin}
    grouped = {name for call in calls for group in call.wishes.together for name in group}
    groups = [[group] if isinstance(group, str) else group for group in wishes.together]
    lost = [name for group in groups for name in group if name not in grouped]
    pin = {name: key for name, key in wishes.pin.items() if name not in pinned}
    constrain(calls[0].problem, replace(wishes, pin=pin, together=lost))


@dataclass(frozen=True, slots=True)
class Planned:
    """A captured call, its plan, and the example that it was planned for."""

    capture: Capture
    plan: Plan
    call: BoundCall | None = None


def _read_on_host(made: Plan) -> list[int]:
    """Inputs that an operation on the caller's device reads without a move."""
    host, graph = made.schedule.host, made.graph
    read = {
        name
        for run in made.schedule.runs()
        if run.device == host and not graph.operations[run.operation].host_only
        for name in graph.operations[run.operation].inputs
    }
    return [index for index, name in enumerate(graph.inputs) if name in read]


def _refuse_shared(graph: Graph, twin: Twin) -> None:
    """Weights that are views of one memory are placed apart, which a call that writes would show."""
    for weight in graph.weights.values():
        if weight.mutated and weight.kind not in _PASSING and (others := twin.weights.sharing(weight.name)):
            raise CaptureError(
                f"a call writes to {weight.name!r}, which shares memory with {others[0]!r}: make one of them "
                "a view that forward takes, so that the write can be seen in both"
            )
