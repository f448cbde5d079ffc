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
    verify_lowered  proof that its tensors meet
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphplan.captured import Capture, Part
from graphplan.checks import check_schedule
from graphplan.device import CPU, DeviceKey, Topology
from graphplan.errors import CaptureError, InfeasibleError
from graphplan.graph import Graph, Weight
from graphplan.ops import constant_attribute
from graphplan.passes.annotate import Annotator, costlier, part_weight
from graphplan.passes.constrain import Wishes, constrain
from graphplan.passes.evaluate import Problem, evaluate
from graphplan.passes.lower import host_device, lower
from graphplan.passes.oversized import find_oversized, offered_parts
from graphplan.passes.place import Solution, place, sketch
from graphplan.passes.simplify import simplify
from graphplan.passes.slicing import is_sliceable, slice_weights
from graphplan.passes.verify import verify_lowered
from graphplan.placement import Plan
from graphplan.runtime.executor import Program
from graphplan.signature import BoundCall, leaf_names
from graphplan.tracing import capture
from graphplan.twin import Twin, tensor_bytes

__all__ = ["Compiler", "Options", "Planned"]

logger = logging.getLogger("graphplan")

_RING_SLACK = 2 << 20  # bytes by which CUDA's allocator may count a larger ring differently
_HOPE = 1.1  # a sketch of more than so many times the seconds of another plan is not worth refining
_SETTLING = 4  # times that a placement is made again because its own moves made operations take more


@dataclass(frozen=True, slots=True)
class Options:
    """What does not change from call to call; as in :func:`graphplan.partition`."""

    dynamic_shapes: Any = None
    grad: bool = False
    return_outputs: bool = True
    wishes: Wishes = field(default_factory=Wishes)


class Compiler:
    """Plans and lowers calls of one model; the first decides where weights are."""

    def __init__(
        self, twin: Twin, topology: Topology, options: Options, homes: dict[str, DeviceKey] | None = None
    ) -> None:
        self.twin, self.topology, self.options = twin, topology, options
        self.homes = homes
        self.captures: list[tuple[tuple[bool, ...], Capture, Annotator]] = []
        self.constants: list[_Constant] = []
        self.plans: list[Plan] = []

    def devices_of_weights(self) -> dict[str, torch.device]:
        """First name of each weight -> its device."""
        assert self.homes is not None
        return {name: self.topology[key].torch_device for name, key in self.homes.items()}

    def plan(self, call: BoundCall | None) -> Planned:
        """Capture, annotate and place."""
        _, annotator = self._capture(call)
        choice = self._choose(self._sliced_as_before(annotator), call)
        problem, solution, captured = choice.problem, choice.solution, choice.annotator.capture
        graph, schedule = problem.graph, solution.evaluation.schedule
        check_schedule(graph, self.topology, schedule)
        _refuse_shared(graph, self.twin)
        evaluation, bound, proof = solution.evaluation, solution.lower_bound, solution.proof
        made = Plan(graph, self.topology, schedule, evaluation.seconds, bound, proof, captured.method)
        return Planned(captured, made)

    def _capture(self, call: BoundCall | None) -> tuple[Capture, Annotator]:
        """Trace a call, unless one of its structure was traced for another device already."""
        modes = self.twin.modes
        for known_modes, captured, annotator in self.captures:
            if call is not None and known_modes == modes and captured.signature.mismatch(call) is None:
                return captured, annotator
        options = self.options
        captured = capture(self.twin, call, options.dynamic_shapes, keep_grad=options.grad)
        simplify(captured, keep_grad=options.grad)
        types = [spec.type for spec in self.topology.devices if spec.computes]
        annotator = Annotator(captured, self.twin.weights, types)
        self.captures.append((modes, captured, annotator))
        return captured, annotator

    def _sliced_as_before(self, annotator: Annotator) -> Annotator:
        """The capture with the parts that earlier plans have placed, of weights that it can read so."""
        known = [part for name in self.homes or () if (part := Part.named(name)) is not None]
        here = [part for part in known if is_sliceable(annotator.capture, part.weight)]
        return annotator.of(slice_weights(annotator.capture, here)) if here else annotator

    def _choose(self, annotator: Annotator, call: BoundCall | None) -> _Choice:
        """Place the graph as it was captured and, where that may help, with weights sliced: the faster."""
        sliced = self._best_slicing(annotator, call) if self.homes is None else None
        if sliced is None:
            return self._settle(annotator, call)
        whole = None
        if sketch(self._constrained(annotator, call)) is not None:
            whole = self._settle(annotator, call)
            if whole.seconds * _HOPE < sliced.seconds:
                return whole
        try:
            found = self._settle(sliced.annotator, call)
        except InfeasibleError:  # the moves that slicing brings made operations take more
            return whole or self._settle(annotator, call)
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
        return constrain(self._problem(annotator, call), self.options.wishes)

    def _problem(self, annotator: Annotator, call: BoundCall | None) -> Problem:
        """What is to be placed, without the caller's rules."""
        constants = annotator.capture.constants
        graph = self._with_constants(annotator.graph(), annotator.capture)
        fixed = {**(self.homes or {}), **self._constant_homes(constants)}
        return Problem(
            graph,
            self.topology,
            self._host(call),
            self.options.return_outputs,
            fixed,
            rings=self._rings(),
            growth=self._ring_limits(),
            streams=not self.options.grad,
        )

    def _settle(self, annotator: Annotator, call: BoundCall | None) -> _Choice:
        """Place the graph, and again where the moves themselves make operations take more.

        The graph that is returned is that of the returned placement: its bytes are exact.
        """
        plain = self._problem(annotator, call)
        problem = constrain(plain, self.options.wishes)
        for _ in range(_SETTLING):
            solution = place(problem)
            moved = self._with_constants(annotator.graph(solution.evaluation.schedule), annotator.capture)
            exact = constrain(replace(plain, graph=moved), self.options.wishes)
            if exact.graph == problem.graph:
                return _Choice(annotator, problem, solution)
            again = evaluate(exact, solution.evaluation.schedule.assignment)
            if again.feasible:
                return _Choice(annotator, exact, replace(solution, evaluation=again))
            problem = replace(exact, graph=costlier(problem.graph, exact.graph))
        return _Choice(annotator, problem, place(problem))

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

    def _with_constants(self, graph: Graph, capture: Capture) -> Graph:
        """The graph with the constants and parts of earlier plans, which take their bytes all the same."""
        others = [
            Weight(other.name, tensor_bytes(other.tensor), (other.name,), "constant", False)
            for other in self._others(capture.constants)
        ]
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

    def first(self, call: BoundCall | None) -> Program:
        """Plan and lower the call that decides where weights are, unless that is settled."""
        planned = self.plan(call)
        weights = planned.plan.graph.weights
        homes = planned.plan.schedule.assignment.weights
        self.homes = {name: key for name, key in homes.items() if weights[name].kind != "constant"}
        return self._lower(planned)

    def further(self, call: BoundCall, modes: Sequence[bool]) -> Program:
        """Plan and lower a call of another structure, with the weights where they are."""
        self.twin.set_modes(modes)
        logger.info("planning a call of a new structure: %s", ", ".join(leaf_names(call)))
        return self._lower(self.plan(call))

    def _lower(self, planned: Planned) -> Program:
        captured, made = planned.capture, planned.plan
        self.plans.append(made)
        graph, schedule = made.graph, made.schedule
        lowered = lower(captured, graph, schedule, self.topology)
        verify_lowered(lowered, graph, schedule, self.topology)
        return Program(
            plan=made,
            signature=captured.signature,
            graph=lowered.graph,
            constants=self._place_constants(captured.constants, schedule.assignment.weights),
            branches=lowered.branches,
            inputs=tuple(captured.inputs.index(name) for name in graph.inputs),
            on_host=frozenset(_read_on_host(made)),
            changed=frozenset(graph.inputs.index(name) for name in graph.changed_inputs),
            host=host_device(schedule, self.topology),
            out_spec=captured.out_spec,
            modes=self.twin.modes,
            prepare=captured.prepare,
        )


@dataclass(frozen=True, slots=True)
class _Choice:
    """A capture, annotated, as a problem, and the solution of it."""

    annotator: Annotator
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
        mine = self.tensor
        alike = origin == self.origin and mine.dtype == tensor.dtype and mine.shape == tensor.shape
        return mine is tensor or (alike and bool(torch.equal(mine, tensor)))


@dataclass(frozen=True, slots=True)
class Planned:
    """A captured call and its plan."""

    capture: Capture
    plan: Plan


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
        if weight.mutated and weight.kind != "constant" and (others := twin.weights.sharing(weight.name)):
            raise CaptureError(
                f"a call writes to {weight.name!r}, which shares memory with {others[0]!r}: make one of them "
                "a view that forward takes, so that the write can be seen in both"
            )
