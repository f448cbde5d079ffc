"""A plan as JSON text: written whole, checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from graphplan.devices.topology import DeviceKey, DeviceSpec, Link, Topology
from graphplan.errors import GraphplanError, PlanError
from graphplan.ir.constraints import Constraints
from graphplan.ir.graph import Graph
from graphplan.ir.plan_data import PlanData
from graphplan.ir.schedule_json import decode_schedule, encode_schedule
from graphplan.versioned_json import Format, decode

AnyPlan = TypeVar("AnyPlan", bound=PlanData)

_FORMAT = Format("graphplan.plan", 3, "plan")


def write_plan(plan: PlanData) -> str:
    """A plan as text."""
    return json.dumps(_encode(plan), indent=1)


def read_plan(cls: type[AnyPlan], text: str) -> AnyPlan:
    """The plan that a text is.

    Args:
        cls: of the plan.
        text: as :func:`write_plan` writes it.

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
    topology, schedule = plan.topology, plan.schedule
    return {
        **_FORMAT.head(),
        "method": plan.method,
        "makespan": plan.makespan,
        "lower_bound": plan.lower_bound,
        "proof": plan.proof,
        "peak_bytes": [[key, nbytes] for key, nbytes in plan.peak_bytes.items()],
        "devices": [asdict(spec) for spec in topology.devices],
        "links": [[a, b, asdict(link)] for (a, b), link in topology.links.items()],
        "default_link": asdict(topology.default_link),
        **encode_schedule(schedule),
        "graph": plan.graph.to_dict(),
        "constraints": asdict(plan.constraints),
        "fixed_weights": dict(plan.fixed_weights),
        "call_weight": plan.call_weight,
        "others": [_encode(other) for other in plan.others],
        "shared_prefetch_bytes": [[key, nbytes] for key, nbytes in plan.shared_prefetch_bytes.items()],
        "prefetch_limits": [[key, nbytes] for key, nbytes in plan.prefetch_limits.items()],
        "streaming": plan.streaming,
    }


def _decode(cls: type[AnyPlan], data: Mapping[str, Any]) -> AnyPlan:
    links = {(decode(DeviceKey, a), decode(DeviceKey, b)): decode(Link, link) for a, b, link in data["links"]}
    devices, default_link = (
        decode(tuple[DeviceSpec, ...], data["devices"]),
        decode(Link, data["default_link"]),
    )
    return cls(
        Graph.from_dict(data["graph"]),
        Topology(devices, links, default_link),
        decode_schedule(data),
        decode(float, data["makespan"]),
        decode(float, data["lower_bound"]),
        decode(str, data["proof"]),
        decode(str, data["method"]),
        decode(Constraints, data["constraints"]),
        decode(Mapping[str, DeviceKey], data["fixed_weights"]),
        decode(float, data["call_weight"]),
        tuple(_from_data(cls, _FORMAT.checked(other)) for other in data["others"]),
        decode(Mapping[DeviceKey, int], data["shared_prefetch_bytes"]),
        decode(Mapping[DeviceKey, int], data["prefetch_limits"]),
        decode(bool, data["streaming"]),
    )
