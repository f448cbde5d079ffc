"""A stage of a training step: forward and backward in one graph, with room for the microbatches in flight.

While one microbatch runs, others have run forward and not yet backward. What a plan withholds for what they
have saved decides how much is computed again in the backward pass, and that decides what they save: what is
withheld is raised to what a plan's microbatches save, and bisected where nothing fits beside it, or nothing
quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from graphplan.analysis.plan import Plan
from graphplan.capture.model.modes import Differentiation
from graphplan.compiler.capture_cache import with_backward
from graphplan.compiler.cluster.stage_compiler import StageSource
from graphplan.devices.topology import DeviceKey
from graphplan.errors import CaptureError, InfeasibleError
from graphplan.ir.liveness import saved_bytes
from graphplan.message_text import readable_bytes
from graphplan.passes.placement.params import Limits

_TRIES = 6  # plans of one stage
_NEAR = 1.05  # times the seconds of a step alone, that are near enough
Kept = Mapping[DeviceKey, int]


def with_step(source: StageSource, values: Sequence[Any] = ()) -> StageSource:
    """The stage with its training step; as it is where nothing that it computes has a gradient.

    It is for the sizes of these values that it takes, or for those that the plan is for.
    """
    if source.trained.isdisjoint(source.cut.outputs):
        return source
    how = Differentiation(()).of(source.module, ())
    if how is None:
        raise CaptureError(
            "gradients pass a stage without a parameter that requires one: only stages before the first such "
            "parameter may be without"
        )
    call = source.example(values=values)
    step = with_backward(source.cut.capture, source.model_copy.weights, call, how, fixed=True)
    return replace(source, how=how, step=source.annotator.of(step, source.model_copy.weights))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A stage of a training step, planned.

    Attributes:
        plan: of one microbatch.
        withheld: bytes of each device that were withheld from it.
        kept_bytes: those that are needed, at most as many.
    """

    plan: Plan
    withheld: Kept
    kept_bytes: Kept


def plan_step(plan_beside: Callable[[Kept], Plan], others: int, shared: Set[str], limits: Limits) -> StepPlan:
    """The quickest plan of a stage that is found for which enough was withheld.

    Args:
        plan_beside: plans one microbatch's step while so many bytes of devices are withheld.
        others: microbatches that are in flight beside it.
        shared: parameters that other stages read too.
        limits: when any that was found is enough.

    Raises:
        InfeasibleError: no placement fits.
    """
    low: Kept = {}
    high: Kept | None = None
    tried: Kept = {}
    best: StepPlan | None = None
    short: StepPlan | None = None  # for which too little was withheld
    lacking: InfeasibleError | None = None
    alone = math.inf  # seconds of a step that has the machine for itself
    for _ in range(_TRIES):
        if best is not None and limits.over:
            break
        try:
            plan = plan_beside(tried)
        except InfeasibleError as error:
            if not tried:
                raise
            high, lacking = tried, error.with_traceback(None)
        else:
            alone = min(alone, plan.makespan)
            kept = kept_bytes(plan, others, shared)
            if all(nbytes <= tried.get(key, 0) for key, nbytes in kept.items()):
                found, high = StepPlan(plan, tried, kept), tried
                best = min(best or found, found, key=lambda one: one.plan.makespan)
                if plan.makespan <= _NEAR * alone:
                    break
            else:
                low, short = tried, StepPlan(plan, tried, kept)
        if high is None:
            tried = {key: max(kept.get(key, 0), tried.get(key, 0)) for key in {*kept, *tried}}
        else:
            tried = {key: (low.get(key, 0) + nbytes + 1) // 2 for key, nbytes in high.items()}
    if best is None:
        assert short is not None  # what is needed beside a step is known of its plan
        raise _no_room(short, others, lacking)
    return best


def _no_room(short: StepPlan, others: int, lacking: InfeasibleError | None) -> InfeasibleError:
    """The error, with the tightest device: as what failed last says, or the plan that withheld too little."""
    plan, topology = short.plan, short.plan.topology
    memory = topology.budgets
    beside = {key: topology[key].withheld - short.withheld.get(key, 0) for key in short.kept_bytes}
    needed = {key: plan.peak_bytes[key] + n + beside[key] for key, n in short.kept_bytes.items()}
    device = max(needed, key=lambda key: needed[key] / max(1, memory[key]))
    said = f"needs {readable_bytes(needed[device])} and may hold {readable_bytes(memory[device])}"
    error = lacking or InfeasibleError(
        f"device {device!r} {said}", needed=needed, available=memory, device=device
    )
    error.args = (
        f"there is no room beside a training step for {others} other microbatches in flight, which save "
        f"{readable_bytes(short.kept_bytes[device])} or more on device {device!r}: {error}. "
        "Use schedule='1f1b', or smaller microbatches",
    )
    return error


def kept_bytes(plan: Plan, others: int, shared: Set[str]) -> dict[DeviceKey, int]:
    """Bytes on each device that a stage holds beside one microbatch's step, with so many others in flight.

    ``shared`` are parameters that other stages read too: while their gradients are summed over the ranks,
    earlier ones are kept, and one at a time passes host memory.
    """
    saved = saved_bytes(plan.graph, plan.topology, plan.schedule)
    found = {key: others * nbytes for key, nbytes in saved.items() if others * nbytes}
    homes, host, most = plan.schedule.assignment.weights, plan.topology.cpu, 0
    for name in sorted(shared & plan.graph.weights.keys()):
        weight, home = plan.graph.weights[name], homes[name]
        if weight.beside:
            found[home] = found.get(home, 0) + weight.nbytes
            most = max(most, weight.nbytes if home != host else 0)
    if host is not None and most:
        found[host] = found.get(host, 0) + most
    return found
