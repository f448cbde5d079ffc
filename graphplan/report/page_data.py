"""The data of the page: numbers in columns, names once, references by index.

Groups, operations, weights, devices, modules and source lines are lists, and references to their items are
positions. A child of a group is the position of another group, or ``-1 - position`` of an operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from graphplan.devices.speeds import Speed
from graphplan.devices.topology import CPU, DeviceKey
from graphplan.ir.liveness import OPTIMIZER
from graphplan.ir.plan_data import PlanData, Stage
from graphplan.ir.remarks import Remarks
from graphplan.ir.schedule import Run, prefetch_bytes
from graphplan.ir.timeline import Measured, Timeline
from graphplan.report.data_flows import find_flows, made_bytes, run_seconds
from graphplan.report.module_tree import Group, stage_groups
from graphplan.report.text import device_colours, device_name, module_range, shape_text
from graphplan.report.time_parts import time_parts, what_takes_the_time
from graphplan.report.two_plans import comparison


def page_data(
    plan: PlanData,
    measured: Measured | None = None,
    remarks: Remarks | None = None,
    other: PlanData | None = None,
) -> dict[str, Any]:
    """Return the data of a plan's page, for the arguments of :func:`graphplan.report.html_page.to_html`.

    Raises:
        PlanError: the other plan is of another graph.
    """
    remarks = remarks or Remarks()
    return {
        "answer": [what_takes_the_time(plan), remarks.advice],
        **_PageWriter(plan, measured, remarks).data(),
        "other": None if other is None else comparison(plan, other),
    }


def _positions(items: Iterable[Any]) -> dict[Any, int]:
    """Return item -> its position among the distinct items."""
    return {item: index for index, item in enumerate(dict.fromkeys(items))}


class _PageWriter:
    def __init__(self, plan: PlanData, measured: Measured | None, remarks: Remarks) -> None:
        self.plan, self.graph, self.measured, self.remarks = plan, plan.graph, measured, remarks
        self.device = _positions((*plan.topology.keys, plan.schedule.host))
        self.keys = list(self.device)
        self.colours = device_colours(plan.topology)
        self.operation, self.weight = _positions(self.graph.operations), _positions(self.graph.weights)
        self.seconds = run_seconds(plan.timeline)
        operations = self.graph.operations.values()
        self.modules = _positions(operation.module_path for operation in operations)
        self.sources = _positions(operation.source for operation in operations)
        self.groups: list[dict[str, Any]] = []

    def data(self) -> dict[str, Any]:
        stages = [self._group(group) for group in stage_groups(self.plan)]
        return {
            "summary": self._summary(),
            "time": self._time(),
            "inputs": [{"name": n, "shape": shape_text(self.graph.values[n])} for n in self.graph.inputs],
            "devices": [self._device(key) for key in self.keys],
            "phases": self._phases(),
            "links": self._links(),
            "stages": [
                {
                    "group": group,
                    "device": self.device[stage.device],
                    "modules": module_range(self.plan, stage),
                    "elsewhere": self._elsewhere(stage),
                }
                for group, stage in zip(stages, self.plan.stages, strict=True)
            ],
            "groups": self.groups,
            "operations": self._operations(),
            "weights": [self._weight(name) for name in self.graph.weights],
            "modules": list(self.modules),
            "sources": list(self.sources),
            "dependencies": self._dependencies(),
            "flows": self._flows(),
            "estimated": self._events(self.plan.timeline),
            "measured": None if self.measured is None else self._events(self.measured.timeline),
        }

    def _summary(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "method": plan.method,
            "call": self.graph.call,
            "makespan": plan.makespan,
            "lowerBound": plan.lower_bound,
            "gap": plan.gap,
            "proof": plan.proof,
            "transferBytes": plan.transfer_bytes,
            "transfers": len(plan.transfers),
            "streamedBytes": plan.streamed_bytes,
            "streams": len(plan.streams),
            "hiddenSeconds": plan.timeline.hidden_seconds,
            "weightBytes": self.graph.weight_bytes,
            "flops": self.graph.flops,
            "activationsKnown": plan.activations_known,
            "calls": len(plan.calls),
            "measuredSeconds": None if self.measured is None else self.measured.timeline.seconds,
        }

    def _time(self) -> dict[str, Any]:
        parts = time_parts(self.plan)
        return {**asdict(parts), "compute": [parts.compute[key] for key in self.keys]}

    # -- devices ----------------------------------------------------------------------------------

    def _device(self, key: DeviceKey) -> dict[str, Any]:
        plan = self.plan
        # the caller's device need not be one of the plan's
        spec = next((spec for spec in plan.topology.devices if spec.key == key), None)
        peak = plan.peaks[key]
        buffer = prefetch_bytes(plan.schedule.prefetch_buffers).get(key, 0)
        return {
            "key": str(key),
            "name": device_name(key),
            "device": CPU if spec is None else spec.device,
            "colours": self.colours[key],
            "budget": None if spec is None else spec.memory,
            "reserve": 0 if spec is None else spec.withheld,
            "peak": peak.nbytes,
            "peakAt": self._peak_position(peak.step),
            "weights": peak.weights - buffer,
            "buffer": buffer,
            "memory": self._memory(key),
            "speed": asdict(Speed.of(spec)) if spec is not None and spec.computes else None,
            "measuredPeak": None if self.measured is None else self.measured.peak_bytes.get(key),
        }

    def _links(self) -> list[dict[str, Any]]:
        """Return the links that the plan uses, with their assumed figures."""
        ends = dict.fromkeys((copy.source, copy.destination) for copy in self.plan.schedule.copies())
        return [
            {"from": self.device[a], "to": self.device[b], **asdict(self.plan.topology.link(a, b))}
            for a, b in ends
        ]

    def _peak_position(self, step: int) -> int:
        """Return how many operations run before a step."""
        return sum(isinstance(s, Run) for s in self.plan.schedule.steps[: max(0, step)])

    def _memory(self, key: DeviceKey) -> list[int]:
        """Return position among the operations and peak bytes from there on, for each change, flat."""
        line: list[int] = []
        position, most = 0, 0
        profile = self.plan.memory.profile[key]
        for step, nbytes in zip(self.plan.schedule.steps, profile, strict=True):
            most = max(most, nbytes)
            if isinstance(step, Run):
                if not line or line[-1] != most:
                    line += [position, most]
                position, most = position + 1, 0
        peak = self.plan.peaks[key]
        if peak.operation == OPTIMIZER:  # after all steps
            most = max(most, peak.nbytes)
        if most and (not line or line[-1] != most):
            line += [position, most]
        return line

    def _phases(self) -> list[dict[str, Any]]:
        """Return where the phases of a training step begin among its operations; none for a forward pass."""
        if not self.graph.trains:
            return []
        runs = [step.operation for step in self.plan.schedule.steps if isinstance(step, Run)]
        forward = sum(not self.graph.operations[name].backward for name in runs)
        starts = {"forward pass": 0, "backward pass": forward, "optimizer": len(runs)}
        return [{"name": name, "at": at} for name, at in starts.items()]

    # -- the tree ---------------------------------------------------------------------------------

    def _group(self, group: Group) -> int:
        index = len(self.groups)
        self.groups.append({})
        children = [
            -1 - self.operation[child] if isinstance(child, str) else self._group(child)
            for child in group.children
        ]
        operations = [self.graph.operations[name] for name in group.operations]
        reads = {name for operation in operations for name in operation.inputs if name in self.weight}
        self.groups[index] = {
            "kind": group.kind,
            "label": group.label,
            "path": group.path,
            "children": children,
            "count": len(operations),
            "seconds": sum(self.seconds.get(name, 0.0) for name in group.operations),
            "flops": sum(operation.flops for operation in operations),
            "made": sum(made_bytes(self.graph, operation) for operation in operations),
            "weights": sum(self.graph.weights[name].nbytes for name in reads),
        }
        return index

    def _elsewhere(self, stage: Stage) -> list[list[str]]:
        """Return other devices, and the cost of running a stage there."""
        reasons = self.remarks.elsewhere.get(stage.index, {})
        return [[device_name(key), text] for key, text in reasons.items()]

    def _operations(self) -> dict[str, list[Any]]:
        graph, assigned = self.graph, self.plan.schedule.assignment.operations
        every = list(graph.operations.values())
        return {
            "name": [operation.name for operation in every],
            "target": [operation.target for operation in every],
            "module": [self.modules[operation.module_path] for operation in every],
            "source": [self.sources[operation.source] for operation in every],
            "device": [self.device[assigned[operation.name]] for operation in every],
            "seconds": [self.seconds.get(operation.name, 0.0) for operation in every],
            "flops": [operation.flops for operation in every],
            "made": [made_bytes(graph, operation) for operation in every],
            "reads": [[self.weight[n] for n in operation.inputs if n in self.weight] for operation in every],
            "result": [", ".join(shape_text(graph.values[n]) for n in op.outputs) for op in every],
        }

    def _weight(self, name: str) -> dict[str, Any]:
        weight = self.graph.weights[name]
        return {
            "name": name,
            "names": [other for other in weight.names if other != name],
            "kind": weight.kind,
            "bytes": weight.nbytes,
            "shape": shape_text(weight),
            "home": self.device[self.plan.schedule.assignment.weights[name]],
            "partOf": weight.part_of,
        }

    # -- transfers and times ----------------------------------------------------------------------

    def _dependencies(self) -> list[int]:
        """Return the producer and the consumer of each edge, flat."""
        return [self.operation[end] for edge in self.graph.edges() for end in edge[:2]]

    def _flows(self) -> list[dict[str, Any]]:
        return [
            {
                "kind": flow.kind,
                "names": list(flow.names),
                "from": self.device[flow.source],
                "to": self.device[flow.destination],
                "bytes": flow.nbytes,
                "start": flow.start,
                "end": flow.end,
                "maker": None if flow.maker is None else self.operation[flow.maker],
                "reader": None if flow.reader is None else self.operation[flow.reader],
            }
            for flow in find_flows(self.plan)
        ]

    def _events(self, timeline: Timeline) -> dict[str, Any]:
        """Return events in columns; ``what`` is an operation's position, or the name of the copy's data."""
        events = timeline.events
        return {
            "seconds": timeline.seconds,
            "kind": [event.kind[0] for event in events],
            "device": [self.device[event.device] for event in events],
            "start": [event.start for event in events],
            "end": [event.end for event in events],
            "what": [
                self.operation.get(event.name, event.name) if event.kind == "run" else event.name
                for event in events
            ],
        }
