"""The cost of one module, operation, weight or stage on another device, everything else unchanged.

Several options are evaluated, in every call of the plan: the weights on the device too, or streamed from
where they are, or from the CPU. Prefetch buffers lose slots if that is necessary. A constraint that forbids
the device is named as an obstacle, and the cost is computed all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from graphplan.analysis.plan_problem import constrained_problem
from graphplan.devices.topology import CPU, DeviceKey
from graphplan.ir.constraints import depth, weights_within
from graphplan.ir.graph import Graph
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule import Assignment
from graphplan.ir.timeline import make_timeline
from graphplan.message_text import readable_bytes
from graphplan.passes.placement.calls.shared_buffers import fit_together
from graphplan.passes.placement.evaluate import Evaluation
from graphplan.passes.placement.problem import Problem
from graphplan.report.text import time_text

EPSILON = 1e-12  # seconds: times that differ by less are the same


@dataclass(frozen=True, slots=True)
class Alternative:
    """The cost of a module, operation or weight on one device, everything else unchanged.

    Attributes:
        device: key of ``max_memory``.
        here: whether all of it is on the device in the plan.
        possible: whether every budget and constraint is kept with it on the device.
        makespan: estimated seconds of the forward pass with it on the device, and with its weights there
            too, where they are now, or on the CPU, whichever is fastest; None if the device cannot run it.
            With ``calls=``, the weighted sum.
        slower: ``makespan`` minus that of the plan, in seconds.
        compute_seconds: seconds of its operations in one forward pass, each on its device in this
            alternative: the readers of a weight may stay where they are.
        transfer_seconds: seconds of the forward pass in which nothing computes: transfers, and waits for
            streamed weights.
        missing_bytes: device key -> bytes by which its budget would be exceeded.
        operation: operation at which the largest excess would occur.
        along: operations that would have to move too, because they must share a device.
        obstacle: the reason why it cannot be there, or a comparison of times.
    """

    device: DeviceKey
    here: bool
    possible: bool
    makespan: float | None = None
    slower: float | None = None
    compute_seconds: float | None = None
    transfer_seconds: float | None = None
    missing_bytes: Mapping[DeviceKey, int] = field(default_factory=dict)
    operation: str | None = None
    along: tuple[str, ...] = ()
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One placement with the part on another device, evaluated in every call."""

    evaluations: tuple[Evaluation, ...]
    seconds: float
    excess: Mapping[DeviceKey, int]
    operation: str | None


@dataclass(frozen=True, slots=True)
class _MovedCall:
    """The operations that move in one call of a plan.

    Attributes:
        plan: the call's plan.
        problem: its problem without constraints, which are named as obstacles.
        allowed: operation -> devices that it may run on under the caller's constraints.
        operations: operations to move.
        group: these, and those that must share a device with them, in order.
    """

    plan: PlanData
    problem: Problem
    allowed: Mapping[str, frozenset[DeviceKey]]
    operations: Sequence[str]
    group: Sequence[str]


class RelocationAnalysis:
    """Evaluates a module, operation, weight or stage on other devices, in every call of a plan.

    Args:
        plan: the plan.
        name: name of the module, operation or weight.
        kind: as in :class:`~graphplan.analysis.explanation.Explanation`, or ``"stage"``.
        owned: its weights.
        operations: its operations in the first call.
    """

    def __init__(
        self, plan: PlanData, name: str, kind: str, owned: Sequence[str], operations: Sequence[str]
    ) -> None:
        self.plan, self.kind, self.owned = plan, kind, owned
        first = _moved_call(plan, operations)
        others = (
            # the names of operations mean something else in another call
            [] if kind in ("operation", "stage") else [op.name for op in other.operations_of(name)]
            for other in plan.others
        )
        self.calls = [first, *map(_moved_call, plan.others, others)]
        self.along = tuple(op for one in self.calls for op in one.group if op not in one.operations)

    def alternative_on(self, key: DeviceKey) -> Alternative:
        """Return its cost on a device, with its weights where they are best, and any obstacle."""
        plan, spec = self.plan, self.plan.topology[key]
        if not spec.computes:
            return Alternative(key, here=False, possible=False, obstacle=f"{key!r} runs no operations")
        if self._is_on(key):
            return self._unchanged(key)
        outcomes = [self._evaluate(key, home, moves=moves) for moves, home in self._modes(key)]
        best = min(outcomes, key=lambda o: (sum(o.excess.values()), o.seconds))
        slower = best.seconds - plan.weighted_makespan
        obstacle = "; ".join(filter(None, (self._rule(key), self._companions(), _shortage(best))))
        return Alternative(
            key,
            here=False,
            possible=not obstacle,
            makespan=best.seconds,
            slower=slower,
            compute_seconds=self._compute(best.evaluations[0].assignment),
            transfer_seconds=make_timeline(
                plan.graph, plan.topology, best.evaluations[0].schedule
            ).copy_seconds,
            missing_bytes=best.excess,
            operation=best.operation,
            along=self.along,
            obstacle=obstacle or _compared(slower, offloads=self._offloads(key, best)),
        )

    def _is_on(self, key: DeviceKey) -> bool:
        assignment = self.plan.schedule.assignment
        if self.kind == "weight":
            return assignment.weights[self.owned[0]] == key
        working = self._working()
        if not working:
            return all(assignment.weights[name] == key for name in self.owned)
        return all(assignment.operations[op] == key for op in working)

    def _unchanged(self, key: DeviceKey) -> Alternative:
        plan = self.plan
        return Alternative(
            key,
            here=True,
            possible=True,
            makespan=plan.weighted_makespan,
            slower=0.0,
            compute_seconds=self._compute(plan.schedule.assignment),
            transfer_seconds=plan.timeline.copy_seconds,
            obstacle="it is there",
        )

    def _compute(self, assignment: Assignment) -> float:
        """Return the seconds of its operations, or of a weight's readers, under an assignment."""
        problem, operations = self.calls[0].problem, self.plan.graph.operations
        return sum(
            problem.seconds(operations[op], self.plan.topology[assignment.operations[op]])
            for op in self._working()
        )

    def _working(self) -> list[str]:
        """Return its operations in the first call that run on a device."""
        operations = self.plan.graph.operations
        return [op for op in self.calls[0].operations if not operations[op].host_only]

    def _modes(self, key: DeviceKey) -> Iterator[tuple[bool, DeviceKey | None]]:
        """Yield (whether operations move, new home of the weights or None if they stay)."""
        if self.kind != "weight" and self._fixed_elsewhere(key):
            yield True, None
            return
        yield True, key
        if not all(self.plan.graph.weights[name].streamable for name in self.owned):
            return
        if self.kind == "weight":
            yield False, key
        elif self.owned:
            yield True, None
            cpu = self.plan.topology.cpu
            if cpu is not None and cpu != key:
                yield True, cpu

    def _fixed_elsewhere(self, key: DeviceKey) -> list[str]:
        """Return those of its weights that an earlier plan, or a pin of their own, keeps elsewhere."""
        graph = self.plan.graph
        pinned = {w.name: k for n, k in self.plan.constraints.pin.items() if (w := graph.weight_named(n))}
        fixed = {**self.plan.fixed_weights, **pinned}
        return [name for name in self.owned if fixed.get(name, key) != key]

    def _evaluate(self, key: DeviceKey, home: DeviceKey | None, *, moves: bool) -> _Outcome:
        moved = []
        for call in self.calls:
            graph, assignment = call.plan.graph, call.plan.schedule.assignment
            devices, homes = dict(assignment.operations), dict(assignment.weights)
            if moves:
                devices.update(dict.fromkeys(call.group, key))
                bound = {
                    name
                    for op in call.group
                    for name in graph.operations[op].inputs
                    if name in graph.weights and not graph.weights[name].streamable
                }
                homes.update(dict.fromkeys(bound, key))
            if home is not None:
                # operations that move along bring the weights that no others read
                carried = (*self.owned, *(only_read_by(graph, call.group) if self.along else ()))
                homes.update((name, home) for name in carried if name in homes)
            moved.append(replace(assignment, operations=devices, weights=homes))
        return _outcome(self.plan, fit_together([call.problem for call in self.calls], moved))

    def _rule(self, key: DeviceKey) -> str:
        """Return the constraint of the caller, or of an earlier plan, that forbids it; empty if none does."""
        plan = self.plan
        pins = {n: k for n, k in plan.constraints.pin.items() if k != key and self._touched_by(n)}
        if pins:
            name = max(pins, key=partial(depth, plan.graph))  # the innermost counts
            return f"pin={{{name!r}: {pins[name]!r}}}"
        fixed = self._fixed_elsewhere(key)
        if fixed and self.kind == "weight":
            return f"an earlier plan put {fixed[0]!r} on {plan.fixed_weights[fixed[0]]!r}"
        if plan.topology[key].device == CPU and plan.topology.accelerators:
            if not plan.constraints.offload:
                return "offload=False"
            if not plan.constraints.cpu_compute and self.kind != "weight":
                return "cpu_compute=False"
        for call in self.calls:
            stuck = [op for op in call.group if key not in call.allowed.get(op, plan.topology.keys)]
            if stuck and self.kind != "weight":
                return f"{stuck[0]!r} shares memory with something that must stay where it is"
        return ""

    def _touched_by(self, pinned: str) -> bool:
        graph = self.plan.graph
        weight = graph.weight_named(pinned)
        if weight is not None:  # its readers may move, and stream it
            bound = self.kind == "weight" or not weight.streamable
            return bound and weight.name in self.owned
        names = {op.name for call in self.plan.calls for op in call.operations_of(pinned)}
        inside = any(name in names for call in self.calls for name in call.group)
        under = not set(self.owned).isdisjoint(weights_within(graph, pinned))
        return under if self.kind == "weight" else inside or under

    def _companions(self) -> str:
        if not self.along or self.kind == "weight":
            return ""
        shown = ", ".join(self.along[:3]) + (", ..." if len(self.along) > 3 else "")
        return f"must share a device with {shown}, which would move too"

    def _offloads(self, key: DeviceKey, best: _Outcome) -> bool:
        """Whether the CPU would compute, or weights would be streamed while none are now."""
        streams = any(one.schedule.prefetch_buffers for one in best.evaluations)
        return self.plan.topology[key].device == CPU or (streams and not self.plan.schedule.prefetch_buffers)


def _outcome(plan: PlanData, evaluations: Sequence[Evaluation]) -> _Outcome:
    seconds = sum(
        call.call_weight * evaluation.seconds
        for call, evaluation in zip(plan.calls, evaluations, strict=True)
    )
    shortages = [
        (nbytes, key, evaluation.peak(key).operation)
        for evaluation in evaluations
        for key, nbytes in evaluation.excess.items()
    ]
    shortages.sort(key=lambda shortage: shortage[0])
    excess = {key: nbytes for nbytes, key, _ in shortages}  # the largest of each device
    operation = shortages[-1][2] if shortages else None
    return _Outcome(tuple(evaluations), seconds, excess, operation)


def _moved_call(plan: PlanData, operations: Sequence[str]) -> _MovedCall:
    graph, problem = plan.graph, constrained_problem(plan)
    group = set(operations).union(*(tied for tied in graph.together if not tied.isdisjoint(operations)))
    ordered = [name for name in graph.operations if name in group]
    return _MovedCall(
        plan, replace(problem, allowed={}), problem.allowed, operations=operations, group=ordered
    )


def _shortage(outcome: _Outcome) -> str:
    by_size = sorted(outcome.excess.items(), key=lambda shortage: shortage[1])
    parts = [f"{key!r} is short of {readable_bytes(nbytes)}" for key, nbytes in by_size]
    where = f" at {outcome.operation!r}" if outcome.operation else ""
    return f"{' and '.join(parts)}{where}" if parts else ""


def _compared(slower: float, *, offloads: bool) -> str:
    if slower > EPSILON:
        return f"slower by {time_text(slower)}"
    if offloads:
        faster = f"faster by {time_text(-slower)}, but " if slower < -EPSILON else ""
        return (
            f"{faster}while the accelerators hold the model, the CPU computes nothing, and weights are "
            "streamed only to faster accelerators, by a single call without a cache"
        )
    if slower < -EPSILON:
        return f"none: faster by {time_text(-slower)}; the search did not find this"
    return "none: the same time"


def only_read_by(graph: Graph, operations: Sequence[str]) -> list[str]:
    """Return the weights that only these operations read."""
    inside = set(operations)
    return [
        name
        for name in graph.weights
        if graph.consumers.get(name) and inside.issuperset(graph.consumers[name])
    ]
