"""Which budgets would do, where the given ones do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from graphplan.devices.topology import ALIGNMENT, DeviceKey, Topology
from graphplan.errors import InfeasibleError
from graphplan.message_text import readable_bytes
from graphplan.passes.placement.evaluate import Evaluation, evaluate_filled
from graphplan.passes.placement.params import PARAMS, Effort
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import on_one_device, unread_weights

Probe = Callable[[Problem, Effort], Evaluation | None]


@dataclass(frozen=True, slots=True)
class Advice:
    """What would do.

    Attributes:
        evaluation: a placement that passes the given budgets by little.
        budgets: key -> bytes, with which a placement is found; none below the given.
    """

    evaluation: Evaluation
    budgets: Mapping[DeviceKey, int]


def smallest_budgets(
    problem: Problem, effort: Effort, probe: Probe, *, closely: bool = True
) -> Advice | None:
    """A placement within the smallest growth of all budgets in proportion that is found in time.

    Growth begins where the weights fit at all, goes on with an eighth for activations, and doubles its steps
    until a placement is found; between the last two, bisection, if ``closely``. ``probe`` finds a placement
    with little work.
    """
    # budgets of nothing cannot grow in proportion: they start at one allocation
    empty = {s.key: ALIGNMENT for s in problem.topology.computing if s.memory == 0}
    topology, step = problem.topology.with_memory(empty), 0.125
    room = sum(spec.room for spec in topology.devices)
    low = high = max(1.0, problem.graph.held_bytes / max(1, room))
    found = probe(replace(problem, topology=topology.scaled(high)), effort)
    while found is None and high < low * (1 << 20) and not effort.over:
        low, high = high, high * (1 + step)
        step *= 2
        found = probe(replace(problem, topology=topology.scaled(high)), effort)
    while closely and found is not None and high / low > 1 + 2 * PARAMS.negligible and not effort.over:
        middle = (low + high) / 2.0
        closer = probe(replace(problem, topology=topology.scaled(middle)), effort)
        if closer is None:
            low = middle
        else:
            high, found = middle, closer
    if found is None:
        return _everything_on_one(problem)
    if not closely:
        return Advice(found, topology.scaled(high).budgets)
    return _sufficient(problem, found, topology.scaled(high), effort, probe)


def _everything_on_one(problem: Problem) -> Advice | None:
    """All that may run there on one device, whatever it takes: an answer that needs no search."""
    unread, keys = unread_weights(problem), [spec.key for spec in problem.topology.computing]
    found = [evaluate_filled(problem, on_one_device(problem, key), unread) for key in keys]
    finite = [one for one in found if math.isfinite(one.seconds)]
    least = min(finite, key=lambda one: sum(one.excess.values()), default=None)
    return None if least is None else Advice(least, peaks_or_given(problem.topology, least))


def peaks_or_given(topology: Topology, found: Evaluation) -> dict[DeviceKey, int]:
    """The given budgets, those that a placement passes raised to its peaks."""
    return {
        spec.key: max(spec.memory, found.peak(spec.key).nbytes + spec.withheld) for spec in topology.devices
    }


def _sufficient(problem: Problem, found: Evaluation, limit: Topology, effort: Effort, probe: Probe) -> Advice:
    """Ask for the peaks themselves if that succeeds; else for the grown budgets."""
    budgets = peaks_or_given(problem.topology, found)
    exactly = replace(problem, topology=problem.topology.with_memory(budgets))
    if not effort.over and probe(exactly, effort) is not None:
        return Advice(found, budgets)
    return Advice(found, limit.budgets)


def explain_infeasible(problem: Problem, advice: Advice | None) -> InfeasibleError:
    """The error, with the budgets that would do."""
    topology = problem.topology
    available = topology.budgets
    if advice is None:
        total = readable_bytes(problem.graph.held_bytes)
        return InfeasibleError(
            f"no placement fits: the model's weights are {total}, and no proportional increase of the "
            f"budgets was found that suffices; the budgets are {_listed(available)}",
            available=available,
        )
    peaks = peaks_or_given(topology, advice.evaluation)
    device = max(peaks, key=lambda key: (peaks[key] - available[key]) / max(peaks[key], 1))
    operation = advice.evaluation.peak(device).operation
    return InfeasibleError(
        f"no placement fits: the nearest that was found needs {readable_bytes(peaks[device])} on device "
        f"{device!r} for {_described(problem, operation)}, max_memory allows "
        f"{readable_bytes(available[device])}. Budgets that would do: max_memory={_listed(advice.budgets)}",
        needed=advice.budgets,
        available=available,
        operation=operation,
        device=device,
    )


def _listed(budgets: Mapping[DeviceKey, int]) -> str:
    return "{" + ", ".join(f"{key!r}: {nbytes}" for key, nbytes in budgets.items()) + "}"


def _described(problem: Problem, operation: str) -> str:
    found = problem.graph.operations.get(operation)
    if found is None:
        return "its weights"
    return f"{operation!r} (in {found.module_path})" if found.module_path else repr(operation)
