"""First fit in the order of execution, with the readers of a weight together.

Of contiguous pieces, two may read one weight: an embedding that is the head of a model too. It is then copied
from one accelerator to another at every call, and takes room beside the activations there. Here an operation
runs where a weight that it reads lives already; others fill one accelerator after another. For a table ``w``
that the first and the last operation read, on two accelerators::

    a = embedding(x, w)   0
    b = linear(a, u)      0
    c = linear(b, v)      1
    d = linear(c, w)      0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphplan.device import DeviceKey, DeviceSpec
from graphplan.graph import Operation
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.residence import reside

__all__ = ["fill"]

_ROUNDS = 5  # times that it is done again with less room, when the evaluator finds a budget passed


def fill(problem: Problem) -> Iterator[Evaluation]:
    """Placements within the budgets on the accelerators alone: as they are listed, and the fastest first.

    Operations without weights run where the last one with weights does. Only where that finds nothing, those
    whose values take more than is left there run where most room is: to join the parts of a large
    result, say.
    """
    accelerators = [spec for spec in problem.topology.devices if spec.is_accelerator]
    fastest = sorted(accelerators, key=lambda spec: -spec.flops)
    orders = (accelerators, fastest) if fastest != accelerators else (accelerators,)
    for roomy in (False, True):
        tried = [_within_budgets(problem, order, roomy=roomy) for order in orders]
        found = [evaluation for evaluation in tried if evaluation is not None]
        yield from found
        if found:
            return


def _within_budgets(problem: Problem, order: Sequence[DeviceSpec], *, roomy: bool) -> Evaluation | None:
    """A device that the evaluator finds passed gets fewer weights by as much."""
    taken: dict[DeviceKey, int] = {}
    for _ in range(_ROUNDS):
        operations = _Filling(problem, order, taken, roomy).run()
        if operations is None:
            return None
        found = evaluate(problem, reside(problem, problem.obey(operations)))
        if not found.excess:
            return found if found.feasible else None
        for key, excess in found.excess.items():
            taken[key] = problem.topology[key].room - found.peak(key).weights + excess
    return None


class _Filling:
    """One pass over the operations; ``taken``: bytes that are left free on a device."""

    def __init__(
        self, problem: Problem, order: Sequence[DeviceSpec], taken: Mapping[DeviceKey, int], roomy: bool
    ) -> None:
        self.graph, self.order, self.roomy = problem.graph, order, roomy
        self.left = {spec.key: spec.room - taken.get(spec.key, 0) for spec in order}
        self.waiting = [spec.key for spec in order]  # the first is being filled
        self.latest: DeviceKey = order[0].key  # where weights were read last
        self.homes: dict[str, DeviceKey] = {}
        self.placed: dict[str, DeviceKey] = {}

    def run(self) -> dict[str, DeviceKey] | None:
        """Where each operation runs; None where the weights do not fit."""
        group_of = {name: group for group in self.graph.together for name in group}
        for name in self.graph.operations:
            if name not in self.placed:
                members = sorted(group_of.get(name, frozenset([name])))
                key = self._device([self.graph.operations[member] for member in members])
                if key is None:
                    return None
                self.placed.update(dict.fromkeys(members, key))
        return self.placed

    def _device(self, operations: Sequence[Operation]) -> DeviceKey | None:
        """For operations that stay together; their weights are counted there."""
        read = [name for one in operations for name in one.inputs if name in self.graph.weights]
        known = [self.homes[name] for name in read if name in self.homes]
        fresh = {name for name in read if name not in self.homes}
        need = sum(self.order[0].rounded(self.graph.weights[name].nbytes) for name in fresh)
        key: DeviceKey | None
        if known:
            key = known[0]
        elif not fresh:
            key = self._without_weights(operations[0])
        else:
            while self.waiting and need > self.left[self.waiting[0]]:
                self.waiting.pop(0)
            key = self.waiting[0] if self.waiting else None
        if key is not None:
            self.left[key] -= need
            self.latest = key if read else self.latest
            self.homes.update(dict.fromkeys(fresh, key))
        return key

    def _without_weights(self, operation: Operation) -> DeviceKey:
        graph = self.graph
        read = sum(graph.values[name].copy_bytes for name in operation.inputs if name in graph.values)
        made = sum(graph.values[name].nbytes for name in operation.outputs)
        full = self.roomy and read + made > self.left[self.latest]
        return max(self.left, key=self.left.__getitem__) if full else self.latest
