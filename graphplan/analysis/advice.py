"""What would help a plan, from a quick look: a sentence for the page.

More memory is tried as in :mod:`graphplan.analysis.bottleneck`, with less search. If it saves nothing, the
same schedule is timed with each link and each device twice as fast.
"""

from __future__ import annotations

from graphplan.analysis.bottleneck import WORTH, BottleneckSearch
from graphplan.analysis.sensitivity import Growth
from graphplan.ir.plan_data import PlanData
from graphplan.ir.timeline import call_seconds
from graphplan.warnings import unwarned

_LOOK = 0.15  # share of a plan's effort for all plans with more memory
_ROUGH = 0.25  # relative precision of the increase that is reported
_NARROWED = 700  # operations: with more, a search for fewer bytes takes seconds


def advice(plan: PlanData) -> str:
    """Return a sentence on what would save time; empty for the method ``"hooks"``."""
    if plan.method == "hooks":
        return ""
    search = BottleneckSearch(plan)
    trials = list(search.memory())
    search.share = _LOOK / max(1, len(trials))
    with unwarned("balance=True"):  # the plan itself has warned
        best = max((trial() for trial in trials), key=lambda growth: growth.gain, default=None)
        if best is not None and best.gain > WORTH * plan.weighted_makespan:
            narrowed = len(plan.graph.operations) <= _NARROWED
            return (search.with_fewest_bytes(best, _ROUGH) if narrowed else best).saving
    text = "a quick look found no gain from more memory"
    fastest = _fastest(search)
    return text if fastest is None else f"{text}; {fastest.saving}"


def _fastest(search: BottleneckSearch) -> Growth | None:
    """Return the link or device that saves most if it is twice as fast and nothing moves."""
    now, growths = search.now, []
    for what, devices in search.faster():
        topology = search.topology_with_faster(what, devices)
        seconds = sum(
            one.call_weight * call_seconds(one.graph, topology, one.schedule) for one in search.plan.calls
        )
        growths.append(Growth(what, devices, (), 0, seconds, now - seconds))
    useful = (growth for growth in growths if growth.gain > WORTH * now)
    return max(useful, key=lambda growth: growth.gain, default=None)
