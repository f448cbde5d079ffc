"""Weights that stay on disk, where accelerators and the CPU together do not hold them.

The disk is a slower and larger part of the CPU's memory. The planner first places for a CPU that is larger by
the bytes that may stay on disk. Then the weights that cost least on disk leave the CPU, until its own budget
is kept. Before and after, for a CPU that holds two of three weights::

    wa on the CPU, streamed to 0            wa on disk, streamed to 0
    wb on the CPU, streamed to 0            wb on the CPU, streamed to 0
    embed on the CPU, gathered there        embed on disk, gathered by the CPU
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from graphplan.devices.topology import CPU, DISK, DeviceKey, DeviceSpec, Topology, round_up
from graphplan.errors import InfeasibleError
from graphplan.ir.schedule import STAGED_BYTES, Assignment
from graphplan.message_text import readable_bytes
from graphplan.passes.placement.certificate import Bound, Scope, Solution, certify
from graphplan.passes.placement.driver import bound_with_offload, place
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.infeasible import peaks_or_given
from graphplan.passes.placement.params import PARAMS, Limits
from graphplan.passes.placement.problem import Problem

_AS_FAST = ", with the disk as fast as the CPU"


def place_or_map(
    problem: Problem,
    mappable: Set[str] | None = None,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    *,
    near: Assignment | None = None,
) -> Solution:
    """Place a graph, with weights on disk if it does not fit otherwise.

    Args:
        problem: the problem; without ``"disk"`` among its devices this is :func:`place`.
        mappable: the parameters that can stay on disk: those that a checkpoint stores in the model's dtype.
            None, for no checkpoint yet, means all.
        limits: as in :func:`graphplan.passes.placement.driver.place`.
        near: as in :func:`place`; ignored with a disk.

    Raises:
        InfeasibleError: no placement was found; it names sufficient budgets if they were found.
    """
    if DISK not in problem.topology:
        return place(problem, limits, near=near)
    return _DiskPlacement(problem, mappable, limits).run()


@dataclass(slots=True)
class _DiskPlacement:
    problem: Problem
    mappable: Set[str] | None
    limits: Limits

    def run(self) -> Solution:
        problem, disk = self.problem, self.problem.topology[DISK]
        weights = problem.graph.weights
        settled = [n for n, key in problem.fixed_weights.items() if key == DISK and n in weights]
        free = [name for name in weights if self._may_leave(name)]
        extra = min(disk.room, sum(round_up(weights[name].nbytes) for name in [*settled, *free]))
        if not extra:
            try:
                return self._in_memory()
            except InfeasibleError as error:
                raise self._infeasible(error, extra) from None
        wider = self._widened(extra, settled)
        if not settled:
            in_memory = self._in_memory_if_it_fits()
            if in_memory is not None and in_memory.bound.scope is Scope.WITHOUT_OFFLOAD:
                return in_memory
            if in_memory is not None:  # a placement with weights on disk may be faster: the CPU has more room
                return certify(in_memory.evaluation, self._bound(wider[0], in_memory.evaluation))
        failure: InfeasibleError | None = None
        nearest: list[Evaluation] = []
        for wide in wider:
            try:
                solution = place(wide, replace(self.limits, proves=False))
            except InfeasibleError as error:
                failure = failure or error.with_traceback(None)
                continue
            evaluation = self._spill(solution.evaluation.assignment, free, settled)
            if evaluation.feasible:
                return certify(evaluation, self._bound(wider[0], evaluation))
            nearest.append(evaluation)
        raise self._infeasible(failure, extra, nearest)

    def _bound(self, wide: Problem, evaluation: Evaluation) -> Bound:
        """Return the bound of the problem in which the disk is as fast as the CPU's memory."""
        bound = bound_with_offload(wide, evaluation.seconds, self.limits)
        return replace(bound, proof=bound.proof + _AS_FAST)

    def _may_leave(self, name: str) -> bool:
        weight = self.problem.graph.weights[name]
        mappable = self.mappable is None or name in self.mappable
        return (
            mappable
            and weight.kind == "parameter"
            and weight.streamable
            and weight.nbytes > 0
            and name not in self.problem.fixed_weights
        )

    def _in_memory_if_it_fits(self) -> Solution | None:
        """Return a solution with nothing on disk; None if the weights do not fit, or none is found."""
        room = sum(spec.room for spec in self.problem.topology.computing)
        if self.problem.graph.weight_bytes > room:
            return None
        try:
            return self._in_memory()
        except InfeasibleError:
            return None

    def _in_memory(self) -> Solution:
        topology = _without_disk(self.problem.topology)
        solution = place(replace(self.problem, topology=topology), self.limits)
        return replace(solution, evaluation=evaluate(self.problem, solution.evaluation.assignment))

    def _widened(self, extra: int, settled: Iterable[str]) -> list[Problem]:
        """Return problems with the disk as part of the CPU: as given, without CPU compute, all on the CPU."""
        problem, topology = self.problem, self.problem.topology
        cpu = topology.cpu
        accelerators = topology.accelerator_keys
        if cpu is None:
            disk = topology[DISK]
            staging = 2 * STAGED_BYTES * len(topology.devices)  # which the evaluator counts there too
            memory = DeviceSpec(DISK, CPU, extra + staging + disk.reserve, 1.0, 1.0, 1.0, disk.reserve)
            devices = tuple(memory if spec.key == DISK else spec for spec in topology.devices)
            alone = replace(problem, topology=replace(topology, devices=devices))
            return [alone.on(accelerators)]
        larger = _without_disk(topology).with_memory({cpu: topology[cpu].memory + extra})
        fixed = {**problem.fixed_weights, **dict.fromkeys(settled, cpu)}
        wide = replace(problem, topology=larger, fixed_weights=fixed)
        return [wide, wide.on(accelerators), wide.on(frozenset({cpu}))] if accelerators else [wide]

    def _spill(self, assignment: Assignment, free: Iterable[str], settled: Iterable[str]) -> Evaluation:
        """Move the weights that cost least on disk off the CPU, until its budget is kept."""
        cpu = self.problem.topology.cpu
        homes = {**assignment.weights, **dict.fromkeys(settled, DISK)}
        evaluation = evaluate(self.problem, replace(assignment, weights=homes))
        together: dict[tuple[str, ...], list[str]] = {}  # weights of one operation share a copy
        for name in free:
            if homes[name] == cpu:
                together.setdefault(self.problem.graph.consumers.get(name, ()), []).append(name)
        queue = sorted(together.values(), key=lambda names: self._price(names, assignment), reverse=True)
        for _ in range(2 * PARAMS.retries):
            over = 0 if cpu is None else evaluation.excess.get(cpu, 0)
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
        for reader in graph.readers.get(names[0], ()):
            on_cpu = not self.problem.topology[assignment.operations[reader]].is_accelerator
            read += min(nbytes, graph.operations[reader].bytes_accessed) if on_cpu else nbytes
        return read / nbytes, -nbytes

    def _infeasible(
        self, failure: InfeasibleError | None, extra: int, nearest: Sequence[Evaluation] = ()
    ) -> InfeasibleError:
        """Return the error of the widened problem in terms of the given budgets."""
        topology = self.problem.topology
        available = topology.budgets
        needed = self._needed(failure, extra)
        if nearest:
            least = min(nearest, key=lambda evaluation: sum(evaluation.excess.values()))
            needed = peaks_or_given(topology, least)
        if self.limits.advises:
            needed = self._grow_until_placed(needed)
        graph = self.problem.graph
        what = f"no placement fits, with up to {readable_bytes(extra)} of weights left on disk"
        hint = f". These budgets suffice: max_memory={needed}" if needed else ""
        parameters = [weight for weight in graph.weights.values() if weight.kind == "parameter"]
        total = sum(weight.nbytes for weight in parameters)
        mapped = sum(w.nbytes for w in parameters if self.mappable is None or w.name in self.mappable)
        if mapped < total and extra < topology[DISK].room and not graph.trains:
            hint += (
                ". Weights can stay on 'disk' where a checkpoint has them in the model's dtype: "
                f"{readable_bytes(mapped)} of {readable_bytes(total)} here. Save the model in this dtype "
                "with save_pretrained or safetensors.torch.save_file, and give partition(..., "
                "checkpoint=path)"
            )
        operation = None if failure is None else failure.operation
        device = None if failure is None else failure.device
        text = f"{what}; the budgets are {available}{hint}"
        return InfeasibleError(text, needed=needed, available=available, operation=operation, device=device)

    def _grow_until_placed(self, needed: Mapping[DeviceKey, int]) -> Mapping[DeviceKey, int]:
        """Return budgets grown until a placement is found within them; empty if that takes too many steps."""
        limits = replace(self.limits, proves=False, advises=False)
        for _ in range(PARAMS.retries if needed else 0):
            problem = replace(self.problem, topology=self.problem.topology.with_memory(needed))
            try:
                _DiskPlacement(problem, self.mappable, limits).run()
            except InfeasibleError as error:
                grown = {key: max(nbytes, error.needed.get(key, 0)) for key, nbytes in needed.items()}
                if grown == needed:
                    break
                needed = grown
            else:
                return needed
        return {}

    def _needed(self, failure: InfeasibleError | None, extra: int) -> Mapping[DeviceKey, int]:
        if failure is None or not failure.needed:
            return {}
        disk, cpu = self.problem.topology[DISK], self.problem.topology.cpu
        needed = {**failure.needed, DISK: max(disk.memory, failure.needed.get(DISK, 0))}
        if cpu is not None:
            accelerators = len(self.problem.topology.accelerators)
            buffers = 2 * accelerators * min(STAGED_BYTES, extra)  # which the widened problem does not count
            needed[cpu] = max(0, needed[cpu] - extra) + buffers
        return needed


def _without_disk(topology: Topology) -> Topology:
    return replace(topology, devices=tuple(spec for spec in topology.devices if spec.key != DISK))
