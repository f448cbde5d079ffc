"""What several commands do: read the words about devices, build a model, plan, write."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import graphplan
from graphplan.analysis.plan import Plan
from graphplan.cli.model_argument import NamedModel
from graphplan.cli.option_parsing import read_budgets, read_links, read_measurements, read_speeds
from graphplan.devices.max_memory import read_max_memory
from graphplan.devices.speeds import Speed, with_speeds
from graphplan.devices.topology import DeviceKey, Topology
from graphplan.errors import DeviceError, InfeasibleError
from graphplan.integrations.accelerate.comparison import Baseline, ours
from graphplan.passes.placement.problem import Problem

__all__ = ["judge_ours", "plan_named", "read_topology", "write_plan"]

_ROOMY = 1 << 50  # bytes of each device where only the graph is wanted


def judge_ours(named: NamedModel, topology: Topology) -> tuple[list[Baseline], Problem]:
    """Our row, and the problem for the others: of our graph, or without a plan of one with more room."""
    start = time.perf_counter()
    try:
        found = plan_named(named, topology)
        return [ours(found, time.perf_counter() - start)], found.plain_problem
    except InfeasibleError as error:
        row = Baseline("graphplan", error=str(error), planning=time.perf_counter() - start)
    roomy = topology.with_memory(dict.fromkeys(topology.keys, _ROOMY))
    return [row], replace(plan_named(named, roomy).plain_problem, topology=topology)


def plan_named(
    named: NamedModel,
    topology: Topology,
    *,
    pin: Mapping[str, DeviceKey] | None = None,
    offload: bool = True,
    balance: bool = False,
    time_limit: float | None = None,
) -> Plan:
    """A plan for devices that have been described; the constraints are those of :func:`graphplan.plan`."""
    return graphplan.plan(
        named.model,
        {spec.key: spec.memory for spec in topology.devices},
        named.args,
        named.kwargs,
        links=topology.links,
        devices={s.key: Speed(s.flops, s.bandwidth, s.overhead) for s in topology.devices if s.computes},
        reserve={spec.key: spec.reserve for spec in topology.devices},
        pin=pin,
        offload=offload,
        balance=balance,
        time_limit=time_limit,
    )


def read_topology(
    max_memory: list[str] | None,
    device: list[str] | None,
    link: list[str] | None,
    measured: Path | None,
    reserve: str,
) -> Topology:
    """The devices that the words of a command describe."""
    budgets = read_budgets(max_memory or ())
    links = read_links(link or (), budgets)
    if measured is not None and device:
        raise DeviceError("give --measured or --device, not both")
    speeds = read_speeds(device or ()) if measured is None else read_measurements(measured)
    return with_speeds(read_max_memory(budgets, links, reserve), speeds or None)


def write_plan(found: Plan, out: Path | None, html: Path | None, title: str) -> None:
    """Write a plan to the files that were asked for."""
    if out is not None:
        found.save_json(out)
    if html is not None:
        found.save_html(html, title=title)
