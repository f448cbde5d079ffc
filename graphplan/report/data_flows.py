"""What passes between operations: the copies of a schedule, each from its maker to its first reader."""

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
        names: the value, or the weights that are copied in one go.
        source: where from.
        destination: where to.
        nbytes: bytes of the copy.
        start: estimated seconds since the call began.
        end: estimated seconds since the call began.
        maker: the operation that made the value; None for inputs and weights.
        reader: the first operation there that reads it; None where none does, as for outputs.
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
    """Operation -> the seconds that it takes."""
    return {event.name: event.end - event.start for event in timeline.events if event.kind == "run"}


def made_bytes(graph: Graph, operation: Operation) -> int:
    """Bytes of an operation's outputs."""
    return sum(graph.values[name].nbytes for name in operation.outputs)


def timed_steps(plan: PlanData) -> Iterator[tuple[Run | Move | Load, Event]]:
    """Each step that takes time, but for waits, with its estimated event."""
    events = iter(event for event in plan.timeline.events if event.kind != "wait")
    for step in plan.schedule.steps:
        if isinstance(step, Run | Move | Load):
            yield step, next(events)


def find_flows(plan: PlanData) -> tuple[Flow, ...]:
    """Every copy of one call, in order."""
    found: list[Flow] = []
    coming: dict[tuple[str, DeviceKey], int] = {}  # what has arrived and was not read yet
    for step, event in timed_steps(plan):
        if isinstance(step, Run):
            for name in plan.graph.operations[step.operation].inputs:
                index = coming.pop((name, step.device), None)
                if index is not None and found[index].reader is None:
                    found[index] = replace(found[index], reader=step.operation)
            continue
        names = step.weights if isinstance(step, Load) else (step.value,)
        kind = "weight" if isinstance(step, Load) else step.kind
        maker = None if kind in ("weight", "input") else plan.graph.producer.get(names[0])
        if kind not in ("output", "writeback"):
            coming.update({(name, step.destination): len(found) for name in names})
        ends = (event.start, event.end, maker, None)
        found.append(Flow(kind, names, step.source, step.destination, step.nbytes, *ends))
    return tuple(found)
