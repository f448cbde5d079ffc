"""The batch of several machines in Chrome's trace format: a group of lanes for each machine, with the bubble.

A transfer takes the sender's time and the receiver's. A machine takes the next microbatch when it has passed
on the one before; what is left of the batch it waits. Times are microseconds, as the format wants them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from graphplan.ir.cluster_plan_data import ClusterPlanData

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


def to_cluster_trace(plan: ClusterPlanData[Any]) -> str:
    """The trace as JSON text."""
    events: list[dict[str, Any]] = []
    for index, stage in enumerate(plan.stages):
        name = f"machine {stage.machine} (stage {index})"
        events.append({"ph": "M", "name": "process_name", "pid": index + 1, "tid": 0, "args": {"name": name}})
        for lane, title in ((1, "microbatches"), (2, "receives")):
            named = {"ph": "M", "name": "thread_name", "pid": index + 1, "tid": lane}
            events.append({**named, "args": {"name": title}})
    for slot in batch_slots(plan):
        receives = plan.stages[slot.stage].receives if slot.kind == "receive" else ()
        events.append(
            {
                "ph": "X",
                "name": f"{'wait for ' if slot.kind == 'wait' else ''}microbatch {slot.microbatch}",
                "cat": slot.kind,
                "ts": slot.start * 1e6,
                "dur": (slot.end - slot.start) * 1e6,
                "pid": slot.stage + 1,
                "tid": _LANES[slot.kind],
                "args": {one.name: one.nbytes for one in receives},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
