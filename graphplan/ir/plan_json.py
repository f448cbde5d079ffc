"""A plan as JSON text: written whole, checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from graphplan.devices.topology import DeviceKey, DeviceSpec, Link, Topology
from graphplan.errors import GraphplanError, PlanError
from graphplan.ir.graph import Graph
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule import Assignment, Load, Move, PrefetchBuffer, Release, Run, Schedule, Step, Wait
from graphplan.versioned_json import Format, decode, decode_fields, encode

AnyPlan = TypeVar("AnyPlan", bound=PlanData)

_FORMAT = Format("graphplan.plan", 3, "plan")
_FIELDS = (
    "method",
    "makespan",
    "lower_bound",
    "proof",
    "constraints",
    "call_weight",
    "shared_prefetch_bytes",
    "prefetch_limits",
    "streaming",
)
"""Of a plan, those that are written as they are."""

_PLACES = ("operations", "weights", "slots")  # of an assignment
_STEPS: dict[str, type[Step]] = {kind.__name__.lower(): kind for kind in (Run, Move, Load, Wait, Release)}


def write_plan(plan: PlanData) -> str:
    """A plan as text."""
    return json.dumps(_encode(plan), indent=1)


def read_plan(cls: type[AnyPlan], text: str) -> AnyPlan:
    """The plan, of a class, that :func:`write_plan` wrote.

    Raises:
        PlanError: the text is no plan, one of an unknown version, or one that does not add up.
    """
    return _from_data(cls, _FORMAT.parse(text))


def _from_data(cls: type[AnyPlan], data: Mapping[str, Any]) -> AnyPlan:
    try:
        made = _decode(cls, data)
        made.verify()
        peaks = [[key, nbytes] for key, nbytes in made.peak_bytes.items()]
    except (KeyError, TypeError, ValueError, AttributeError, GraphplanError) as error:
        raise PlanError(f"this plan is damaged: {type(error).__name__}: {error}") from error
    if peaks != data.get("peak_bytes"):
        raise PlanError(f"this plan is damaged: its steps take {peaks}, it says {data.get('peak_bytes')}")
    return made


def _encode(plan: PlanData) -> dict[str, Any]:
    topology = plan.topology
    return {
        **_FORMAT.head(),
        **{name: encode(getattr(plan, name)) for name in (*_FIELDS, "peak_bytes")},
        "fixed_weights": dict(plan.fixed_weights),
        "devices": encode(topology.devices),
        "links": [[a, b, encode(link)] for (a, b), link in topology.links.items()],
        "default_link": encode(topology.default_link),
        **_encode_schedule(plan.schedule),
        "graph": plan.graph.to_dict(),
        "others": [_encode(other) for other in plan.others],
    }


def _decode(cls: type[AnyPlan], data: Mapping[str, Any]) -> AnyPlan:
    links = {(decode(DeviceKey, a), decode(DeviceKey, b)): decode(Link, link) for a, b, link in data["links"]}
    devices = decode(tuple[DeviceSpec, ...], data["devices"])
    return cls(
        graph=Graph.from_dict(data["graph"]),
        topology=Topology(devices, links, decode(Link, data["default_link"])),
        schedule=_decode_schedule(data),
        others=tuple(_from_data(cls, _FORMAT.checked(other)) for other in data["others"]),
        **decode_fields(PlanData, (*_FIELDS, "fixed_weights"), data),
    )


def _encode_schedule(schedule: Schedule) -> dict[str, Any]:
    """Lists, numbers and text that say all of a schedule."""
    assignment = schedule.assignment
    return {
        "host": schedule.host,
        "returns_to_host": schedule.returns_to_host,
        **{name: encode(getattr(assignment, name)) for name in _PLACES},
        "prefetch_buffers": encode(schedule.prefetch_buffers),
        "steps": [{"step": type(step).__name__.lower(), **encode(step)} for step in schedule.steps],
    }


def _decode_schedule(data: Mapping[str, Any]) -> Schedule:
    """The inverse; KeyError, TypeError or ValueError where it is damaged."""
    return Schedule(
        tuple(map(_decode_step, data["steps"])),
        Assignment(**decode_fields(Assignment, _PLACES, data)),
        decode(DeviceKey, data["host"]),
        decode(bool, data["returns_to_host"]),
        decode(tuple[PrefetchBuffer, ...], data["prefetch_buffers"]),
    )


def _decode_step(data: Mapping[str, Any]) -> Step:
    fields = dict(data)
    step: Step = decode(_STEPS[str(fields.pop("step"))], fields)
    return step
