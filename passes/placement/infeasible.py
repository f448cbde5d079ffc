"""Sufficient budgets, where no placement fits the given ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graphplan.devices.topology import ALIGNMENT, DeviceKey, Topology
from graphplan.errors import InfeasibleError
from graphplan.ir.liveness import OPTIMIZER, OUTPUT
from graphplan.message_text import readable_bytes
from graphplan.passes.placement.evaluate import Evaluation, evaluate_filled
from graphplan.passes.placement.params import PARAMS, Effort
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import on_one_device, unread_weights

# the operation of a peak -> what takes the bytes, where that is no operation
_PARTS = {"": "its weights", OUTPUT: "its results", OPTIMIZER: "the optimizer's step"}

Probe = Callable[[Problem, Effort], Evaluation | None]


@dataclass(frozen=True, slots=True)
class Advice:
    """Sufficient budgets, and a placement for them.

    Attributes:
        evaluation: a placement that exceeds the given budgets by little.
        budgets: device -> bytes within which a placement is found; none is below the given one.
    """

    evaluation: Evaluation
    budgets: Mapping[DeviceKey, int]


def smallest_budgets(
    problem: Problem, effort: Effort, probe: Probe, *, closely: bool = True
) -> Advice | None:
    """Return a placement within the smallest proportional growth of all budgets that is found in time.

    Growth begins where the weights fit, continues with an eighth for activations, and doubles its steps until
    ``probe``, a short search, finds a placement. If ``closely``, the last two steps are bisected, and the
    budgets are that placement's peaks if a placement is found within them.
    """
    # a budget of zero cannot grow in proportion: it starts at one allocation
    empty = {s.key: ALIGNMENT for s in problem.topology.computing if s.memory == 0}
    topology, step = problem.topology.with_memory(empty), 0.125
    capacity = sum(spec.room for spec in topology.devices)
    low = high = max(1.0, problem.graph.held_bytes / max(1, capacity))

    def placed(growth: float) -> Evaluation | None:
        return probe(replace(problem, topology=topology.scaled(growth)), effort)

    best = placed(high) if high > 1 else None  # the given budgets have been searched
    while best is None and high < low * (1 << 20) and not effort.over:
        low, high = high, high * (1 + step)
        step *= 2
        best = placed(high)
    while closely and best is not None and high / low > 1 + 2 * PARAMS.negligible and not effort.over:
        middle = (low + high) / 2.0
        closer = placed(middle)
        if closer is None:
            low = middle
        else:
            high, best = middle, closer
    if best is None:
        return None
    peaks = peaks_or_given(problem.topology, best)
    at_peaks = replace(problem, topology=problem.topology.with_memory(peaks))
    suffices = closely and not effort.over and probe(at_peaks, effort) is not None
    return Advice(best, peaks if suffices else topology.scaled(high).budgets)


def everything_on_one(problems: Sequence[Problem]) -> Advice | None:
    """Return the placement of all passes on one device that exceeds budgets least; it needs no search."""
    topology, possible = problems[0].topology, []
    for spec in topology.computing:
        evaluations = [
            evaluate_filled(problem, on_one_device(problem, spec.key), unread_weights(problem))
            for problem in problems
        ]
        if all(math.isfinite(evaluation.seconds) for evaluation in evaluations):
            possible.append(with_highest_peaks(evaluations))
    best = min(possible, key=lambda evaluation: sum(evaluation.excess.values()), default=None)
    return None if best is None else Advice(best, peaks_or_given(topology, best))


def with_highest_peaks(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation of the pass that fills its budgets most, with the highest peaks of all passes."""
    topology = evaluations[0].problem.topology

    def filled(evaluation: Evaluation) -> float:
        return max(evaluation.peak(spec.key).nbytes / max(spec.memory, 1) for spec in topology.devices)

    peaks = {
        key: max((evaluation.peak(key) for evaluation in evaluations), key=lambda peak: peak.nbytes)
        for key in topology.keys
    }
    return replace(max(evaluations, key=filled), highest=peaks)


def peaks_or_given(topology: Topology, best: Evaluation) -> dict[DeviceKey, int]:
    """Return the given budgets, those that the placement exceeds raised to its peaks."""
    return {
        spec.key: max(spec.memory, best.peak(spec.key).nbytes + spec.withheld) for spec in topology.devices
    }


def explain_infeasible(problem: Problem, advice: Advice | None) -> InfeasibleError:
    """Return the error, with the budgets of the advice."""
    topology = problem.topology
    available = topology.budgets
    if advice is None:
        total = readable_bytes(problem.graph.held_bytes)
        return InfeasibleError(
            f"no placement fits: the model's weights are {total}, and no proportional increase of the "
            f"budgets was found to suffice; the budgets are {_listed(available)}",
            available=available,
        )
    peaks = peaks_or_given(topology, advice.evaluation)
    device = max(peaks, key=lambda key: (peaks[key] - available[key]) / max(peaks[key], 1))
    operation = advice.evaluation.peak(device).operation
    return InfeasibleError(
        f"no placement fits: the closest one found needs {readable_bytes(peaks[device])} on device "
        f"{device!r} for {_described(advice.evaluation.problem, operation)}, but max_memory allows "
        f"{readable_bytes(available[device])}. These budgets suffice: max_memory={_listed(advice.budgets)}",
        needed=advice.budgets,
        available=available,
        operation=operation,
        device=device,
    )


def _listed(budgets: Mapping[DeviceKey, int]) -> str:
    return "{" + ", ".join(f"{key!r}: {nbytes}" for key, nbytes in budgets.items()) + "}"


def _described(problem: Problem, name: str) -> str:
    if name in _PARTS:
        return _PARTS[name]
    operation = problem.graph.operations.get(name)
    module_path = "" if operation is None else operation.module_path
    return f"{name!r} (in {module_path})" if module_path else repr(name)
