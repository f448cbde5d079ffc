"""A stage of a training step: forward and backward in one graph, with room for the microbatches in flight.

While one microbatch runs, others have run forward but not yet backward. A plan withholds memory for what they
save. The memory withheld decides how much the backward pass recomputes, and that decides what microbatches
save. So it is raised to what the microbatches of a plan save, and bisected if the rest holds no plan, or only
a slow one.
"""

from __future__ import annotations

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

_TRIES = 6  # plans of one stage, at most
_NEAR = 1.05  # a plan is fast enough within this factor of a step that has the machine for itself
Kept = Mapping[DeviceKey, int]


def with_step(source: StageSource, values: Sequence[Any] = ()) -> StageSource:
    """Return the stage with its training step; unchanged if none of its outputs has a gradient.

    The step is for the sizes of ``values``, which are its inputs, or else for those that the plan is for.
    """
    if source.trained.isdisjoint(source.cut.outputs):
        return source
    how = Differentiation(()).of(source.module, ())
    if how is None:
        raise CaptureError(
            "gradients would pass through a stage without trained parameters: only stages before the first "
            "trained parameter may have none"
        )
    call = source.example(values=values)
    step = with_backward(source.cut.capture, source.model_copy.weights, call, how, fixed=True)
    return replace(source, how=how, step=source.annotator.of(step, source.model_copy.weights))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a stage of a training step.

    Attributes:
        plan: plan of one microbatch.
        withheld: device -> bytes that were withheld from the plan.
        kept_bytes: device -> bytes that other microbatches need, of those withheld.
    """

    plan: Plan
    withheld: Kept
    kept_bytes: Kept

    @property
    def is_enough(self) -> bool:
        """Whether enough was withheld for the other microbatches."""
        return all(nbytes <= self.withheld.get(key, 0) for key, nbytes in self.kept_bytes.items())


def plan_step(
    plan_withholding: Callable[[Kept], Plan], others: int, shared: Set[str], limits: Limits
) -> StepPlan:
    """Return the fastest plan of a stage found for which enough memory was withheld.

    Args:
        plan_withholding: plans one microbatch's step, given the bytes to withhold from each device.
        others: number of other microbatches in flight.
        shared: parameters that other stages read too.
        limits: once they are reached, any plan found is enough.

    Raises:
        InfeasibleError: no placement fits.
    """
    first = plan_withholding({})  # has the machine for itself
    short = StepPlan(first, {}, kept_bytes(first, others, shared))
    if short.is_enough:
        return short
    alone, tried = first.makespan, short.kept_bytes
    high: Kept | None = None
    best: StepPlan | None = None
    shortage: InfeasibleError | None = None
    for _ in range(_TRIES - 1):
        if best is not None and limits.over:
            break
        try:
            plan = plan_withholding(tried)
        except InfeasibleError as error:
            high, shortage = tried, error.with_traceback(None)
        else:
            alone = min(alone, plan.makespan)
            step = StepPlan(plan, tried, kept_bytes(plan, others, shared))
            if step.is_enough:
                high, best = tried, min(best or step, step, key=lambda one: one.plan.makespan)
                if plan.makespan <= _NEAR * alone:
                    break
            else:
                short = step
        low = short.withheld
        if high is None:
            kept = short.kept_bytes
            tried = {key: max(kept.get(key, 0), low.get(key, 0)) for key in {*kept, *low}}
        else:
            tried = {key: (low.get(key, 0) + nbytes + 1) // 2 for key, nbytes in high.items()}
    if best is None:
        raise _no_room(short, others, shortage)
    return best


def _no_room(short: StepPlan, others: int, shortage: InfeasibleError | None) -> InfeasibleError:
    """Return the last error, or one from the plan that withheld too little, with the tightest device."""
    plan, topology = short.plan, short.plan.topology
    memory = topology.budgets
    reserved = {key: topology[key].withheld - short.withheld.get(key, 0) for key in short.kept_bytes}
    needed = {key: plan.peak_bytes[key] + n + reserved[key] for key, n in short.kept_bytes.items()}
    device = max(needed, key=lambda key: needed[key] / max(1, memory[key]))
    text = f"needs {readable_bytes(needed[device])} and may hold {readable_bytes(memory[device])}"
    error = shortage or InfeasibleError(
        f"device {device!r} {text}", needed=needed, available=memory, device=device
    )
    error.args = (
        f"a training step leaves no room for {others} other microbatches in flight, which save "
        f"{readable_bytes(short.kept_bytes[device])} or more on device {device!r}: {error}. "
        "Use schedule='1f1b', or smaller microbatches",
    )
    return error


def kept_bytes(plan: Plan, others: int, shared: Set[str]) -> dict[DeviceKey, int]:
    """Return device -> bytes that a stage holds besides one microbatch's step, with ``others`` in flight.

    ``shared`` are parameters that other stages read too: while their gradients are summed over the ranks,
    earlier gradients are kept, and one at a time passes through host memory.
    """
    saved = saved_bytes(plan.graph, plan.topology, plan.schedule)
    kept = {key: others * nbytes for key, nbytes in saved.items() if others * nbytes}
    homes, host, largest = plan.schedule.assignment.weights, plan.topology.cpu, 0
    for name in sorted(shared & plan.graph.weights.keys()):
        weight, home = plan.graph.weights[name], homes[name]
        if weight.beside:
            kept[home] = kept.get(home, 0) + weight.nbytes
            largest = max(largest, weight.nbytes if home != host else 0)
    if host is not None and largest:
        kept[host] = kept.get(host, 0) + largest
    return kept
