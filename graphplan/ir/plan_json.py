"""Encode a plan as JSON data; decode it, and verify it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from graphplan.errors import GraphplanError, PlanError
from graphplan.ir.graph import Graph
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule import Load, Move, Release, Run, Schedule, Step, Wait
from graphplan.versioned_json import Format, decode, decode_fields, encode, encode_fields, fields_but

AnyPlan = TypeVar("AnyPlan", bound=PlanData)

PLAN_FORMAT = Format("graphplan.plan", 5, "plan")
_FIELDS = fields_but(PlanData, "graph", "schedule", "others")
_STEPS: dict[str, type[Step]] = {kind.__name__.lower(): kind for kind in (Run, Move, Load, Wait, Release)}


def decode_plan(cls: type[AnyPlan], data: Any) -> AnyPlan:
    """Return the plan of class ``cls`` that :func:`encode_plan` has encoded.

    Raises:
        PlanError: the data is not a plan, has an unknown version, or fails the plan's checks.
    """
    try:
        data, schedule_fields = PLAN_FORMAT.checked(data), fields_but(Schedule, "steps")
        steps = tuple(map(_decode_step, data["schedule"]["steps"]))
        plan = cls(
            graph=Graph.from_dict(data["graph"]),
            schedule=Schedule(steps, **decode_fields(Schedule, schedule_fields, data["schedule"])),
            others=tuple(decode_plan(cls, other) for other in data["others"]),
            **decode_fields(PlanData, _FIELDS, data),
        )
        plan.verify()
        peaks = [[key, nbytes] for key, nbytes in plan.peak_bytes.items()]
    except (KeyError, TypeError, ValueError, AttributeError, GraphplanError) as error:
        raise PlanError(f"this plan is damaged: {type(error).__name__}: {error}") from error
    if peaks != data.get("peak_bytes"):
        raise PlanError(f"this plan is damaged: its steps take {peaks}, but it says {data.get('peak_bytes')}")
    return plan


def encode_plan(plan: PlanData) -> dict[str, Any]:
    """Return a plan as JSON data."""
    steps = [{"step": type(step).__name__.lower(), **encode(step)} for step in plan.schedule.steps]
    return {
        **PLAN_FORMAT.head(),
        **encode_fields(plan, (*_FIELDS, "peak_bytes")),
        "schedule": {**encode_fields(plan.schedule, fields_but(Schedule, "steps")), "steps": steps},
        "graph": plan.graph.to_dict(),
        "others": list(map(encode_plan, plan.others)),
    }


def _decode_step(data: Mapping[str, Any]) -> Step:
    fields = dict(data)
    step: Step = decode(_STEPS[str(fields.pop("step"))], fields)
    return step
