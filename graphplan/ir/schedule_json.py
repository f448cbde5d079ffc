"""A schedule as plain data, and back: the part of a plan's JSON that says what a call does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from graphplan.ir.schedule import (
    Assignment,
    Load,
    Move,
    PrefetchBuffer,
    PrefetchSegment,
    Release,
    Run,
    Schedule,
    Step,
    Wait,
)

__all__ = ["decode_schedule", "encode_schedule"]

_STEPS: dict[str, Callable[..., Step]] = {
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
    parts = (dict(map(tuple, data[name])) for name in ("operations", "weights", "slots"))
    steps, prefetch_buffers = map(_decode_step, data["steps"]), map(_decode_buffer, data["prefetch_buffers"])
    return Schedule(
        tuple(steps), Assignment(*parts), data["host"], data["returns_to_host"], tuple(prefetch_buffers)
    )


def _decode_step(data: Mapping[str, Any]) -> Step:
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return _STEPS[str(fields.pop("step"))](**fields)


def _decode_buffer(data: Mapping[str, Any]) -> PrefetchBuffer:
    segments = (
        PrefetchSegment(tuple(s["weights"]), tuple(s["offsets"]), s["nbytes"], s["slot"], s["previous"])
        for s in data["segments"]
    )
    return PrefetchBuffer(
        data["device"], data["source"], tuple(data["slots"]), tuple(segments), data["nbytes"]
    )
