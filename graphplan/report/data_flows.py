"""Data flow between operations: the copies of a schedule, each from its producer to its first reader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphplan.devices.topology import DeviceKey
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule import Load, Move, Run
from graphplan.ir.timeline import Event, Timeline


@dataclass(frozen=True, slots=True)
class Flow:
    """One copy between devices.

    Attributes:
        kind: ``"activation"``, ``"weight"``, ``"input"``, ``"output"``, ``"writeback"`` or ``"gradient"``.
        names: the value, or the weights that are copied together.
        source: device that it is copied from.
        destination: device that it is copied to.
        nbytes: bytes of the copy.
        start: estimated seconds since the forward pass began.
        end: likewise.
        maker: the operation that made the value; None for inputs and weights.
        reader: the first operation there that reads it; None if none does, as for outputs.
    """

    kind: str
    names: tuple[str, ...]
    source: DeviceKey
    destination: DeviceKey
    nbytes: int
    start: float
    end: float
    maker: str | None
    reader: str | None


def run_seconds(timeline: Timeline) -> dict[str, float]:
    """Return operation -> its seconds."""
    return {event.name: event.end - event.start for event in timeline.events if event.kind == "run"}


def made_bytes(graph: Graph, operation: Operation) -> int:
    """Return the bytes of an operation's outputs."""
    return sum(graph.values[name].nbytes for name in operation.outputs)


def timed_steps(plan: PlanData) -> Iterator[tuple[Run | Move | Load, Event]]:
    """Yield each step that takes time, except waits, with its event in the timeline."""
    events = iter(event for event in plan.timeline.events if event.kind != "wait")
    for step in plan.schedule.steps:
        if isinstance(step, Run | Move | Load):
            yield step, next(events)


def find_flows(plan: PlanData) -> tuple[Flow, ...]:
    """Return every copy of one forward pass, in order."""
    flows: list[Flow] = []
    unread: dict[tuple[str, DeviceKey], int] = {}  # not read since its copy -> index of the copy
    for step, event in timed_steps(plan):
        if isinstance(step, Run):
            for name in plan.graph.operations[step.operation].inputs:
                index = unread.pop((name, step.device), None)
                if index is not None and flows[index].reader is None:
                    flows[index] = replace(flows[index], reader=step.operation)
            continue
        names = step.weights if isinstance(step, Load) else (step.value,)
        kind = "weight" if isinstance(step, Load) else step.kind
        maker = None if kind in ("weight", "input") else plan.graph.producer.get(names[0])
        if kind not in ("output", "writeback"):
            unread.update({(name, step.destination): len(flows) for name in names})
        ends = (event.start, event.end, maker, None)
        flows.append(Flow(kind, names, step.source, step.destination, step.nbytes, *ends))
    return tuple(flows)
