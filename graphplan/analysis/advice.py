"""What would help a plan, from a quick look: a sentence for the page.

More memory is tried as :mod:`graphplan.analysis.bottleneck` does, with less search. Where it saves nothing,
the same schedule is timed with each link and each device twice as fast.
"""

from __future__ import annotations

from graphplan.analysis.bottleneck import WORTH, BottleneckSearch
from graphplan.analysis.sensitivity import Growth
from graphplan.ir.plan_data import PlanData
from graphplan.ir.timeline import call_seconds
from graphplan.warnings import unwarned

_LOOK = 0.15  # of a plan's effort, for the plans with more memory
_ROUGH = 0.25  # of the increase that is reported
_NARROWED = 700  # operations: beyond, to look for fewer bytes takes seconds


def advice(plan: PlanData) -> str:
    """A sentence on what would save time; empty for what hooks run."""
    if plan.method == "hooks":
        return ""
    search = BottleneckSearch(plan)
    trials = list(search.memory())
    search.share = _LOOK / max(1, len(trials))
    with unwarned("balance=True"):  # the plan itself has said so
        best = max((trial() for trial in trials), key=lambda growth: growth.gain, default=None)
        if best is not None and best.gain > WORTH * plan.weighted_makespan:
            narrowed = len(plan.graph.operations) <= _NARROWED
            return (search.with_fewest_bytes(best, _ROUGH) if narrowed else best).saving
    said = "a quick look found no gain from more memory"
    fastest = _fastest(search)
    return said if fastest is None else f"{said}; {fastest.saving}"


def _fastest(search: BottleneckSearch) -> Growth | None:
    """The link or device that saves most if it is twice as fast, everything staying where it is."""
    now, found = search.now, []
    for what, devices in search.faster():
        topology = search.topology_with_faster(what, devices)
        seconds = sum(
            one.call_weight * call_seconds(one.graph, topology, one.schedule) for one in search.plan.calls
        )
        found.append(Growth(what, devices, (), 0, seconds, now - seconds))
    useful = (growth for growth in found if growth.gain > WORTH * now)
    return max(useful, key=lambda growth: growth.gain, default=None)
