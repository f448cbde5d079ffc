"""Placements of the least latency, with a proof where one is within reach.

1. Nodes are merged into groups: colour classes; a class whose nodes would not finish together on the
   CPU is treated in two cases, on an accelerator (merged) and on the CPU (each node by itself).
2. Where all ideals can be listed, a dynamic program over them is exact.
3. Else chains of nodes are merged at random, never across a cut of the best placement so far, and
   the program solves what is left, with few labels per ideal; again and again. Then the program
   over all ideals looks for anything below a target: if there is nothing, the target is a bound.
4. If the graph without nodes that take no time and next to no memory is small enough, its optimum is
   a lower bound, and its placement is completed to one of the whole graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from dnn_ideals import Groups, TooManyIdealsError, colours_and, enumerate_ideals, ideals_of_orders, merge
from dnn_latency_dp import Chain, solve
from dnn_tables import Progress, Tables, completions
from dnn_workload import CPU, InvalidPlacementError, Workload, latency

EXACT_IDEALS = 8000
BOUND_IDEALS = 50000
BOUND_LABELS = 50_000
TARGETS = (0.8, 0.85, 0.9)
SMALL = 0.001


@dataclass(frozen=True)
class LatencyResult:
    """A placement, its latency by the exact evaluator, a lower bound, and what shows it."""

    placement: tuple[int, ...]
    latency: float
    start: float
    bound: float
    proof: str


def place(workload: Workload, work: int, progress: Progress = iter) -> LatencyResult:
    """The best placement found with ``work`` rounds of search where no exact method ends."""
    start = order_start(workload)
    for attempt in (_exact, _relaxed):
        result = attempt(workload, start, progress)
        if result is not None:
            return result
    return _searched(workload, start, work, progress)


def order_start(workload: Workload) -> list[int]:
    """The best contiguous slices of five topological orders, CPU slices included (the table's own method)."""
    groups = merge(workload, colours_and(workload))
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(groups)))
    graph.add_edges_from((p, v) for v, ps in enumerate(groups.predecessors) for p in ps)
    height = dict.fromkeys(graph, 0)
    for v in reversed(list(nx.topological_sort(graph))):
        height[v] = 1 + max((height[s] for s in graph.successors(v)), default=0)
    keys: list[Callable[[int], float]] = [
        lambda v: v,
        lambda v: -v,
        lambda v: -height[v],
        lambda v: groups.size[v],
    ]
    orders = [list(nx.lexicographical_topological_sort(graph, key=key)) for key in keys]
    orders.append(list(reversed(list(nx.dfs_postorder_nodes(graph)))))
    chains = []
    for order in orders:
        chain = solve(
            groups, ideals_of_orders(groups, [order]), workload.limit, workload.accelerators, width=4
        )
        if chain is not None and chain.steps:
            chains.append(chain)
    return spread(workload, groups, min(chains, key=lambda c: c.latency))


def spread(workload: Workload, groups: Groups, chain: Chain) -> list[int]:
    """A chain's steps as devices of the nodes."""
    placement = [CPU] * len(workload)
    accelerator = 0
    for step in chain.steps:
        for g in step.groups:
            for v in groups.members[g]:
                placement[v] = accelerator if step.on_accelerator else CPU
        accelerator += step.on_accelerator
    return placement


def _exact(workload: Workload, start: Sequence[int], progress: Progress) -> LatencyResult | None:
    best, value = list(start), latency(workload, start)
    count = 0
    lossy = _lossy(workload)
    if len(lossy) > 3:
        return None
    for cases in itertools.product((False, True), repeat=len(lossy)):
        apart = {c for c, on_cpu in zip(lossy, cases, strict=True) if on_cpu}
        try:
            groups = merge(workload, colours_and(workload, apart=apart), cpu_only=apart)
            ideals = enumerate_ideals(groups, EXACT_IDEALS)
        except TooManyIdealsError:
            return None
        count += len(ideals)
        chain = solve(groups, ideals, workload.limit, workload.accelerators, upper=value, progress=progress)
        if chain is not None:
            best = spread(workload, groups, chain)
            value = latency(workload, best)
    proof = f"optimal: dynamic program over all {count} ideals, no label dropped but by dominance and bound"
    return LatencyResult(tuple(best), value, latency(workload, start), value, proof)


def _lossy(workload: Workload) -> list[int]:
    """Colour classes that, on the CPU, do not act as one unit: an exit is ready before all of it is."""
    classes: dict[int, list[int]] = {}
    for v, colour in enumerate(workload.colour):
        classes.setdefault(colour, []).append(v)
    return [c for c, nodes in classes.items() if len(nodes) > 1 and not _one_unit(workload, nodes)]


def _one_unit(workload: Workload, nodes: Sequence[int]) -> bool:
    inside = nx.DiGraph()
    inside.add_nodes_from(nodes)
    inside.add_edges_from((u, v) for u in nodes for v in workload.successors[u] if v in inside)
    order = list(nx.topological_sort(inside))
    entries: list[int | None] = [v for v in nodes if any(u not in inside for u in workload.predecessors[v])]
    exits = [
        v for v in nodes if not workload.successors[v] or any(s not in inside for s in workload.successors[v])
    ]
    times = []
    for entry in entries or [None]:
        ready: dict[int, float] = {}
        for v in order:
            before = [ready[u] for u in inside.predecessors(v) if u in ready]
            if v == entry or entry is None:
                before.append(0.0)
            if before:
                ready[v] = max(before) + workload.cpu[v]
        times += [ready.get(v) for v in exits]
    return None not in times and max(times) - min(times) < 1e-12


def without_free_nodes(workload: Workload) -> tuple[list[int], Workload]:
    """Drop sources and sinks that take no time and at most a thousandth of the memory, repeatedly.

    Any placement of the whole is one of the rest that takes no longer: a dropped node had cost only
    transfers and memory. So the optimum of the rest is a lower bound.
    """
    keep = set(range(len(workload)))
    while True:
        drop = {
            v
            for v in keep
            if workload.cpu[v] == workload.accelerator[v] == 0
            and workload.size[v] <= SMALL * workload.limit
            and not (
                keep.intersection(workload.predecessors[v]) and keep.intersection(workload.successors[v])
            )
        }
        if not drop:
            break
        keep -= drop
    kept = sorted(keep)
    index = {v: i for i, v in enumerate(kept)}
    per_node = ("ids", "cpu", "accelerator", "size", "cost", "colour", "backward", "supported")
    fields = {name: tuple(getattr(workload, name)[v] for v in kept) for name in per_node}
    edges = tuple((index[u], index[v]) for u, v in workload.edges if u in index and v in index)
    return kept, dataclasses.replace(workload, edges=edges, **fields)


def _relaxed(workload: Workload, start: Sequence[int], progress: Progress) -> LatencyResult | None:
    kept, rest = without_free_nodes(workload)
    if len(kept) == len(workload):
        return None
    solved = _exact(rest, order_start(rest), progress)
    if solved is None:
        return None
    placement = [CPU] * len(workload)
    for v, device in zip(kept, solved.placement, strict=True):
        placement[v] = device
    placement = _settle(workload, placement, [v for v in range(len(workload)) if v not in set(kept)])
    value = latency(workload, placement)
    before = latency(workload, start)
    if value > before:
        placement, value = list(start), before
    kind = "optimal" if value <= solved.bound * (1 + 1e-9) else "bound"
    proof = f"{kind}: {solved.proof.removeprefix('optimal: ')}, of the graph without free nodes"
    return LatencyResult(tuple(placement), value, before, solved.bound, proof)


def _settle(workload: Workload, placement: list[int], free: Sequence[int]) -> list[int]:
    """Move the free nodes, one at a time, to whichever device lowers the latency most, until none does."""
    value = _latency_or_inf(workload, placement)
    improved = True
    while improved:
        improved = False
        for v in [*free, *reversed(free)]:
            near = {placement[u] for u in (*workload.predecessors[v], *workload.successors[v])}
            for device in sorted(near - {placement[v]}):
                trial = placement.copy()
                trial[v] = device
                other = _latency_or_inf(workload, trial)
                if other < value - 1e-9:
                    placement, value, improved = trial, other, True
    return placement


def _latency_or_inf(workload: Workload, placement: Sequence[int]) -> float:
    try:
        return latency(workload, placement)
    except InvalidPlacementError:
        return np.inf


def _search(workload: Workload, start: Sequence[int], work: int, progress: Progress) -> list[int]:
    """Ruin and recreate: merge at random chains that the best placement does not cut, solve the rest."""
    rng = random.Random(0)
    best, value = list(start), latency(workload, start)
    chains = [
        (u, v)
        for u, v in workload.edges
        if len(workload.successors[u]) == 1 and len(workload.predecessors[v]) == 1
    ]
    for _ in progress(range(work)):
        on_cpu, on_accelerator = rng.choice((0.4, 0.6, 0.8)), rng.choice((0.6, 0.8, 0.9))
        pairs = [
            (u, v)
            for u, v in chains
            if best[u] == best[v] and rng.random() < (on_cpu if best[u] < 0 else on_accelerator)
        ]
        groups = merge(workload, colours_and(workload, pairs))
        try:
            ideals = enumerate_ideals(groups, EXACT_IDEALS // 2)
        except TooManyIdealsError:
            continue
        chain = solve(groups, ideals, workload.limit, workload.accelerators, upper=value, width=4)
        if chain is not None and chain.steps:
            trial = spread(workload, groups, chain)
            if latency(workload, trial) < value:
                best, value = trial, latency(workload, trial)
    return best


def _searched(workload: Workload, start: Sequence[int], work: int, progress: Progress) -> LatencyResult:
    """Search over merged chains; then show, target after target, that no chain at all is below it."""
    placement = _search(workload, start, work, progress)
    value, before = latency(workload, placement), latency(workload, start)
    groups = merge(workload, colours_and(workload))
    bound, proof = _longest_cheapest_path(workload), "bound: longest path of the cheapest nodes"
    if _lossy(workload):
        return LatencyResult(tuple(placement), value, before, bound, proof)
    try:
        ideals = enumerate_ideals(groups, BOUND_IDEALS)
    except TooManyIdealsError:
        return LatencyResult(tuple(placement), value, before, bound, proof)
    rest = completions(Tables(groups, ideals), workload.limit, workload.accelerators, progress)
    bound, proof = float(rest[0, -1]), f"bound: relaxed program over all {len(ideals)} ideals"
    for share in TARGETS:
        chain = solve(
            groups,
            ideals,
            workload.limit,
            workload.accelerators,
            upper=share * value,
            most=BOUND_LABELS * work,
            rest=rest,
            progress=progress,
        )
        if chain is not None:
            break
        bound = max(bound, share * value)
        proof = f"bound: no chain of all {len(ideals)} ideals is below it, by the same dynamic program"
    if chain is not None and chain.steps:
        placement = spread(workload, groups, chain)
        value = bound = latency(workload, placement)
    if bound >= value * (1 - 1e-9):
        proof = proof.replace("bound:", "optimal:")
    return LatencyResult(tuple(placement), value, before, bound, proof)


def _longest_cheapest_path(workload: Workload) -> float:
    graph = nx.DiGraph(workload.edges)
    graph.add_nodes_from(range(len(workload)))
    ready: dict[int, float] = {}
    for v in nx.topological_sort(graph):
        least = min(workload.cpu[v], workload.accelerator[v]) if workload.supported[v] else workload.cpu[v]
        ready[v] = least + max((ready[u] for u in workload.predecessors[v]), default=0.0)
    return max(ready.values())
