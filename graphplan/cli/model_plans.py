"""Plan the model that the command line names, for devices that need not exist."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import graphplan
from graphplan.analysis.plan import Plan
from graphplan.analysis.plan_problem import plain_problem
from graphplan.cli.console import as_typed, working
from graphplan.cli.model_argument import NamedModel, model_errors
from graphplan.devices.speeds import Speed
from graphplan.devices.topology import Topology
from graphplan.errors import InfeasibleError
from graphplan.integrations.accelerate.comparison import Baseline, device_maps, ours
from graphplan.passes.placement.problem import Problem

_ROOMY = 1 << 50  # bytes of each device if only the graph is wanted


def compared(named: NamedModel, topology: Topology) -> list[Baseline]:
    """Return rows of graphplan's plan and of the device maps of accelerate and transformers."""
    with working(f"tracing and planning {named.name}"):
        row, problem = _judge_ours(named, topology)
    with working("computing the maps of accelerate and transformers"):
        no_split = sorted(getattr(named.model, "_no_split_modules", None) or ())
        return [row, *device_maps(problem, named.model, no_split)]


def _judge_ours(named: NamedModel, topology: Topology) -> tuple[Baseline, Problem]:
    """Return graphplan's row, and the problem for the others; without a plan, from one with more memory."""
    start = time.perf_counter()
    try:
        our_plan = planned(named, topology)
        return ours(our_plan, time.perf_counter() - start), plain_problem(our_plan)
    except InfeasibleError as error:
        row = Baseline("graphplan", error=as_typed(str(error)), planning=time.perf_counter() - start)
    roomy = topology.with_memory(dict.fromkeys(topology.keys, _ROOMY))
    return row, replace(plain_problem(planned(named, roomy)), topology=topology)


def planned(named: NamedModel, topology: Topology, **constraints: Any) -> Plan:
    """Return a plan for described devices; ``constraints`` are arguments of :func:`graphplan.plan`."""
    with model_errors():
        result: Plan = graphplan.plan(
            named.model,
            topology.budgets,
            named.args,
            named.kwargs,
            links=topology.links,
            devices={spec.key: Speed.of(spec) for spec in topology.computing},
            reserve={spec.key: spec.reserve for spec in topology.devices},
            **constraints,
        )
    return result
