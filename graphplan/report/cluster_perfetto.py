"""The batch of several machines in Chrome's trace format: a group of lanes for each machine, with the bubble.

A transfer takes the sender's time and the receiver's. A machine takes the next microbatch when it has passed
on the one before; what is left of the batch it waits. Times are microseconds, as the format wants them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from graphplan.ir.cluster_plan_data import ClusterPlanData
from graphplan.report.perfetto import metadata

_LANES = {"stage": 1, "wait": 1, "receive": 2}


@dataclass(frozen=True, slots=True)
class Slot:
    """What a machine does with a microbatch.

    Attributes:
        stage: index of its stage.
        microbatch: which; that which is waited for, of a wait.
        kind: computing, receiving, or waiting for what is to be received.
        start: seconds since the batch began.
        end: likewise.
    """

    stage: int
    microbatch: int
    kind: Literal["stage", "receive", "wait"]
    start: float
    end: float


def batch_slots(plan: ClusterPlanData[Any]) -> Iterator[Slot]:
    """When each machine receives, computes and waits, as estimated, forward only."""
    count, sent = len(plan.stages), plan.transfer_seconds
    free = [0.0] * count
    for microbatch in range(plan.microbatches):
        for index, stage in enumerate(plan.stages):
            begin = free[index]
            if index:
                arrives = max(begin, free[index - 1])
                if arrives > begin:
                    yield Slot(index, microbatch, "wait", begin, arrives)
                begin = arrives + sent[index - 1]
                yield Slot(index, microbatch, "receive", arrives, begin)
                free[index - 1] = begin
            free[index] = begin + stage.plan.makespan
            yield Slot(index, microbatch, "stage", begin, free[index])


def to_cluster_trace(plan: ClusterPlanData[Any], measured: Sequence[Slot] = ()) -> str:
    """The trace as JSON text: the estimated batch, and the machines of a measured one after its own."""
    events = [*_events(plan, list(batch_slots(plan)), 1, "")]
    events += _events(plan, measured, 1 + len(plan.stages), ", measured")
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(
    plan: ClusterPlanData[Any], slots: Sequence[Slot], first: int, what: str
) -> Iterator[dict[str, Any]]:
    for index in sorted({slot.stage for slot in slots}):
        name = f"machine {plan.stages[index].machine} (stage {index}{what})"
        yield metadata("process_name", first + index, 0, name=name)
        yield metadata("thread_name", first + index, 1, name="microbatches")
        yield metadata("thread_name", first + index, 2, name="receives")
    for slot in slots:
        receives = plan.stages[slot.stage].receives if slot.kind == "receive" else ()
        yield {
            "ph": "X",
            "name": f"{'wait for ' if slot.kind == 'wait' else ''}microbatch {slot.microbatch}",
            "cat": slot.kind,
            "ts": slot.start * 1e6,
            "dur": (slot.end - slot.start) * 1e6,
            "pid": first + slot.stage,
            "tid": _LANES[slot.kind],
            "args": {one.name: one.nbytes for one in receives},
        }
