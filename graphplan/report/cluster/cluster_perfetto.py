"""The batch of several machines in Chrome's trace format: a group of lanes for each machine, with the bubble.

A transfer occupies the sender and the receiver. A machine starts the next microbatch when it has sent the one
before; for the rest of the batch it waits. The stages of a machine share its lanes. Times are microseconds,
as the format requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graphplan.ir.cluster.cluster_plan_data import ClusterPlanData
from graphplan.report.perfetto import bar, metadata

_LANES = {"stage": 1, "wait": 1, "receive": 2}


@dataclass(frozen=True, slots=True)
class Slot:
    """A period of a machine's time for one microbatch.

    Attributes:
        stage: index of its stage.
        microbatch: index of the microbatch, which a wait waits for.
        kind: computing, receiving, or waiting for data to receive.
        start: seconds since the batch began.
        end: likewise.
        backward: whether it is the backward pass.
    """

    stage: int
    microbatch: int
    kind: Literal["stage", "receive", "wait"]
    start: float
    end: float
    backward: bool = False

    @property
    def name(self) -> str:
        """The microbatch, and the action."""
        backward = ", backward" if self.backward else ""
        return f"{'wait for ' if self.kind == 'wait' else ''}microbatch {self.microbatch}{backward}"


def batch_slots(plan: ClusterPlanData[Any], *, forward_only: bool = False) -> Iterator[Slot]:
    """Yield when machines receive, compute and wait, as estimated."""
    for one in plan.forward_actions if forward_only else plan.timed_actions:
        ids, backward = (one.action.stage, one.action.microbatch), one.action.backward
        if one.received > one.free:
            yield Slot(*ids, "wait", one.free, one.received, backward)
        if one.start > one.received:
            yield Slot(*ids, "receive", one.received, one.start, backward)
        yield Slot(*ids, "stage", one.start, one.end, backward)


def to_cluster_trace(plan: ClusterPlanData[Any], measured: Sequence[Slot] = ()) -> str:
    """Return the trace as JSON text: the estimated batch, or a measured one after its estimate, forward."""
    events = [*_events(plan, list(batch_slots(plan, forward_only=bool(measured))), 1, "")]
    events += _events(plan, measured, 1 + len(plan.used), ", measured")
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(
    plan: ClusterPlanData[Any], slots: Sequence[Slot], first: int, suffix: str
) -> Iterator[dict[str, Any]]:
    if not slots:
        return
    lane = {machine: first + place for place, machine in enumerate(plan.used)}
    for machine, number in lane.items():
        stages = [str(index) for index, stage in enumerate(plan.stages) if stage.machine == machine]
        title = f"machine {machine} (stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}{suffix})"
        yield metadata("process_name", number, 0, name=title)
        yield metadata("thread_name", number, 1, name="microbatches")
        yield metadata("thread_name", number, 2, name="receives")
    several = len(plan.stages) > len(plan.used)
    for slot in slots:
        stage = plan.stages[slot.stage]
        receives = stage.receives if slot.kind == "receive" and not slot.backward else ()
        name = f"{slot.name}, stage {slot.stage}" if several else slot.name
        pid, tid = lane[stage.machine], _LANES[slot.kind]
        sizes = {value.name: value.nbytes for value in receives}
        yield bar(name, slot.kind, slot.start, slot.end, pid, tid, sizes)
