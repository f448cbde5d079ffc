"""Why a module, operation or weight is where it is: its cost there and elsewhere, and obstacles.

::

    module blocks.1: 2 operations on 0, weights on 0, stage 1
    weights 4.1 KiB, activations 3.0 KiB, 24,576 FLOP, 8.0 µs compute, 0.0 µs transfers

    moved to      time    change  its compute  all copies  obstacle
    --------  --------  --------  -----------  ----------  ----------------------------------------------
    2         303.1 µs  +60.3 µs       8.0 µs    166.2 µs  2 is short of 3.00 KiB (3072 bytes) at 'linear'
    0         242.8 µs   +0.0 µs       8.0 µs    105.9 µs  it is there
    cpu       305.1 µs  +62.3 µs      40.2 µs    136.0 µs  slower by 62.3 µs
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from graphplan.analysis.plan_problem import as_if_first, constrained_problem
from graphplan.analysis.relocation import EPSILON, Alternative, RelocationAnalysis, only_read_by
from graphplan.devices.topology import DeviceKey
from graphplan.errors import PlanError
from graphplan.ir.constraints import did_you_mean
from graphplan.ir.graph import Graph
from graphplan.ir.plan_data import PlanData
from graphplan.message_text import size_text
from graphplan.report.data_flows import made_bytes, run_seconds
from graphplan.report.text import count_text, device_text, operation_text, table_lines, time_text
from graphplan.versioned_json import encode

_MOST = 12  # stages with reasons: those that take most time
_EFFORT = 40_000  # operations of all evaluated placements together: about a second


@dataclass(frozen=True, slots=True)
class Explanation:
    """The devices of a module, operation or weight, its cost there, and its cost on other devices.

    Attributes:
        name: the module, operation or weight.
        kind: ``"module"``, ``"operation"`` or ``"weight"``.
        devices: devices of its operations (for a weight: of its readers).
        homes: devices on which its weights reside.
        stages: indices of the stages that run it.
        operations: names of its operations, in order.
        weight_bytes: bytes of its weights, shared ones once.
        activation_bytes: output size of its operations.
        flops: FLOP of its operations.
        compute_seconds: estimated seconds of its operations where they are.
        transfer_seconds: estimated seconds in which the forward pass does nothing but copy their inputs
            and outputs. The copy of a streamed weight counts as far as an operation waits for it.
        makespan: seconds of the plan; with ``calls=`` the weighted sum.
        alternatives: one for each device of ``max_memory``.
        saved_bytes: in a training step, bytes of its forward outputs that the backward pass reads.
        recompute_seconds: estimated seconds of these operations of the forward pass.
    """

    name: str
    kind: str
    devices: tuple[DeviceKey, ...]
    homes: tuple[DeviceKey, ...]
    stages: tuple[int, ...]
    operations: tuple[str, ...]
    weight_bytes: int
    activation_bytes: int
    flops: int
    compute_seconds: float
    transfer_seconds: float
    makespan: float
    alternatives: tuple[Alternative, ...]
    saved_bytes: int = 0
    recompute_seconds: float = 0.0

    def alternative_on(self, device: DeviceKey) -> Alternative:
        """Return the alternative on one device.

        Raises:
            PlanError: the plan has no such device.
        """
        for alternative in self.alternatives:
            if alternative.device == device:
                return alternative
        known = ", ".join(repr(alternative.device) for alternative in self.alternatives)
        raise PlanError(f"no device {device!r} in this plan: it has {known}")

    def to_json(self) -> str:
        """Return all fields as JSON text; mappings become lists of pairs."""
        return json.dumps(encode(self), indent=1)

    def __str__(self) -> str:
        runs = (
            f"{count_text(len(self.operations), 'operation')} on {_listed(self.devices)}"
            if self.operations
            else "read by no operation"
        )
        lives = f", weights on {_listed(self.homes)}" if self.homes else ""
        stages = f", stage {_listed(self.stages)}" if self.stages else ""
        sizes = (
            f"weights {size_text(self.weight_bytes)}, activations {size_text(self.activation_bytes)}, "
            f"{self.flops:,} FLOP, {time_text(self.compute_seconds)} compute, "
            f"{time_text(self.transfer_seconds)} transfers"
        )
        rows = [
            [
                str(other.device),
                _time_or_dash(other.makespan),
                _signed(other.slower),
                _time_or_dash(other.compute_seconds),
                _time_or_dash(other.transfer_seconds),
                other.obstacle,
            ]
            for other in self.alternatives
        ]
        header = ["moved to", "time", "change", "its compute", "all copies", "obstacle"]
        head = f"{self.kind} {self.name or '(all)'}: {runs}{lives}{stages}"
        lines = [head, sizes]
        if self.saved_bytes:
            lines.append(
                f"saves {size_text(self.saved_bytes)} for the backward pass, recomputing it takes "
                f"{time_text(self.recompute_seconds)}"
            )
        return "\n".join([*lines, "", *table_lines(header, rows)])


def explain(plan: PlanData, name: str) -> Explanation:
    """Return where ``name`` is in ``plan``, and its cost on each other device.

    Raises:
        PlanError: no module, operation or weight has that name; the error suggests similar ones.
    """
    graph = plan.graph
    operations = [operation.name for operation in plan.operations_of(name)]
    weight = graph.weight_named(name)
    owned = [weight.name] if weight is not None else _owned(graph, name, operations)
    if not operations and not owned:
        hint = did_you_mean(graph, name)
        raise PlanError(f"no operation, module or weight named {name!r} in this plan{hint}")
    devices, homes = plan.schedule.assignment.operations, plan.schedule.assignment.weights
    working = [op for op in operations if not graph.operations[op].host_only]
    kind = "weight" if weight is not None else "operation" if name in graph.operations else "module"
    analysis = RelocationAnalysis(plan, name, kind, owned=owned, operations=operations)
    problem = constrained_problem(plan)
    forward = [op for op in working if plan.graph.trains and not graph.operations[op].backward]
    seconds = {op: problem.seconds(graph.operations[op], plan.topology[devices[op]]) for op in working}
    return Explanation(
        name,
        kind,
        devices=tuple(dict.fromkeys(devices[op] for op in working)),
        homes=tuple(dict.fromkeys(homes[one] for one in owned)),
        stages=tuple(stage.index for stage in plan.stages if set(stage.operations) & set(working)),
        operations=tuple(operations),
        weight_bytes=sum(graph.weights[one].nbytes for one in owned),
        activation_bytes=sum(made_bytes(graph, graph.operations[op]) for op in operations),
        flops=sum(graph.operations[op].flops for op in operations),
        compute_seconds=sum(seconds.values()),
        transfer_seconds=_copy_seconds(plan, operations, owned),
        makespan=plan.weighted_makespan,
        alternatives=tuple(analysis.alternative_on(spec.key) for spec in plan.topology.devices),
        saved_bytes=_saved_bytes(graph, forward),
        recompute_seconds=sum(seconds[op] for op in forward),
    )


def stage_reasons(plan: PlanData) -> dict[int, dict[DeviceKey, str]]:
    """Return stage -> other device -> the cost of the stage there, everything else unchanged.

    If there are many stages or operations, only for the slowest stages; empty for the method ``"hooks"``.
    """
    if plan.method == "hooks":
        return {}
    plan = as_if_first(plan)
    seconds = run_seconds(plan.timeline)
    longest = sorted(plan.stages, key=lambda stage: -sum(seconds[name] for name in stage.operations))
    computing = [spec.key for spec in plan.topology.computing]
    effort_per_stage = len(plan.graph.operations) * max(1, len(computing) - 1)
    reasons: dict[int, dict[DeviceKey, str]] = {}
    for stage in longest[: min(_MOST, _EFFORT // max(1, effort_per_stage))]:
        owned = only_read_by(plan.graph, stage.operations)
        analysis = RelocationAnalysis(
            plan, f"stage {stage.index}", "stage", owned=owned, operations=stage.operations
        )
        others = (key for key in computing if key != stage.device)
        reasons[stage.index] = {key: _reason(plan, analysis.alternative_on(key)) for key in others}
    return reasons


def _reason(plan: PlanData, other: Alternative) -> str:
    if other.along:
        return "would also move other operations, which share memory with these"
    if other.slower is None:
        return other.obstacle
    word = "slower" if other.slower > 0 else "faster"
    times = "the same time" if abs(other.slower) <= EPSILON else f"{time_text(abs(other.slower))} {word}"
    if not other.missing_bytes:
        return times if other.possible else other.obstacle
    missing = (f"{size_text(n)} too little on {device_text(key)}" for key, n in other.missing_bytes.items())
    operation = plan.graph.operations.get(other.operation or "")
    where = "" if operation is None else f", at {operation_text(operation)}"
    return f"{times}; {' and '.join(missing)}{where}"


def _saved_bytes(graph: Graph, forward: Sequence[str]) -> int:
    """Return the bytes that ``forward`` operations make and the backward pass reads, each storage once."""
    written = {graph.root(value) for op in forward for value in graph.operations[op].outputs}
    backward = (operation for operation in graph.operations.values() if operation.backward)
    read = {graph.root(name) for operation in backward for name in operation.inputs}
    return sum(graph.values[name].nbytes for name in written & read & graph.values.keys())


def _owned(graph: Graph, name: str, operations: Sequence[str]) -> list[str]:
    """Return the weights of a module by their names, and those that only its operations read."""
    under = {
        weight.name
        for weight in graph.weights.values()
        if any(one.startswith(name + ".") for one in (weight.name, *weight.names))
    }
    under.update(only_read_by(graph, operations))
    return [one for one in graph.weights if one in under]


def _copy_seconds(plan: PlanData, operations: Sequence[str], owned: Sequence[str]) -> float:
    """Return the seconds in which the forward pass only copies inputs and outputs of these operations."""
    graph = plan.graph
    named = (graph.operations[op] for op in operations)
    touched = {name for op in named for name in (*op.inputs, *op.outputs)} | set(owned)
    copies = (
        event
        for event in plan.timeline.events
        if (event.kind == "move" and event.name in touched)
        or (event.kind == "wait" and touched.intersection(event.weights))
    )
    return sum(event.end - event.start for event in copies)


def _listed(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "-"


def _time_or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else time_text(seconds)


def _signed(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return ("-" if seconds < -EPSILON else "+") + time_text(abs(seconds))
