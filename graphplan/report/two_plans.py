"""Two plans of one model side by side: their figures, and operations and weights on different devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from graphplan.devices.topology import DeviceKey
from graphplan.errors import PlanError
from graphplan.ir.graph_difference import graph_difference
from graphplan.ir.plan_data import PlanData
from graphplan.report.data_flows import run_seconds
from graphplan.report.text import device_name
from graphplan.report.time_parts import time_parts

Pair = tuple[DeviceKey, DeviceKey]  # the device in the other plan, and in this one


def comparison(plan: PlanData, other: PlanData) -> dict[str, Any]:
    """Return the comparison with another plan for the page of a plan.

    Raises:
        PlanError: the other plan is of another graph.
    """
    difference = graph_difference(plan.graph, other.graph)
    if difference:
        raise PlanError(
            f"other=: a plan of another model or call: {difference}. Give a plan of the same model and "
            "example inputs; budgets, devices and constraints may differ"
        )
    return {
        "figures": [_figures(other), _figures(plan)],
        "memory": _memory(plan, other),
        "operations": _moved_operations(plan, other),
        "weights": _moved_weights(plan, other),
        "unmatched": [
            len(one.graph.operations.keys() - another.graph.operations.keys())
            for one, another in ((other, plan), (plan, other))
        ],
    }


def _figures(plan: PlanData) -> dict[str, Any]:
    parts = time_parts(plan)
    compute = {f"computing on {device_name(key)}": seconds for key, seconds in parts.compute.items()}
    return {
        "seconds": plan.makespan,
        "parts": {
            **compute,
            "transfers": parts.transfers,
            "waiting for weights": parts.streaming,
            "inputs and outputs": parts.inputs + parts.outputs,
        },
        "bytes": {"transferred": plan.transfer_bytes, "weights streamed": plan.streamed_bytes},
    }


def _memory(plan: PlanData, other: PlanData) -> list[dict[str, Any]]:
    """Return the peaks and budgets of each device of either plan; None if a plan lacks the device."""
    return [
        {
            "device": device_name(key),
            "peaks": [one.peak_bytes[key] if key in one.topology else None for one in (other, plan)],
            "budgets": [one.topology.budgets.get(key) for one in (other, plan)],
        }
        for key in dict.fromkeys((*plan.topology.keys, *other.topology.keys))
    ]


def _moved_operations(plan: PlanData, other: PlanData) -> list[dict[str, Any]]:
    ours, theirs = plan.schedule.assignment.operations, other.schedule.assignment.operations
    position = {name: index for index, name in enumerate(plan.graph.operations)}
    seconds = run_seconds(other.timeline), run_seconds(plan.timeline)
    paths = {name: operation.module_path for name, operation in plan.graph.operations.items()}
    return [
        {
            **ends,
            "operations": [position[name] for name in names],
            "seconds": [sum(seconds_of.get(name, 0.0) for name in names) for seconds_of in seconds],
        }
        for ends, names in _moved(ours, theirs, paths)
    ]


def _moved_weights(plan: PlanData, other: PlanData) -> list[dict[str, Any]]:
    ours, theirs = plan.schedule.assignment.weights, other.schedule.assignment.weights
    paths = {name: name.rpartition(".")[0] for name in plan.graph.weights}
    return [
        {**ends, "names": names, "bytes": sum(plan.graph.weights[name].nbytes for name in names)}
        for ends, names in _moved(ours, theirs, paths)
    ]


def _moved(
    ours: Mapping[str, DeviceKey], theirs: Mapping[str, DeviceKey], paths: Mapping[str, str]
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield what is on another device, grouped by the outermost modules that moved as a whole.

    Args:
        ours: name -> its device in this plan.
        theirs: likewise in the other plan.
        paths: name -> path of its module.

    Yields:
        module and devices as text, and the names, in the order of ``paths``.
    """
    pairs = {name: (theirs[name], ours[name]) for name in paths if name in theirs and name in ours}
    inside: dict[str, set[Pair]] = {}
    for name, pair in pairs.items():
        for path in _outwards(paths[name]):
            inside.setdefault(path, set()).add(pair)
    groups: dict[tuple[str, Pair], list[str]] = {}
    for name, pair in pairs.items():
        if pair[0] != pair[1]:
            whole = (path for path in _outwards(paths[name]) if len(inside[path]) == 1)
            groups.setdefault((next(whole, paths[name]), pair), []).append(name)
    for (path, (before, now)), names in groups.items():
        yield {"module": path or "(root)", "from": device_name(before), "to": device_name(now)}, names


def _outwards(path: str) -> Iterable[str]:
    """Return the modules of a path, the outermost first: ``a.b`` -> ``a``, ``a.b``."""
    return accumulate(path.split("."), "{}.{}".format)
