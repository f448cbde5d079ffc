"""Where the seconds of one forward pass go, and which module takes most of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

from graphplan.devices.topology import DeviceKey
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule import Move, MoveKind
from graphplan.report.data_flows import run_seconds, timed_steps
from graphplan.report.text import device_text, time_text

_MOST = 0.8  # a module explains a device's time if it has so much of it, and runs so much there
_MUCH = 0.15  # of the makespan: other parts that take so much are named too


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Seconds of one forward pass; together they are its makespan.

    Attributes:
        compute: device -> seconds of the operations that it runs.
        transfers: seconds of transfers of activations and gradients between devices.
        streaming: seconds only for copies of weights, or waits for streamed ones.
        inputs: seconds to copy inputs from the caller's device.
        outputs: seconds to copy outputs back to it.
    """

    compute: Mapping[DeviceKey, float]
    transfers: float
    streaming: float
    inputs: float
    outputs: float


def time_parts(plan: PlanData) -> TimeParts:
    """Return the seconds of each part of a forward pass."""
    timeline, moved = plan.timeline, dict.fromkeys(get_args(MoveKind), 0.0)
    for step, event in timed_steps(plan):
        if isinstance(step, Move):
            moved[step.kind] += event.end - event.start
    return TimeParts(
        {key: timeline.busy("run", key) for key in (*plan.topology.keys, plan.schedule.host)},
        moved["activation"] + moved["gradient"],
        moved["weight"] + timeline.busy("wait"),
        inputs=moved["input"],
        outputs=moved["output"] + moved["writeback"],
    )


def slowest_module(plan: PlanData, device: DeviceKey) -> tuple[str | None, float]:
    """Return the innermost module with most of a device's compute time, and its seconds there.

    Modules that run on other devices too, such as the stack of all layers, are excluded. None stands for all
    that the device computes, the empty path for the whole model.
    """
    seconds, devices = run_seconds(plan.timeline), plan.schedule.assignment.operations
    inside, everywhere = {"": 0.0}, {"": 0.0}  # the whole model
    for operation in plan.graph.operations.values():
        spent = seconds.get(operation.name, 0.0)
        names = operation.module_path.split(".") if operation.module_path else []
        for path in ("", *accumulate(names, "{}.{}".format)):
            everywhere[path] = everywhere.get(path, 0.0) + spent
            if devices[operation.name] == device:
                inside[path] = inside.get(path, 0.0) + spent
    paths = (path for path, spent in inside.items() if spent >= _MOST * max(inside[""], everywhere[path]))
    slowest = max(paths, key=len, default=None)
    return slowest, inside[slowest or ""]


def what_takes_the_time(plan: PlanData) -> str:
    """Return a sentence: "92 % of 168.60 ms is `decode_head` on the CPU"; empty if nothing takes time.

    Other large parts follow: ", 45 % waiting for streamed weights".
    """
    if not plan.makespan:
        return ""
    parts = time_parts(plan)
    spent_on = {
        "transfers between devices": parts.transfers,
        "waiting for streamed weights": parts.streaming,
        "copies of inputs and outputs": parts.inputs + parts.outputs,
    }
    for key, seconds in parts.compute.items():
        path, spent = slowest_module(plan, key) if seconds else (None, 0.0)
        name = f"`{path}`" if path else "computing"
        spent_on[f"{name} on {device_text(key)}"] = spent
    first, *others = sorted(spent_on, key=lambda name: -spent_on[name])
    largest = f"{100 * spent_on[first] / plan.makespan:.0f} % of {time_text(plan.makespan)} is {first}"
    large = (name for name in others if spent_on[name] >= _MUCH * plan.makespan)
    return ", ".join([largest, *(f"{100 * spent_on[name] / plan.makespan:.0f} % {name}" for name in large)])
