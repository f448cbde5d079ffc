"""From a model to a placed, runnable module: the passes in order.

::

    Twin            a copy to trace, without weights of its own
    capture         -> fx graph
    simplify        checks and no-ops go
    annotate        -> Graph: bytes, FLOPs, aliases
    place           -> where everything is
    check_schedule  proof that nothing passes a budget
    lower           -> fx graph with every move
    verify_lowered  proof that its tensors meet
    place_model     weights onto their devices
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphplan.checks import check_schedule
from graphplan.device import (
    CPU,
    DeviceKey,
    Link,
    MaxMemory,
    Topology,
    read_max_memory,
    require_present,
)
from graphplan.errors import CaptureError, InputError
from graphplan.passes.annotate import Annotator, costlier
from graphplan.passes.constrain import Wishes, constrain
from graphplan.passes.evaluate import Problem, evaluate
from graphplan.passes.lower import constant_attribute, host_device, lower
from graphplan.passes.place import Solution, place
from graphplan.passes.simplify import simplify
from graphplan.passes.verify import verify_lowered
from graphplan.placement import Plan
from graphplan.runtime.executor import Program, attach, attach_start, placed_class
from graphplan.runtime.loading import read_checkpoint
from graphplan.runtime.storage import place_model, require_data
from graphplan.signature import BoundCall, leaf_names
from graphplan.tracing import Capture, Twin, capture

__all__ = ["partition", "plan"]

logger = logging.getLogger("graphplan")

_SETTLING = 4  # times that a placement is made again because its own moves made operations take more

Links = Mapping[tuple[DeviceKey, DeviceKey], Link]


@dataclass(frozen=True, slots=True)
class _Options:
    dynamic_shapes: Any = None
    grad: bool = False
    return_outputs: bool = True
    wishes: Wishes = field(default_factory=Wishes)


def plan(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    links: Links | None = None,
    return_outputs: bool = True,
    pin: Mapping[str, DeviceKey] | None = None,
    together: Sequence[str | Sequence[str]] = (),
    offload: bool = True,
    cpu_compute: bool = True,
    balance: bool = False,
    reserve: int | str | Mapping[DeviceKey, int | str] = 0,
) -> Plan:
    """Decide where everything in ``model`` goes, and move nothing.

    The model may be on the meta device, and the devices need not exist here.

    Args:
        model: any module; it is not changed.
        max_memory: device key -> bytes or text such as ``"20GiB"``. Keys are accelerator indices,
            ``"cpu"``, or device names; their order is the order of preference. A budget covers
            everything on the device: weights, activations, copies. None: what is free here.
        args: example inputs by position, on any device, meta too. Without examples the model's
            ``dummy_inputs`` serve, or a symbolic trace, which knows no activation sizes.
        kwargs: example inputs by name.
        dynamic_shapes: as in ``torch.export.export``.
        links: (source key, destination key) -> :class:`graphplan.Link`, where it differs from
            25 GB/s and 15 microseconds.
        return_outputs: whether results go back to the device of the first tensor input.
        pin: module, operation, parameter or buffer -> device key. A module runs there, and its
            weights live there; a parameter or buffer lives there.
        together: modules, or lists of them, that must not be split over devices.
        offload: False for accelerators only: what does not fit them is an error.
        cpu_compute: False where the CPU may keep weights, but not compute.
        balance: spread the work evenly over the accelerators instead of moving the fewest bytes.
        reserve: bytes to leave free on every device, or device key -> bytes.

    Raises:
        BudgetError, DeviceError: ``max_memory`` cannot be read.
        InputError: the inputs do not fit the model.
        CaptureError: the model cannot be traced.
        InfeasibleError: no placement fits; the smallest budgets that would do are in the error.
    """
    topology = read_max_memory(max_memory, links, reserve)
    wishes = Wishes(pin or {}, together, offload, cpu_compute, balance)
    options = _Options(dynamic_shapes, False, return_outputs, wishes)
    twin = Twin(model)
    return _Compiler(twin, topology, options).plan(_example(model, twin, args, kwargs)).plan


def partition(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    checkpoint: str | None = None,
    strict: bool = True,
    links: Links | None = None,
    return_outputs: bool = True,
    grad: bool = False,
    pin: Mapping[str, DeviceKey] | None = None,
    together: Sequence[str | Sequence[str]] = (),
    offload: bool = True,
    cpu_compute: bool = True,
    balance: bool = False,
    reserve: int | str | Mapping[DeviceKey, int | str] = 0,
) -> Any:
    """The model, placed over the devices of ``max_memory`` and ready to run.

    What is returned is of the model's own class, as far as ``isinstance``, names and state_dict keys
    go, with ``.plan``, ``.graph_module`` and ``.code`` beside. ``model`` itself is left as it was;
    weights that stay on the CPU share their memory with it.

    Args:
        model: any module, on any device; on the meta device with ``checkpoint``.
        max_memory: as in :func:`plan`.
        args: as in :func:`plan`. Without examples, and where a symbolic trace is not possible
            either, the first call is captured and placed.
        kwargs: as in :func:`plan`.
        dynamic_shapes: as in :func:`plan`.
        checkpoint: a safetensors file, or a folder of them, to read the weights from.
        strict: whether names that the checkpoint lacks or the model does not know are errors.
        links: as in :func:`plan`.
        return_outputs: False leaves results on the device that made them.
        grad: keep autograd alive in calls. Otherwise they run as under ``torch.no_grad()``, so that
            no activation outlives its last reader and the budgets hold.
        pin: as in :func:`plan`.
        together: as in :func:`plan`.
        offload: as in :func:`plan`.
        cpu_compute: as in :func:`plan`.
        balance: as in :func:`plan`.
        reserve: as in :func:`plan`.

    Raises:
        GraphplanError: as in :func:`plan`; also DeviceError for a device that this machine lacks,
            InputError for a meta model without a checkpoint.
    """
    topology = read_max_memory(max_memory, links, reserve)
    require_present(topology)
    wishes = Wishes(pin or {}, together, offload, cpu_compute, balance)
    twin = Twin(model)
    source = None if checkpoint is None else read_checkpoint(model, twin.weights, checkpoint, strict=strict)
    if source is None:
        require_data(model, twin.weights)
    compiler = _Compiler(twin, topology, _Options(dynamic_shapes, grad, return_outputs, wishes))

    def start(call: BoundCall | None) -> nn.Module:
        program = compiler.first(call)
        changed = frozenset(w.name for w in program.plan.graph.weights.values() if w.mutated)
        devices = compiler.devices_of_weights()
        placed = place_model(model, twin.weights, devices, changed, placed_class, source)
        attach(
            placed,
            [program],
            compiler.further,
            twin.signature,
            keep_grad=grad,
            return_outputs=return_outputs,
        )
        return placed

    try:
        example = _example(model, twin, args, kwargs)
        return start(example)
    except CaptureError as error:
        if args or kwargs:
            raise
        return _unstarted(model, start, twin.signature, error)


def _unstarted(
    model: nn.Module, start: Callable[[BoundCall | None], nn.Module], signature: Any, error: CaptureError
) -> nn.Module:
    """A module that is captured and placed at its first call, which brings the missing inputs."""
    warnings.warn(f"{error} (the first call will be captured instead)", stacklevel=3)
    shell = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    shell.__class__ = placed_class(type(model))
    attach_start(shell, start, signature)
    return shell


def _example(
    model: nn.Module, twin: Twin, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> BoundCall | None:
    """The example inputs, or the model's own, or None."""
    if not isinstance(args, tuple | list):
        raise InputError("args must be a tuple of inputs, as in torch.export: write args=(x,)")
    if args or kwargs:
        return twin.bind(tuple(args), kwargs or {})
    dummies = getattr(model, "dummy_inputs", None)
    if isinstance(dummies, Mapping) and dummies:
        return twin.bind((), dummies)
    return None


class _Compiler:
    """Plans and lowers calls of one model; the first decides where weights are."""

    def __init__(self, twin: Twin, topology: Topology, options: _Options) -> None:
        self.twin, self.topology, self.options = twin, topology, options
        self.homes: dict[str, DeviceKey] | None = None

    def devices_of_weights(self) -> dict[str, torch.device]:
        """First name of each weight -> its device."""
        assert self.homes is not None
        return {name: self.topology[key].torch_device for name, key in self.homes.items()}

    def plan(self, call: BoundCall | None) -> _Planned:
        """Capture, annotate and place."""
        captured = capture(self.twin, call, self.options.dynamic_shapes, keep_grad=self.options.grad)
        simplify(captured, keep_grad=self.options.grad)
        types = [spec.type for spec in self.topology.devices if spec.computes]
        annotator = Annotator(captured, self.twin.weights, types)
        problem, solution = self._settle(annotator, call)
        graph, schedule = problem.graph, solution.evaluation.schedule
        check_schedule(graph, self.topology, schedule)
        made = Plan(
            graph,
            self.topology,
            schedule,
            solution.evaluation.seconds,
            solution.lower_bound,
            solution.proof,
            captured.method,
        )
        return _Planned(captured, made)

    def _settle(self, annotator: Annotator, call: BoundCall | None) -> tuple[Problem, Solution]:
        """Place the graph, and again where the moves themselves make operations take more.

        The graph that is returned is that of the returned placement: its bytes are exact.
        """
        graph = annotator.graph()
        returns = self.options.return_outputs and bool(graph.inputs)
        plain = Problem(graph, self.topology, self._host(call), returns, self.homes or {})
        problem = constrain(plain, self.options.wishes)
        for _ in range(_SETTLING):
            solution = place(problem)
            moved = annotator.graph(solution.evaluation.schedule)
            exact = constrain(replace(plain, graph=moved), self.options.wishes)
            if exact.graph == problem.graph:
                return problem, solution
            again = evaluate(exact, solution.evaluation.schedule.assignment)
            if again.feasible:
                return exact, replace(solution, evaluation=again)
            problem = replace(exact, graph=costlier(problem.graph, exact.graph))
        return problem, place(problem)

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
        """Plan and lower the call that decides where weights are."""
        self.homes = None
        planned = self.plan(call)
        graph = planned.plan.graph
        homes = planned.plan.schedule.assignment.weights
        self.homes = {n: k for n, k in homes.items() if graph.weights[n].kind != "constant"}
        return self._lower(planned)

    def further(self, call: BoundCall, training: bool) -> Program:
        """Plan and lower a call of another structure, with the weights where they are."""
        module = self.twin.module
        if module.training != training:
            module.train(training)
        logger.info("capturing a call of a new structure: %s", ", ".join(leaf_names(call)))
        return self._lower(self.plan(call))

    def _lower(self, planned: _Planned) -> Program:
        captured, made = planned.capture, planned.plan
        graph, schedule = made.graph, made.schedule
        lowered = lower(captured, graph, schedule, self.topology)
        verify_lowered(lowered, graph, schedule, self.topology)
        devices = self.topology
        homes = schedule.assignment.weights
        return Program(
            plan=made,
            signature=captured.signature,
            graph=lowered.graph,
            constants={
                constant_attribute(name): tensor.detach().to(devices[homes[name]].torch_device)
                for name, tensor in captured.constants.items()
            },
            branches=lowered.branches,
            inputs=tuple(captured.inputs.index(name) for name in graph.inputs),
            on_host=frozenset(_read_on_host(made)),
            changed=frozenset(graph.inputs.index(name) for name in graph.changed_inputs),
            host=host_device(schedule, self.topology),
            out_spec=captured.out_spec,
            training=self.twin.module.training,
            prepare=captured.prepare,
        )


@dataclass(frozen=True, slots=True)
class _Planned:
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
