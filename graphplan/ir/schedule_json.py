"""A schedule as plain data, and back: the part of a plan's JSON that says what a call does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from graphplan.devices.topology import DeviceKey
from graphplan.ir.schedule import (
    Assignment,
    Load,
    Move,
    PrefetchBuffer,
    Release,
    Run,
    Schedule,
    Step,
    Wait,
)
from graphplan.versioned_json import decode

_STEPS: dict[str, type[Step]] = {
    "run": Run,
    "move": Move,
    "load": Load,
    "wait": Wait,
    "release": Release,
}


def encode_schedule(schedule: Schedule) -> dict[str, Any]:
    """Lists, numbers and text that say all of a schedule."""
    assignment = schedule.assignment
    return {
        "host": schedule.host,
        "returns_to_host": schedule.returns_to_host,
        "operations": [[name, key] for name, key in assignment.operations.items()],
        "weights": [[name, key] for name, key in assignment.weights.items()],
        "slots": [[key, count] for key, count in assignment.slots.items()],
        "prefetch_buffers": [asdict(buffer) for buffer in schedule.prefetch_buffers],
        "steps": [{"step": type(step).__name__.lower(), **asdict(step)} for step in schedule.steps],
    }


def decode_schedule(data: Mapping[str, Any]) -> Schedule:
    """The inverse; KeyError, TypeError or ValueError where it is damaged."""
    assignment = {name: data[name] for name in ("operations", "weights", "slots")}
    return Schedule(
        tuple(map(_decode_step, data["steps"])),
        decode(Assignment, assignment),
        decode(DeviceKey, data["host"]),
        decode(bool, data["returns_to_host"]),
        decode(tuple[PrefetchBuffer, ...], data["prefetch_buffers"]),
    )


def _decode_step(data: Mapping[str, Any]) -> Step:
    fields = dict(data)
    step: Step = decode(_STEPS[str(fields.pop("step"))], fields)
    return step
