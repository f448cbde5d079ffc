"""Weights that stay on disk, where accelerators and the CPU together do not hold them.

The disk is a slower and larger part of the CPU's memory. The planner first places for a CPU that is larger by
the bytes that may stay on disk. Then the weights that cost least on disk leave the CPU, until its own budget
is kept. The fastest of three such placements is improved by a local search in which weights may be on disk.
Before and after weights leave a CPU that holds two of three::

    wa on the CPU, streamed to 0            wa on disk, streamed to 0
    wb on the CPU, streamed to 0            wb on the CPU, streamed to 0
    embed on the CPU, gathered there        embed on disk, gathered by the CPU
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, replace

from graphplan.devices.topology import CPU, DISK, DeviceSpec, Link, Topology, round_up
from graphplan.errors import InfeasibleError
from graphplan.ir.schedule import STAGED_BYTES, Assignment
from graphplan.message_text import readable_bytes
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds.disk_reads import least_disk_seconds
from graphplan.passes.placement.certificate import Bound, Scope, Solution, certify
from graphplan.passes.placement.driver import bound_with_offload, place, probe
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.infeasible import (
    Advice,
    everything_on_one,
    explain_infeasible,
    smallest_budgets,
)
from graphplan.passes.placement.params import PARAMS, Effort, Limits
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.streaming.streamed_local_search import climb_streamed

_AS_PART = ", with the disk as part of the CPU's memory"
_MUST_BE_READ = "bytes that must be read from disk"


def place_or_map(
    problem: Problem,
    mappable: Set[str] | None = None,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    *,
    warm_start: Assignment | None = None,
) -> Solution:
    """Place a graph, with weights on disk if it does not fit otherwise.

    Args:
        problem: the problem; without ``"disk"`` among its devices this is :func:`place`.
        mappable: the parameters that can stay on disk: those that a checkpoint stores in the model's dtype.
            None, for no checkpoint yet, means all.
        limits: as in :func:`graphplan.passes.placement.driver.place`.
        warm_start: as in :func:`place`; ignored with a disk.

    Raises:
        InfeasibleError: no placement was found; it names sufficient budgets if they were found.
    """
    if DISK not in problem.topology:
        return place(problem, limits, warm_start=warm_start)
    placement = _DiskPlacement(problem, mappable, limits)
    solution = placement.run()
    if solution is not None:
        return solution
    advice = placement.smallest_budgets()
    if advice is not None:
        # as in `place`: a placement for larger budgets may fit the given ones
        evaluation = evaluate(problem, advice.evaluation.assignment)
        if evaluation.feasible:
            return certify(evaluation, Bound())
    raise placement.infeasible(advice)


@dataclass
class _DiskPlacement:
    """Places one problem.

    Attributes:
        problem: the problem.
        mappable: the parameters that can stay on disk; None for all.
        limits: when to stop.
        on_disk: weights that an earlier plan has left on disk.
        readers: weight -> the operations that read it, also by views.
        free: weights that may leave the CPU for the disk.
        extra: most bytes of both on disk.
    """

    problem: Problem
    mappable: Set[str] | None
    limits: Limits

    def __post_init__(self) -> None:
        weights, fixed = self.problem.graph.weights, self.problem.fixed_weights
        self.disk, self.cpu = self.problem.topology[DISK], self.problem.topology.cpu
        self.on_disk = [name for name, key in fixed.items() if key == DISK and name in weights]
        self.free = [name for name in weights if self._may_leave(name)]
        self.readers: dict[str, list[str]] = {}
        for name, operation in self.problem.graph.operations.items():
            if not operation.bytes_accessed or operation.host_only:
                continue  # a view reads nothing
            for root in dict.fromkeys(map(self.problem.graph.root, operation.inputs)):
                self.readers.setdefault(root, []).append(name)
        sizes = (round_up(weights[name].nbytes) for name in [*self.on_disk, *self.free])
        self.extra = min(self.disk.room, sum(sizes))

    def run(self) -> Solution | None:
        wider = self._widened()
        in_memory = None if self.on_disk else self._in_memory()
        if not self.extra:
            return in_memory
        if in_memory is not None:
            if in_memory.bound.scope is Scope.WITHOUT_OFFLOAD:
                return in_memory
            # a placement with weights on disk may be faster: the CPU has more room
            return certify(in_memory.evaluation, self._bound(wider[0], in_memory.evaluation))
        spilled: list[Evaluation] = []
        limits = replace(self.limits, proves=False)
        for done, wide in enumerate(wider):
            if spilled and self.limits.over:
                break
            solution = _placed(wide, limits.one_of(len(wider) + 1 - done))
            if solution is None:
                continue
            evaluation = self._spill(solution.evaluation.assignment)
            if evaluation.feasible:
                limits = replace(limits, effort=self.limits.effort * PARAMS.disk_effort)
            spilled += [evaluation, *self._with_single_slots(evaluation)]
        if not spilled:
            return None
        best = self._climb(wider[0], min(spilled, key=_excess_and_seconds))
        return certify(best, self._bound(wider[0], best)) if best.feasible else None

    def _climb(self, wide: Problem, best: Evaluation) -> Evaluation:
        """Improve a placement, also by moves of weights between the CPU and the disk."""
        mappable = dict.fromkeys(name for name in self.free if name in wide.graph.readers).keys()
        if self.cpu is None or not mappable:
            return best
        limits = self.limits.one_of(2)
        if limits.deadline is not None:
            limits = replace(limits, effort=math.inf)
        effort = limits.work(len(wide.graph.operations), PARAMS.disk_climb)
        return climb_streamed(Arrays(wide), best, effort, mappable=mappable)

    def _with_single_slots(self, evaluation: Evaluation) -> Iterator[Evaluation]:
        """Yield the placement with one slot on each accelerator, which leaves more room for weights."""
        buffers = evaluation.schedule.prefetch_buffers
        if any(len(buffer.slots) > 1 for buffer in buffers):
            slots = {buffer.device: 1 for buffer in buffers}
            yield evaluate(self.problem, replace(evaluation.assignment, slots=slots))

    def _bound(self, wide: Problem, evaluation: Evaluation) -> Bound:
        """Return the bound of the problem in which the disk is part of the CPU's memory."""
        relaxed = replace(wide, topology=self._with_faster_links(wide.topology))
        bound = bound_with_offload(relaxed, evaluation.seconds, self.limits)
        bound = replace(bound, proof=bound.proof + _AS_PART)
        return bound.raised(least_disk_seconds(self.problem, self.on_disk, self.free), _MUST_BE_READ)

    def _with_faster_links(self, wide: Topology) -> Topology:
        """Return the topology with links from the CPU that are no slower than those from the disk."""
        if self.cpu is None:
            return wide
        links = dict(wide.links)
        for key in {*wide.accelerator_keys, self.problem.host} - {self.cpu}:
            cpu, disk = wide.link(self.cpu, key), wide.link(DISK, key)
            links[key, self.cpu] = wide.link(key, self.cpu)  # else the reverse link is taken for it
            links[self.cpu, key] = Link(max(cpu.bandwidth, disk.bandwidth), min(cpu.latency, disk.latency))
        return replace(wide, links=links)

    def _may_leave(self, name: str) -> bool:
        weight = self.problem.graph.weights[name]
        return (
            (self.mappable is None or name in self.mappable)
            and weight.kind == "parameter"
            and name in self.problem.graph.streamable
            and weight.nbytes > 0
            and name not in self.problem.fixed_weights
        )

    def _in_memory(self) -> Solution | None:
        """Return a solution with nothing on disk; None if the weights do not fit, or none is found."""
        topology = _without_disk(self.problem.topology)
        if self.problem.graph.weight_bytes > sum(spec.room for spec in topology.devices):
            return None
        solution = _placed(replace(self.problem, topology=topology), self.limits)
        if solution is None:
            return None
        return replace(solution, evaluation=evaluate(self.problem, solution.evaluation.assignment))

    def _widened(self) -> list[Problem]:
        """Return problems with the disk as part of the CPU: as given, without CPU compute, all on the CPU."""
        problem, topology, cpu = self.problem, self.problem.topology, self.cpu
        accelerators = topology.accelerator_keys
        if not self.extra:
            return [replace(problem, topology=_without_disk(topology))]
        if cpu is None:
            staging = 2 * STAGED_BYTES * len(topology.devices)  # which the evaluator counts there too
            nbytes, reserve = self.extra + staging + self.disk.reserve, self.disk.reserve
            memory = DeviceSpec(DISK, CPU, nbytes, 1.0, 1.0, 1.0, reserve)
            devices = tuple(memory if spec.key == DISK else spec for spec in topology.devices)
            alone = replace(problem, topology=replace(topology, devices=devices))
            return [alone.on(accelerators)]
        larger = _without_disk(topology).with_memory({cpu: topology[cpu].memory + self.extra})
        fixed = {**problem.fixed_weights, **dict.fromkeys(self.on_disk, cpu)}
        wide = replace(problem, topology=larger, fixed_weights=fixed)
        if not any(spec.room > 0 for spec in topology.accelerators):
            return [wide]
        return [wide, wide.on(accelerators), wide.on(frozenset({cpu}))]

    def _spill(self, assignment: Assignment) -> Evaluation:
        """Move the weights that cost least on disk off the CPU, until its budget is kept."""
        homes = {**assignment.weights, **dict.fromkeys(self.on_disk, DISK)}
        evaluation = evaluate(self.problem, replace(assignment, weights=homes))
        together: dict[tuple[str, ...], list[str]] = {}  # weights of one operation share a copy
        for name in self.free:
            if homes[name] == self.cpu:
                together.setdefault(self.problem.graph.consumers.get(name, ()), []).append(name)
        queue = sorted(together.values(), key=lambda names: self._price(names, assignment), reverse=True)
        for _ in range(2 * PARAMS.retries):
            over = 0 if self.cpu is None else evaluation.excess.get(self.cpu, 0)
            if over <= 0 or not queue:
                break
            while over > 0 and queue:
                for name in queue.pop():
                    homes[name] = DISK
                    over -= round_up(self.problem.graph.weights[name].nbytes)
            evaluation = evaluate(self.problem, replace(assignment, weights=dict(homes)))
        return evaluation

    def _price(self, names: list[str], assignment: Assignment) -> tuple[float, int]:
        """Return a sort key: bytes read in a pass for each byte of weights; of equals, large ones first."""
        graph, read = self.problem.graph, 0
        nbytes = sum(graph.weights[name].nbytes for name in names)
        for reader in self.readers.get(names[0], ()):
            on_cpu = not self.problem.topology[assignment.operations[reader]].is_accelerator
            read += min(nbytes, graph.operations[reader].bytes_accessed) if on_cpu else nbytes
        return read / nbytes, -nbytes

    def smallest_budgets(self) -> Advice | None:
        """Return budgets that suffice, and a placement for them; None if none is found or wanted."""
        if not self.limits.advises:
            return None
        effort = Limits(self.limits.deadline).work(len(self.problem.graph.operations), PARAMS.advice_effort)
        closely = not self.limits.caller_retries
        found = smallest_budgets(self.problem, effort, self._probe, closely=closely)
        return found or everything_on_one([self.problem])

    def infeasible(self, advice: Advice | None) -> InfeasibleError:
        """Return the error where no placement was found, with budgets that suffice."""
        graph, error = self.problem.graph, explain_infeasible(self.problem, advice)
        parameters = [weight for weight in graph.weights.values() if weight.kind == "parameter"]
        total = sum(weight.nbytes for weight in parameters)
        mapped = sum(w.nbytes for w in parameters if self.mappable is None or w.name in self.mappable)
        if mapped < total and self.extra < self.disk.room and not graph.trains:
            error.args = (
                f"{error}. Weights can stay on 'disk' where a checkpoint has them in the model's dtype: "
                f"{readable_bytes(mapped)} of {readable_bytes(total)} here. Save the model in this dtype "
                "with save_pretrained or safetensors.torch.save_file, and give partition(..., "
                "checkpoint=path)",
            )
        return error

    def _probe(self, problem: Problem, effort: Effort) -> Evaluation | None:
        """Return a placement that a short search finds, with weights on disk as needed; else None."""
        trial = replace(self, problem=problem)
        for wide in trial._widened():
            evaluation = probe(wide, effort)
            spilled = None if evaluation is None else trial._spill(evaluation.assignment)
            if spilled is not None and spilled.feasible:
                return spilled
        return None


def _placed(problem: Problem, limits: Limits) -> Solution | None:
    with suppress(InfeasibleError):
        return place(problem, replace(limits, caller_retries=True))
    return None


def _excess_and_seconds(evaluation: Evaluation) -> tuple[int, float]:
    return sum(evaluation.excess.values()), evaluation.seconds


def _without_disk(topology: Topology) -> Topology:
    return replace(topology, devices=tuple(spec for spec in topology.devices if spec.key != DISK))
